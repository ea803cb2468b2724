"""A process that passes bytes on to a server's socket: python forwarder.py ADDRESS SOCKET. It prints its port.

Stopped with SIGSTOP it is a network that swallows everything in both directions and says nothing to either side; woken
up it delivers what was on its way.
"""

import socket
import sys
import threading


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until one side ends."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def main(address: str, path: str) -> None:
    """Serve for ever."""
    listener = socket.create_server((address, 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
        except OSError:
            client.close()
            continue
        for pair in ((client, server), (server, client)):
            threading.Thread(target=pass_on, args=pair, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
