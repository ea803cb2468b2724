"""The journal of a client: what it asked for, what was acknowledged, and what was refused. A missing answer counts too.

A line is written before the call and another after the answer, by one `write` each, so that a process which is killed
leaves no half lines and several processes may share a file.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from everstep.model.own_files import append_to
from everstep.stores.protocol import Accepted, Append, Claim, Claimed, Operation, Store, Verdict

State = Literal["asked", "acknowledged", "refused"]


class ClientJournal:
    """A file of JSON lines, each with `verb`, `run`, `state` and further facts."""

    def __init__(self, path: str | Path) -> None:
        self._file = append_to(path)

    def note(self, verb: str, run: str, state: State, **facts: Any) -> None:
        """Record one call or answer."""
        line = json.dumps({"verb": verb, "run": run, "state": state, "pid": os.getpid(), **facts})
        os.write(self._file, line.encode() + b"\n")


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Return a journal's lines; a missing file has none. A half-written line does not count yet."""
    file = Path(path)
    return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []


def watch_commits(store: Store, journal: ClientJournal) -> None:
    """Record every append and claim that this store accepts: epochs are judged by that."""
    commit = store.commit

    def watched(operations: Sequence[Operation], **how: bool) -> list[Verdict]:
        verdicts = commit(operations, **how)
        for operation, verdict in zip(operations, verdicts, strict=True):
            match operation, verdict:
                case Append(events=[first, *_]), Accepted():
                    place = {"generation": operation.generation, "first": first.seq, "last": operation.events[-1].seq}
                    journal.note("append", operation.run, "acknowledged", epoch=operation.epoch, **place)
                case Claim(), Claimed():
                    journal.note(
                        "claim", operation.run, "acknowledged", epoch=verdict.row.epoch, worker=operation.worker
                    )
        return verdicts

    store.commit = watched  # type: ignore[method-assign]
