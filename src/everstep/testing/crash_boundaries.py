"""Boundaries: the instants at which a crash test kills a process, counted first and then chosen one by one.

There are three kinds: the crash points of `everstep.model.crash_points`, each line of a step's body, and each rest,
when everything waits. This module runs in the processes that are killed.
"""

import json
import os
import signal
import sys
import sysconfig
import threading
from collections import Counter
from types import FrameType
from typing import Any, Final

import msgspec

from everstep.effects.body import StepBody
from everstep.effects.surroundings import CURRENT
from everstep.model import crash_points
from everstep.model.own_files import append_to

LINE: Final = "line"
REST: Final = "rest"
PASSES_OF_A_LINE: Final = 3
"""The number of times that a line in a loop is a boundary."""

MOMENTS: Final[dict[str, str]] = {
    LINE: "a line of a step's body is about to run",
    REST: "everything waits: for a timer, a signal or a person",
}

_COLUMNS: Final[tuple[tuple[str, str], ...]] = (
    ("store.commit.", "commit"),
    ("body.", "body"),
    (LINE, "body"),
    ("outcome.", "outcome"),
    ("unit.", "outcome"),
    ("checkpoint.", "outcome"),
    ("graph.", "outcome"),
    ("budget.", "outcome"),
    ("transaction.", "atomic"),
    ("markers.", "atomic"),
    (REST, "wait"),
    ("delivery.", "wait"),
    ("key.", "wait"),
    ("child.", "wait"),
    ("run.claimed", "recovery"),
    ("run.replayed", "recovery"),
    ("probe.", "recovery"),
    ("attempt.", "recovery"),
    ("drift.", "recovery"),
    ("compensation.", "undoing"),
    ("rollback.", "undoing"),
    ("run.end", "end"),
    ("store.", "store"),
)
COLUMNS: Final = ("commit", "body", "outcome", "atomic", "wait", "recovery", "undoing", "end", "store", "other")


class Boundary(msgspec.Struct, frozen=True):
    """One instant: the `count`-th time that a process passes the point `name`."""

    name: str
    count: int
    step: str = ""
    place: str = ""
    """For a line: `file.py:12`, with the file's whole path."""

    @property
    def column(self) -> str:
        """The column of the matrix."""
        return next((column for prefix, column in _COLUMNS if self.name.startswith(prefix)), "other")

    @property
    def kind(self) -> str:
        """The kind that `most` counts by: the crash point, or the line."""
        return f"{self.name} {self.place}".strip()

    @property
    def id(self) -> str:
        """Its text in the environment of the process that is killed there."""
        return f"{self.kind}#{self.count}"

    @property
    def moment(self) -> str:
        """The instant in words."""
        return crash_points.TABLE.get(self.name) or MOMENTS[self.name]

    def __str__(self) -> str:
        where = f"before {os.path.basename(self.place)}" if self.place else self.name
        of = f" of {self.step}" if self.step else ""
        return f"{where}{of} (pass {self.count}: {self.moment})"


class Passing:
    """Records every boundary that this process passes, and kills it at the chosen one."""

    def __init__(self, at: str, notes: str, own_file: str) -> None:
        self._at = at
        self._notes = append_to(notes)
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._own_file = own_file
        self._files: dict[str, bool] = {}
        paths = sysconfig.get_paths()
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        self._not_theirs = (package, "<", *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))

    def arm(self) -> None:
        """Replace `crash_point` in every module of the engine, and trace the lines of step bodies."""
        unarmed = crash_points.crash_point
        for module in list(sys.modules.values()):
            if getattr(module, "crash_point", None) is unarmed:
                vars(module)["crash_point"] = self.passes
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def passes(self, name: str) -> None:
        """Pass a crash point."""
        self._pass(name, "", step_near(sys._getframe(1)))

    def _pass(self, name: str, place: str, step: str) -> None:
        kind = f"{name} {place}".strip()
        with self._lock:
            self._passed[kind] += 1
            count = self._passed[kind]
        if place and count > PASSES_OF_A_LINE:
            return
        note = {"name": name, "count": count, "step": step, "place": place}
        os.write(self._notes, json.dumps(note).encode() + b"\n")
        if self._at == f"{kind}#{count}":
            signal.pthread_kill(threading.get_ident(), signal.SIGKILL)  # to this thread, which stops at once

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        filename = frame.f_code.co_filename
        theirs = self._files.get(filename)
        if theirs is None:
            theirs = filename == self._own_file or not filename.startswith(self._not_theirs)
            self._files[filename] = theirs
        return self._trace_lines if theirs and isinstance(CURRENT.get(), StepBody) else None

    def _trace_lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            body = CURRENT.get()
            if isinstance(body, StepBody):
                self._pass(LINE, f"{frame.f_code.co_filename}:{frame.f_lineno}", body.step)
        return self._trace_lines


def step_near(frame: FrameType | None) -> str:
    """Return the step that the engine is working on where it passes a crash point, if that is visible."""
    names = frame.f_locals if frame is not None else {}
    for name in ("call", "attempt", "body", "running"):
        step = getattr(names.get(name), "step", "")
        if isinstance(step, str) and step:
            return step
    if isinstance(step := names.get("step"), str) and step:
        return step
    if (unit := names.get("unit")) is not None:
        return _step_of([unit])
    return _step_of(names.get("operations") or ())


def _step_of(operations: Any) -> str:
    """Return the step of the last event that some operations of the store write."""
    if not isinstance(operations, list | tuple):
        return ""
    events = [event for operation in operations for event in getattr(operation, "events", ())]
    return next((event.step for event in reversed(events) if event.step), "")


def read_passes(path: str | os.PathLike[str]) -> list[Boundary]:
    """Return the boundaries that a process has passed, in order. A line that it was killed in does not count."""
    try:
        with open(path, "rb") as notes:
            lines = notes.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [Boundary(**json.loads(line)) for line in lines]


def is_durable_write(boundary: Boundary) -> bool:
    """Tell whether a boundary is inside a transaction of the store: each has just one of this kind."""
    return boundary.name.startswith("store.") and boundary.name.endswith(".written")


def chosen(passed: list[Boundary], most: int | None, in_all: int) -> list[Boundary]:
    """Return the boundaries to kill at: all, or `most` of each kind; without `most`, about `in_all` altogether."""
    by_kind: dict[str, list[Boundary]] = {}
    for boundary in passed:
        by_kind.setdefault(boundary.kind, []).append(boundary)
    if most is None:
        most = max(map(len, by_kind.values()), default=1)
        while most > 1 and sum(min(len(one), most) for one in by_kind.values()) > in_all:
            most -= 1
    kept = {boundary.id for one in by_kind.values() for boundary in spread(one, most)}
    return [boundary for boundary in passed if boundary.id in kept]


def spread(all_of_them: list[Boundary], most: int) -> list[Boundary]:
    """Return at most `most` items of a list, evenly spread, with the first and the last."""
    if len(all_of_them) <= most:
        return all_of_them
    if most <= 1:
        return all_of_them[-1:]
    step = (len(all_of_them) - 1) / (most - 1)
    return [all_of_them[round(index * step)] for index in range(most)]
