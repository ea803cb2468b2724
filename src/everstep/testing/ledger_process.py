"""The ledger's own process. It needs only the standard library, so that it shares no mistake with the engine.

    python -I ledger_process.py FOLDER

It prints its address and then serves until its standard input ends, which also happens when its parent dies. Every
request and every applied effect is a line of `FOLDER/ledger.jsonl`, on disk before the answer is sent. Started again on
the same folder, it knows what it has applied. Requests to `/NAME/…` go into a book of their own, in `FOLDER/NAME`.
"""

import hashlib
import json
import os
import socket
import stat
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

NO_MODE: dict[str, Any] = {"delay": 0.0, "refuses": 0, "fails": 0, "loses": 0, "honours_keys": True}


class LedgerBook:
    """The lines of the file, and what a receiver of effects remembers between requests."""

    def __init__(self, folder: Path, modes: dict[str, dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "ledger.jsonl"
        self.modes = modes
        self._receipts: dict[tuple[str, str], str] = {}
        self._requests: Counter[tuple[str, str]] = Counter()
        self._key_locks: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()
        self._under_way = 0
        self._idle = threading.Condition(self._lock)
        self._file = _opened(path)
        with open(self._file, "rb", closefd=False) as stream:
            for line in stream:
                self._remember(json.loads(line))

    def _remember(self, entry: dict[str, Any]) -> None:
        name = (entry["effect"], entry["key"])
        if entry["kind"] == "applied":
            self._receipts[name] = receipt(entry["effect"], entry["digest"])
        else:
            self._requests[name] += 1

    def serve(self, ask: dict[str, Any], *, applies: bool) -> tuple[str, str]:
        """Serve a request in the effect's mode. Returns how to answer, and the value."""
        effect, key, digest = ask["effect"], ask["key"], digest_of(ask["arguments"])
        mode = {**NO_MODE, **self.modes.get(effect, {})}
        with self._lock:
            self._under_way += 1
            one_at_a_time = self._key_locks.setdefault((effect, key), threading.Lock())
        try:
            with one_at_a_time:
                return self._serve_one(ask, digest, mode, applies)
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    def _serve_one(self, ask: dict[str, Any], digest: str, mode: dict[str, Any], applies: bool) -> tuple[str, str]:
        effect, key = ask["effect"], ask["key"]
        self._write("request", ask, digest)
        self._requests[effect, key] += 1
        nth = self._requests[effect, key]
        if mode["delay"]:
            time.sleep(mode["delay"])
        if nth <= mode["refuses"]:
            return "fail", ""
        value = receipt(effect, digest)
        if applies:
            known = self._receipts.get((effect, key)) if mode["honours_keys"] and key else None
            if known is None:
                self._write("applied", ask, digest)
                self._receipts[effect, key] = value
            else:
                value = known
        if nth <= mode["refuses"] + mode["loses"]:
            return "lose", ""
        if nth <= mode["refuses"] + mode["loses"] + mode["fails"]:
            return "fail", ""
        return "answer", value

    def _write(self, kind: str, ask: dict[str, Any], digest: str) -> None:
        entry = {
            "kind": kind,
            "effect": ask["effect"],
            "key": ask["key"],
            "arguments": ask["arguments"],
            "digest": digest,
            "at": time.time_ns() // 1000,
        }
        with self._lock:
            os.write(self._file, (json.dumps(entry) + "\n").encode())
        os.fsync(self._file)

    def wait_until_idle(self) -> None:
        """Wait until no request is in progress: one whose sender was killed may still be served."""
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0, timeout=30)


def _opened(path: Path) -> int:
    """Return a descriptor of a file of ours. (This program must not import `everstep.model.own_files`.)"""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        raise PermissionError(f"{path} is not an ordinary file of yours with one name. Nothing was written.")
    return descriptor


def digest_of(arguments: Any) -> str:
    """Return the digest of a request's arguments."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:32]


def receipt(effect: str, digest: str) -> str:
    """Return the answer of an applied effect. It depends on nothing else, so an undisturbed run gets the same."""
    return f"{effect}-{digest[:12]}"


class Handler(BaseHTTPRequestHandler):
    """One request: `/apply`, `/ask` (nothing is applied), `/mode`, `/idle`."""

    folder: ClassVar[Path]
    modes: ClassVar[dict[str, dict[str, Any]]] = {}
    books: ClassVar[dict[str, LedgerBook]] = {}
    opening: ClassVar[threading.Lock] = threading.Lock()

    def book(self, name: str) -> LedgerBook:
        """Return the book of this name; the nameless one is the ledger's own."""
        with self.opening:
            if name not in self.books:
                folder = self.folder / "".join(letter for letter in name if letter.isalnum() or letter == "-")
                self.books[name] = LedgerBook(folder, self.modes)
            return self.books[name]

    def do_POST(self) -> None:
        """Answer, fail, or close the connection without an answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, _, verb = self.path.rpartition("/")
        how, value = "answer", ""
        if verb == "mode":
            self.modes[body["effect"]] = body["mode"]
        elif verb == "idle":
            self.book(name).wait_until_idle()
        else:
            how, value = self.book(name).serve(body, applies=verb == "apply")
        if how == "lose":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status = b"200 OK" if how == "answer" else b"500 Internal Server Error"
        answer = json.dumps({"value": value}).encode()
        head = b"HTTP/1.0 " + status + b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
        try:
            self.wfile.write(head + answer)  # in one piece: two writes would wait for each other on loopback
        except OSError:
            pass  # the sender was killed meanwhile

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class LedgerServer(ThreadingHTTPServer):
    """One thread for each request. Its senders are killed all the time, which is not worth a log line."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that was cut off."""


def main(folder: str) -> None:
    """Serve until the standard input ends."""
    Handler.folder = Path(folder)
    server = LedgerServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
