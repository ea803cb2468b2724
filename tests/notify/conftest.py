"""What the tests of notifications share: a receiver in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep

SECRET = "a long random text"


class Receiver:
    """The receiver, as tests use it. Each test has a path of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._url = url

    def url(self, path: str = "hook") -> str:
        return f"{self._url}/{path}"

    def plan(self, *words: str, path: str = "hook") -> None:
        """Say how requests are answered, from now on."""
        (self.folder / f"{path}.plan").write_text(" ".join(words))

    def requests(self, path: str = "hook") -> list[dict[str, Any]]:
        """Return what has arrived, in order."""
        file = self.folder / f"{path}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def deliveries(self, path: str = "hook") -> list[str]:
        return [request["headers"]["everstep-delivery"] for request in self.requests(path)]

    def messages(self, path: str = "hook") -> list[dict[str, Any]]:
        """Return what has arrived, whoever sent it."""
        return [json.loads(one["body"]) for one in self.requests(path)]

    def verified(self, path: str = "hook", secret: str = SECRET, now: float | None = None) -> list[dict[str, Any]]:
        """Return what has arrived, after checking each signature."""
        return [
            everstep.verify_webhook(one["body"].encode(), one["headers"], secret, now=now)
            for one in self.requests(path)
        ]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    folder = tmp_path / "receiver"
    folder.mkdir()
    program = Path(__file__).with_name("receiver.py")
    process = subprocess.Popen(
        [sys.executable, "-I", str(program), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    yield Receiver(folder, process.stdout.readline().strip())
    process.stdin.close()
    process.wait(10)
    process.stdout.close()
