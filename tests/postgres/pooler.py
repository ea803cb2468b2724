"""A small pooler: each transaction of a client, or each client, has a session that nobody's settings were given to."""

import contextlib
import select
import socket
import struct
import threading

_ENCRYPTION = (80877103, 80877104)
"""The codes by which clients ask for TLS and GSS."""


class TransactionPooler:
    """Speaks as much of the protocol as is needed. It listens on a loopback port, and takes the newest free session."""

    def __init__(self, target: str, *, refuses_options: bool = False, keeps_sessions: bool = False) -> None:
        self._target = target
        self._refuses_options = refuses_options
        self._keeps_sessions = keeps_sessions
        """Whether it is in session mode: a client has its session until it ends."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._free: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self._greetings: dict[socket.socket, bytes] = {}
        self.served: dict[socket.socket, set[int]] = {}
        """Which clients each session has served."""
        threading.Thread(target=self._accept, daemon=True).start()

    def shared(self) -> int:
        """Return how many sessions have served several clients."""
        with self._lock:
            return sum(len(clients) > 1 for clients in self.served.values())

    def close(self) -> None:
        """End, and cut everything."""
        with self._lock:
            open_ones, self._sockets = [self._listener, *self._sockets], []
        for one in open_ones:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        for number in range(1, 10_000):
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each message is passed on by itself
            with self._lock:
                self._sockets.append(client)
            threading.Thread(target=self._serve_until_it_ends, args=(client, number), daemon=True).start()

    def _serve_until_it_ends(self, client: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError, EOFError), client:
            self._serve(client, number)

    def _serve(self, client: socket.socket, number: int) -> None:
        startup = _startup(client)
        if self._refuses_options and b"\0options\0" in startup:
            client.sendall(_message(b"E", b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: options\0\0"))
            return
        session = self._session(startup)
        self._give_back(session)
        client.sendall(self._greetings[session] + _message(b"K", struct.pack("!ii", number, 0)) + _message(b"Z", b"I"))
        self._pass_on(client, number, startup)

    def _pass_on(self, client: socket.socket, number: int, startup: bytes) -> None:
        held: socket.socket | None = None
        open_requests = 0
        try:
            while True:
                readable, _, _ = select.select([client, *([held] if held else [])], [], [])
                if client in readable:
                    kind, whole = _read(client)
                    if kind == b"X":
                        return
                    if held is None:
                        held = self._session(startup)
                        self.served[held].add(number)
                    open_requests += kind in b"QS"
                    held.sendall(whole)
                elif held is not None:
                    kind, whole = _read(held)
                    client.sendall(whole)
                    open_requests -= kind == b"Z"
                    if kind == b"Z" and not open_requests and whole[5:6] == b"I" and not self._keeps_sessions:
                        self._give_back(held)
                        held = None
        finally:
            if held is not None:  # whoever was in a transaction is gone, so that is over
                held.close()

    def _session(self, startup: bytes) -> socket.socket:
        with self._lock:
            if self._free:
                return self._free.pop()
        session = socket.socket(socket.AF_UNIX)
        session.connect(self._target)
        session.sendall(_without_settings(startup))
        greeting, kind = b"", b""
        while kind != b"Z":
            kind, whole = _read(session)
            assert kind != b"E", whole
            greeting += whole if kind in b"RS" else b""
        with self._lock:
            self._greetings[session] = greeting
            self.served[session] = set()
            self._sockets.append(session)
        return session

    def _give_back(self, session: socket.socket) -> None:
        with self._lock:
            self._free.append(session)


def _startup(client: socket.socket) -> bytes:
    """Return a client's first message, once it has heard that nothing is encrypted here."""
    while True:
        length = _exactly(client, 4)
        rest = _exactly(client, struct.unpack("!i", length)[0] - 4)
        if struct.unpack("!i", rest[:4])[0] not in _ENCRYPTION:
            return length + rest
        client.sendall(b"N")


def _without_settings(startup: bytes) -> bytes:
    """Leave out a session's settings: it is nobody's own."""
    words = startup[8:].rstrip(b"\0").split(b"\0")
    kept = [
        (name, value) for name, value in zip(words[::2], words[1::2], strict=True) if name in (b"user", b"database")
    ]
    body = startup[4:8] + b"".join(name + b"\0" + value + b"\0" for name, value in kept) + b"\0"
    return struct.pack("!i", len(body) + 4) + body


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _read(stream: socket.socket) -> tuple[bytes, bytes]:
    """Return the kind of the next message, and all of it."""
    head = _exactly(stream, 5)
    return head[:1], head + _exactly(stream, struct.unpack("!i", head[1:])[0] - 4)


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data
