"""The story of the demo: start, three kills, an undisturbed run beside it, and what the ledger says about both."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from everstep.cli.demo.child import RUN, DemoFailed, Stage
from everstep.cli.demo.proof import Account, accounts, same_key_each_time
from everstep.engine.app.app import App
from everstep.engine.verbs.verify import verify_run
from everstep.stores.opening import open_store
from everstep.stores.protocol import RunRow

Say = Callable[[str, str, str], None]
"""Takes a mark, a text and a style."""

DEAD_SECONDS = 0.7
"""How long the program stays dead, so that a person can see it, in seconds."""


class Kill(msgspec.Struct):
    """One kill, and how the program continued."""

    where: str
    at_seconds: float
    steps_done: int
    went_on_after_ms: int = 0


class Outcome(msgspec.Struct):
    """How the demo went."""

    kills: list[Kill]
    accounts: list[Account]
    same_result: bool
    same_file: bool
    same_keys: bool
    sound: bool
    seconds: float
    result_digest: str

    @property
    def is_proof(self) -> bool:
        """Whether everything is as it should be."""
        right = all(one.is_right for one in self.accounts)
        return right and self.same_result and self.same_file and self.same_keys and self.sound


async def send_approval(url: str) -> None:
    """Send the signal that the program waits for, from this other process."""
    app = App(open_store(url, create=False), workflows=())
    await app.open()
    try:
        await app.signal(RUN, "approved", True, id="approval")
    finally:
        await app.close()


def disturbed(stage: Stage, say: Say, approve: Callable[[Stage], None]) -> list[Kill]:
    """Run the program and kill it three times."""
    kills = []
    pid = stage.start()
    say("▸", f"the agent starts, as process {pid}", "cyan")

    stage.wait_for("some answers were there", lambda row: _done(stage, "ask_model") >= 2)
    kills.append(_kill(stage, say, "in a read, while it waited for its model"))
    _start_again(stage, say, kills[-1])

    stage.wait_for("the second chapter was out", lambda row: stage.applied("publish_chapter") >= 2)
    kills.append(_kill(stage, say, "in an effect: the ledger has applied it, the program does not know"))
    _start_again(stage, say, kills[-1])

    stage.wait_for("it waited for approval", _waits)
    stage.pause(0.4)
    kills.append(_kill(stage, say, "between two steps, while it waited for a person"))
    approve(stage)
    say("✉", "meanwhile a person approves: everstep signal report approved true", "magenta")
    _start_again(stage, say, kills[-1])

    stage.wait_for("its end", lambda row: row.status == "completed")
    say("✓", f"finished after {stage.seconds:.1f} s and three kills", "green")
    return kills


def undisturbed(stage: Stage, approve: Callable[[Stage], None]) -> None:
    """Run the same program in another store and leave it in peace."""
    stage.start()
    stage.wait_for("it waited for approval", _waits)
    approve(stage)
    stage.wait_for("its end", lambda row: row.status == "completed")


def _waits(row: RunRow) -> bool:
    return row.status == "waiting"


def _done(stage: Stage, step: str) -> int:
    return sum(1 for name in stage.timeline.completed_steps() if name.partition("#")[0] == step)


def _kill(stage: Stage, say: Say, where: str) -> Kill:
    pid = stage.kill()
    stage.row()
    kill = Kill(where, round(stage.seconds, 2), len(stage.timeline.completed_steps()))
    say("╳", f"kill -9 {pid}  {where}", "bold red")
    return kill


def _start_again(stage: Stage, say: Say, kill: Kill) -> None:
    """Start the program again, as anybody would: the same command. Wait until it has done something new."""
    stage.pause(DEAD_SECONDS)
    seq = stage.timeline.last_seq
    began = time.monotonic()
    pid = stage.start()
    stage.wait_for("it continued", lambda row: row.head_seq > seq)
    kill.went_on_after_ms = round(1000 * (time.monotonic() - began))
    say(
        "↻", f"process {pid} continued after {kill.went_on_after_ms} ms; {kill.steps_done} steps not done again", "cyan"
    )


def judged(first: Stage, second: Stage, kills: list[Kill], began: float) -> Outcome:
    """Compare both runs: results, files, histories, and what the ledgers say."""
    rows = [stage.row() for stage in (first, second)]
    if any(row is None or row.status != "completed" for row in rows):
        raise DemoFailed("One of the runs did not complete.")
    results = [row.outcome for row in rows if row is not None]
    files = [(stage.folder / "report.md").read_bytes() for stage in (first, second)]
    entries = [stage.ledger.entries() for stage in (first, second)]
    checks = [
        verify_run(stage.store, row)[0] for stage, row in zip((first, second), rows, strict=True) if row is not None
    ]
    return Outcome(
        kills=kills,
        accounts=accounts(*entries),
        same_result=results[0] == results[1],
        same_file=files[0] == files[1],
        same_keys=all(map(same_key_each_time, entries)),
        sound=all(check.sound for check in checks),
        seconds=round(time.monotonic() - began, 1),
        result_digest=hashlib.sha256(results[0] or b"").hexdigest()[:12],
    )


def facts_of(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Return the outcome for `--json`."""
    return {"proof": outcome.is_proof, **msgspec.to_builtins(outcome), "folder": os.fspath(folder)}
