"""The program of the demo as a real process: started, watched through its store, and killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from everstep.model.own_files import append_to
from everstep.model.status import ENDED
from everstep.stores.opening import open_store
from everstep.stores.protocol import RunRow
from everstep.testing.ledger import Ledger
from everstep.view.timeline import Timeline

RUN: Final = "report"
POLL_SECONDS: Final = 0.015
PATIENCE_SECONDS: Final = 40.0


class DemoFailed(Exception):
    """The demo did not go as it should; its message says where."""


class Stage:
    """One run of the program: its folder with the store, its ledger, and the process that is alive just now."""

    def __init__(self, folder: Path, program: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.program = program
        self.path = folder / "everstep.db"
        self.url = f"sqlite:///{self.path}"
        self.ledger = Ledger.start(folder / "ledger")
        self.store = open_store(self.url)
        self.timeline = Timeline(self.store, RUN)
        self.process: subprocess.Popen[bytes] | None = None
        self.began = time.monotonic()
        self.died_at: int | None = None
        """When the program was killed, while it is dead."""
        self.on_look: Callable[[], None] = lambda: None

    @property
    def seconds(self) -> float:
        """Seconds since this stage began."""
        return time.monotonic() - self.began

    def start(self) -> int:
        """Start the program and return the number of its process."""
        environment = {**os.environ, "EVERSTEP_URL": self.url, "EVERSTEP_DEMO_LEDGER": self.ledger.url}
        environment |= {"EVERSTEP_DEMO_FOLDER": str(self.folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with open(append_to(self.folder / "output.txt"), "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(self.program)], env=environment, stdout=output, stderr=output
            )
        self.died_at = None
        return self.process.pid

    def kill(self) -> int:
        """Kill the program as the kernel would, without a word, and return the number of its process."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.died_at = self.store.now()
        return self.process.pid

    def row(self) -> RunRow | None:
        """Return the run's row, and take its new events into the timeline."""
        row = self.store.run(RUN)
        if row is not None and row.head_seq != self.timeline.last_seq:
            for event in self.store.events(RUN, row.generation)[self.timeline.last_seq :]:
                self.timeline.add(event)
        return row

    def wait_for(self, what: str, happened: Callable[[RunRow], Any]) -> RunRow:
        """Watch the run until something has happened to it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            row = self.row()
            self.on_look()
            if row is not None and happened(row):
                return row
            ended = row is not None and row.status in ENDED
            if ended or (self.process is not None and self.process.poll() not in (None, 0)):
                raise DemoFailed(f"The program ended before {what}. What it said is in {self.folder / 'output.txt'}.")
            if time.monotonic() > until:
                raise DemoFailed(f"Waited {PATIENCE_SECONDS:g} s for {what}. See {self.folder / 'output.txt'}.")
            time.sleep(POLL_SECONDS)

    def pause(self, seconds: float) -> None:
        """Let time pass, so that a person can follow."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.on_look()
            time.sleep(POLL_SECONDS)

    def applied(self, effect: str) -> int:
        """Return how often the ledger has applied an effect so far, without waiting for it."""
        path = self.ledger.folder / "ledger.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        count = 0
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # it is being written
            count += entry["kind"] == "applied" and entry["effect"] == effect
        return count

    def close(self) -> None:
        """End whatever is still alive."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.ledger.stop()
        self.store.close()
