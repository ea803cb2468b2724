"""The code that is running now: a workflow's, a step's body, or neither.

One context variable answers, in tasks, threads and greenlets alike. Steps and workflows read it to decide what a call
of them means here. Where it is empty, `code_here` looks closer.
"""

import inspect
import linecache
import os
from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from everstep.errors import Misuse

if TYPE_CHECKING:  # a real cycle: a step asks here what a call of it means
    from everstep.effects.step import Step


class Surroundings(Protocol):
    """Code that runs for a run: workflow code (an execution) or the body of a step."""

    place: ClassVar[str]
    """`workflow` or `step`."""

    @property
    def wants_places(self) -> bool:
        """Whether the places of calls are needed."""
        ...

    def call_step(self, step: "Step", args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
        """Execute a call of this step here. The frame is the caller's, if `wants_places`."""
        ...

    def call_workflow(
        self, workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Execute a call of this workflow here."""
        ...

    def take_charge(self, nanos: int | None, tokens: int | None) -> None:
        """Count what was used."""
        ...


CURRENT: ContextVar[Surroundings | None] = ContextVar("everstep_surroundings", default=None)
current: Final = CURRENT.get
"""The present surroundings. A step reads them with each call, and an attribute of an imported name costs twice that."""
set_current: Final = CURRENT.set

Outside = Callable[["Step", tuple[Any, ...], dict[str, Any]], Any]
"""Executes a call of a step outside of any run, for an adapter."""

OUTSIDE: list[Outside] = []
"""The functions of the loaded adapters; the last one is used."""


def call_outside_with(outside: Outside) -> None:
    """Let an adapter decide about calls of steps outside of any run."""
    if outside not in OUTSIDE:
        OUTSIDE.append(outside)


_HERE: "list[Callable[[], Surroundings | None]]" = []
"""Finds the owner of the current code: there is one after the first run."""


def see_code_with(find: "Callable[[], Surroundings | None]") -> None:
    """Let the engine find the owner of code whose context does not say it: see everstep.effects.descent."""
    _HERE[:] = [find]


def code_here() -> Surroundings | None:
    """Return the surroundings although `CURRENT` does not have them; None for the application's own code."""
    return _HERE[0]() if _HERE else None


def where_is(frame: FrameType | None) -> str:
    """Return `file.py:12: the source line` of a frame, for reports to a person. Empty without a frame."""
    if frame is None:
        return ""  # the outermost one of a greenlet has no caller
    code = frame.f_code
    # Computing the line number each time would take long, and `id` would raise an audit event.
    place = _identity(code), frame.f_lasti
    known = _PLACES.get(place)
    if known is not None and known[0] is code:
        return known[1]
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}" + (f": {text[:120]}" if text else "")
    if len(_PLACES) > 10_000:
        _PLACES.clear()
    _PLACES[place] = (code, line)
    return line


def persons_line(frame: FrameType | None) -> str:
    """Return the line of a person's code that led to this frame: the first one outside asyncio and this package.

    Empty if the loop called the code: the outer frames belong to the run's driver.
    """
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_NOT_A_PERSONS):
            return where_is(frame)
        if filename == _LOOP:
            break
        frame = frame.f_back
    return ""


def persons_functions(frame: FrameType | None) -> tuple[CodeType, ...]:
    """Return the functions of a person's code that have called each other up to this frame, the innermost first."""
    found: list[CodeType] = []
    while frame is not None and frame.f_code.co_filename != _LOOP:
        if not frame.f_code.co_filename.startswith(_NOT_A_PERSONS):
            found.append(frame.f_code)
        frame = frame.f_back
    return tuple(found)


PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_LOOP: Final = os.path.join(PACKAGE, "engine", "code", "loop.py")
_NOT_A_PERSONS: Final = (PACKAGE, os.path.join(os.path.dirname(inspect.__file__), "asyncio", ""))
_identity: Final = object.__hash__
_PLACES: dict[tuple[int, int], tuple[CodeType, str]] = {}
"""Lines by place in the code. The code is kept alive with its line, because its id could be reused."""


def require(what: str, kind: type[Any]) -> Any:
    """Return the surroundings if they are of this kind. Otherwise the error says where `what` may be used."""
    current = CURRENT.get()
    if isinstance(current, kind):
        return current
    raise Misuse(f"{what} is for code inside a {getattr(kind, 'place', 'run')}; it was called outside of one.")
