"""The ledger: an independent account, in a separate process, of every effect that was requested and applied.

    ledger = Ledger.start(folder)
    …  apply(ledger.url, "charge", everstep.key(), {"amount": 5})  …      in the bodies of steps
    ledger.entries()        what really happened, whatever the engine believes
    ledger.stop()

It plays the outside world: a payment service, a mail server. With `ledger.behave("charge", Mode(…))` it is slow,
answers with an error after applying, loses its answer, or forgets the keys that it has seen.
"""

import http.client
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from everstep.errors import Misuse

LEDGER_SETTING: Final = "EVERSTEP_LEDGER"
"""The environment variable with the address of a crash test's ledger."""

MODEL: Final = "model"
"""The effect's name when a body reports a model call to the ledger. A crash test counts these."""


class LedgerFailed(Exception):
    """The ledger answered with an error. Whether it applied the effect is unknown, as in reality."""


@dataclass(frozen=True)
class Mode:
    """How the ledger treats one effect. The figures count requests with one key: first refused, then lost, then failed.

    `delay` seconds pass before it applies; `refuses` requests are answered with an error and not applied; `loses` are
    applied and the connection is closed without an answer; `fails` are applied and answered with an error. With
    `honours_keys` a key is applied once, and later requests with it get the first value; otherwise it is forgotten.
    """

    delay: float = 0.0
    refuses: int = 0
    loses: int = 0
    fails: int = 0
    honours_keys: bool = True


class Ledger:
    """A running ledger. It ends with the process that started it."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]", url: str) -> None:
        self.folder = folder
        self.url = url
        """Give it to `apply` and `ask`."""
        self._process = process

    @classmethod
    def start(cls, folder: str | Path) -> Self:
        """Start the process. On a folder with a ledger it continues that one."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        program = Path(__file__).with_name("ledger_process.py")
        process = subprocess.Popen(
            [sys.executable, "-I", str(program), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"The ledger in {path} did not start; its output is above.")
        return cls(path, process, url)

    def behave(self, effect: str, mode: Mode) -> None:
        """Change how the ledger treats an effect from now on."""
        _post(self.url, "/mode", {"effect": effect, "mode": asdict(mode)}, 10.0)

    def book(self, name: str) -> "Ledger":
        """Return the book of this name, which has a `url` of its own: for trials that share one process."""
        return Ledger(self.folder / name, self._process, f"{self.url}/{name}")

    def entries(self) -> list[dict[str, Any]]:
        """Return everything so far, in order, once no request is in progress.

        Each has `kind` (`request` or `applied`), `effect`, `key`, `arguments`, their `digest`, and `at` (microseconds
        since 1970).
        """
        if self._process.poll() is None:
            _post(self.url, "/idle", {}, 60.0)
        path = self.folder / "ledger.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def stop(self) -> None:
        """End the process. What it wrote stays."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def offered() -> str:
    """Return the address of the ledger that a crash test offers to the workflow (`EVERSTEP_LEDGER`), or an empty text.

    The bodies of steps give it to `apply` and `ask`, which refuse an empty one.
    """
    return os.environ.get(LEDGER_SETTING, "")


def apply(url: str, effect: str, key: str, arguments: Any, *, timeout: float = 30.0) -> str:
    """Ask the ledger to apply an effect, and return its value. For an `async` step: `asyncio.to_thread(apply, …)`.

    The value depends on the effect and its arguments only. Raises `LedgerFailed` when the ledger answers with an error,
    `ConnectionError` when its answer is lost, `TimeoutError` when it takes too long.
    """
    return _post(url, "/apply", {"effect": effect, "key": key, "arguments": arguments}, timeout)


def ask(url: str, effect: str, key: str, arguments: Any, *, timeout: float = 30.0) -> str:
    """Ask the ledger something that changes nothing: it records the request, and applies nothing."""
    return _post(url, "/ask", {"effect": effect, "key": key, "arguments": arguments}, timeout)


def _post(url: str, path: str, body: dict[str, Any], timeout: float) -> str:
    if not url:
        raise Misuse(
            f"There is no ledger: {LEDGER_SETTING} is not set, as it is in a crash test. "
            "Start one with Ledger.start(folder), and give its url."
        )
    host, _, book = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        connection.request("POST", f"/{book}{path}" if book else path, json.dumps(body).encode())
        answer = connection.getresponse()
        content = answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError("The ledger's answer was lost.") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise LedgerFailed(f"The ledger answered {answer.status} to {path}.")
    value: str = json.loads(content)["value"]
    return value
