"""A proxy that loses the reply to a commit: the request was passed on, and nobody hears what came of it."""

import socket

from tests.postgres.proxy import CuttingProxy, Moment, _close

WRITER = b" w\x00"
"""So ends the name of a connection that writes, in its first message."""


class LosingProxy(CuttingProxy):
    """Cuts a writing connection after its request was passed on, as often as it was told to."""

    def __init__(self, target: str) -> None:
        self.to_lose = 0
        self.lost = 0
        self._writers: set[socket.socket] = set()
        self._robbed: set[socket.socket] = set()
        super().__init__(target)

    def _pass_on(self, source: socket.socket, target: socket.socket, moment: Moment) -> None:
        try:
            while data := source.recv(1 << 16):
                if moment == "request":
                    self._look_at(source, data)
                elif target in self._robbed:
                    self.lost += 1
                    break
                target.sendall(data)
        except OSError:
            pass
        with self._lock:
            self._writers -= {source, target}
            self._robbed -= {source, target}
        _close(source)
        _close(target)

    def _look_at(self, client: socket.socket, data: bytes) -> None:
        with self._lock:
            if WRITER in data[:400]:
                self._writers.add(client)
            elif self.to_lose and client in self._writers and client not in self._robbed:
                self.to_lose -= 1
                self._robbed.add(client)
