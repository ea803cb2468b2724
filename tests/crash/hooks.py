"""A receiver of webhooks for the crash tests: each trial has an address of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import everstep
from everstep.testing.ledger import Ledger
from tests.crash.nursery import Nursery
from tests.crash.trial import Trial

RECEIVER = Path(__file__).parents[1] / "notify" / "receiver.py"
SECRET = "a long random text"


class Hooks:
    """The receiver, as trials use it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._url = url

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator["Hooks"]:
        folder.mkdir()
        command = [sys.executable, "-I", str(RECEIVER), str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield cls(folder, process.stdout.readline().strip())
        finally:
            process.stdin.close()
            process.wait(10)
            process.stdout.close()

    def trial(self, place: Path, ledger: Ledger, nursery: Nursery) -> Trial:
        """Return a trial whose run is held."""
        trial = Trial.new(place, ledger, "held", nursery=nursery)
        address = f"{self._url}/{trial.folder.name}"
        trial.settings |= {"EVERSTEP_ON_HOLD": address, "EVERSTEP_ON_HOLD_SECRET": SECRET}
        return trial

    def arrived(self, trial: Trial) -> list[dict[str, Any]]:
        """Return what has arrived for a trial, after checking each signature."""
        path = self.folder / f"{trial.folder.name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [everstep.verify_webhook(one["body"].encode(), one["headers"], SECRET) for one in lines]
