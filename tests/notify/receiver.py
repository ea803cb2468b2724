"""A receiver of webhooks, in a process of its own that shares no code with the engine: `python receiver.py FOLDER`.

It prints its address and serves until its standard input ends. Each request is a line of `FOLDER/PATH.jsonl`, written
before it is answered. `FOLDER/PATH.plan` says how requests to `/PATH` are answered, a word each: a status such as 200,
`lose` (the connection is closed), `hang` (no answer), `drip` (a byte now and then, for ever), `redirect`, `later` (503
with Retry-After), `slow` (200 after a while), `wait:NAME` (200 once there is a file NAME). The last word counts for all
that follow; without a plan: 200.
"""

import json
import socket
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar


class Handler(BaseHTTPRequestHandler):
    folder: ClassVar[Path]
    lock: ClassVar[threading.Lock] = threading.Lock()
    served: ClassVar[Counter[str]] = Counter()
    under_way: ClassVar[Counter[str]] = Counter()
    counted: str = ""
    """Under which name this request counts as under way."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        name = self.path.partition("?")[0].strip("/") or "root"
        with self.lock:
            plan = self.folder / f"{name}.plan"
            words = plan.read_text().split() if plan.exists() else ["200"]
            word = words[min(self.served[name], len(words) - 1)]
            self.served[name] += 1
            self.under_way[name] += 1
            self.counted = name
            entry = {
                "headers": {key.lower(): value for key, value in self.headers.items()},
                "path": self.path,
                "body": body.decode(),
                "answered": word,
                "at": time.time(),
                "at_once": self.under_way[name],
            }
            with (self.folder / f"{name}.jsonl").open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
        try:
            self._answer(word)
        except OSError:
            pass  # whoever asked is gone
        finally:
            self._is_over()

    def _is_over(self) -> None:
        """It is not under way any more: said before the answer is, for then the next one may come at once."""
        with self.lock:
            self.under_way[self.counted] -= self.counted != ""
            self.counted = ""

    do_GET = do_POST

    def _answer(self, word: str) -> None:
        if word == "lose":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif word == "hang":
            self.connection.recv(1)  # until whoever asked gives up
        elif word == "drip":
            self.connection.sendall(b"HTTP/1.0 200 OK\r\nX-Drip: ")
            while True:
                self.connection.sendall(b".")
                time.sleep(0.05)
        elif word == "redirect":
            self._say(302, b"Location: /redirected\r\n")
        elif word == "slow":
            time.sleep(0.3)
            self._say(200)
        elif word.startswith("wait:"):
            while not (self.folder / word.removeprefix("wait:")).exists():
                time.sleep(0.01)
            self._say(200)
        elif word == "later":
            self._say(503, b"Retry-After: 30\r\n")
        else:
            self._say(int(word))

    def _say(self, status: int, more: bytes = b"") -> None:
        self._is_over()
        self.wfile.write(b"HTTP/1.0 %d Said\r\n%bContent-Length: 2\r\n\r\nok" % (status, more))
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def main(folder: str) -> None:
    Handler.folder = Path(folder)
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
