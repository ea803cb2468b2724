"""A proxy between a store and its server that cuts connections at chosen moments: replies are lost, or requests."""

import socket
import threading
from collections.abc import Callable
from typing import Literal

Moment = Literal["request", "reply"]


class CuttingProxy:
    """Passes bytes on until it is told to cut. It listens on a loopback port."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cuts = 0
        self._lock = threading.Lock()
        self._wanted: Callable[[Moment, bytes], bool] | None = None
        self._open: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_once(self, moment: Moment, text: bytes) -> None:
        """Cut the connection when a request with these bytes passes: before it arrives, or before its reply does."""
        state = {"seen": False}

        def wanted(now: Moment, data: bytes) -> bool:
            if now == "request" and text in data:
                state["seen"] = True
                return moment == "request"
            return now == "reply" and moment == "reply" and state["seen"]

        with self._lock:
            self._wanted = wanted

    def cut_all(self) -> None:
        """Cut every connection now."""
        with self._lock:
            cut, self._open = self._open, []
        for one in cut:
            _close(one)

    def close(self) -> None:
        """End."""
        self._closed = True
        _close(self._listener)
        self.cut_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._target)
            except OSError:
                _close(client)
                continue
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server, "request"), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, "reply"), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, moment: Moment) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    cuts = self._wanted is not None and self._wanted(moment, data)
                    if cuts:
                        self._wanted = None
                        self.cuts += 1
                if cuts:
                    break
                target.sendall(data)
        except OSError:
            pass
        _close(source)
        _close(target)


def _close(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()
