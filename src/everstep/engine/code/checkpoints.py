"""Checkpoints in workflow code: a call that records its state, and on a resume returns the newest one.

    state = State(todo=urls)
    while state.todo:
        state = await everstep.checkpoint(state)
        ...

The first call in a resume is where it jumps: the code has reached it by a replay, as always; it returns the state of
the newest checkpoint, and the engine's own part of that checkpoint (`EnginePart`) restores everything else that a
replay up to there would have brought about. Then the events after it are replayed.

Live, a policy decides which calls are recorded; in a replay, the history does. A checkpoint represents the whole run,
so nothing else may be in progress, and the code must have seen every recorded outcome. And the code must be able to
continue from its first call as from this one: so both must be called by the same functions, and one in an `except` or
`finally` block, to which the first call would not return, is not recorded.
"""

import sys
from collections.abc import Collection, Mapping
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from everstep.codec import Types, types_of
from everstep.effects.surroundings import persons_functions, persons_line
from everstep.effects.witnesses import Taken, made_again, recipe_of
from everstep.engine.code.budget import KeptBooks
from everstep.engine.code.commands import Command, StepCall
from everstep.engine.history.clock import from_packed_state, packed_state
from everstep.engine.history.kept import Kept, KeptOutcome
from everstep.errors import Misuse, NotDecodable
from everstep.model import events as ev
from everstep.model.contracts import EXPENSIVE_SECONDS

if TYPE_CHECKING:  # a real cycle: an execution has this, and hands itself to it with each call
    from everstep.engine.code.execution import Execution


KEPT_MIN: Final = 3
"""Minimum number of checkpoints kept for each run: the newest, and two in case it is damaged."""
OUTCOMES_MAX: Final = 1000
"""Number of outcomes after which a checkpoint is recorded even if all were quick reads, to keep a resume quick."""


class KeptFact(msgspec.Struct, omit_defaults=True):
    """A fact that the run remembers. The code itself makes a witness without a recipe before the jump."""

    fact: msgspec.Raw
    on_drift: str
    recipe: list[Any] | None = None
    changes: dict[str, str | None] = {}
    ignored: msgspec.Raw = ev.NO_PAYLOAD

    @classmethod
    def of(cls, taken: "Taken") -> "KeptFact":
        """Return a fact in the form in which a checkpoint keeps it."""
        facts = msgspec.Raw(taken.payload), taken.on_drift, recipe_of(taken.witness)
        return cls(*facts, dict(taken.changes), msgspec.Raw(taken.ignored) if taken.ignored else ev.NO_PAYLOAD)

    def taken(self, known: "Taken | None") -> "Taken":
        """Return the fact as the run remembers it. `known` has the witness, and the judge, that the code has made."""
        witness, judge = (known.witness, known.judge) if known is not None else (made_again(self.recipe or ()), None)
        taken = Taken(witness, bytes(self.fact), self.on_drift, judge)
        taken.changes, taken.ignored = dict(self.changes), bytes(self.ignored)
        return taken


class EnginePart(msgspec.Struct, omit_defaults=True):
    """What a run remembers in addition to its code's state: everything that a replay up to the checkpoint would
    bring about.
    """

    number: int
    """Which call of `checkpoint` it was."""
    calls: int
    numbers: int
    """The number of tasks and futures that the code has made, plus one: they hash by their numbers."""
    now: int
    entropy: str
    branch: int = 0
    visits: dict[str, int] = {}
    random: bytes = b""
    gauss: float | None = None
    facts: dict[str, KeptFact] = {}
    signals: list[tuple[str, int, msgspec.Raw]] = []
    """Signals that have arrived and were not received yet: name, number, value."""
    requests: list[tuple[str, int, str, msgspec.Raw]] = []
    """Requests that were not taken yet: name, number, id, value."""
    kept: list[KeptOutcome] = []
    """Outcomes that a retry went back over, and that the code has not asked for again."""
    is_of_first_type: bool = True
    """Whether the state has the class of the first call's state."""
    # The following fields are filled when the event is recorded.
    first: int = 0
    """The number of the first checkpoint's event. The events up to it are always replayed."""
    first_digest: bytes = b""
    clock_started: int = 0
    patches: dict[str, bool] = {}
    published: dict[str, msgspec.Raw] = {}
    accepted: dict[int, str] = {}
    """What a person accepted about events up to the first checkpoint."""
    caution: str = ""
    """Why steps that must not happen twice need a confirmation: a part of the history is lost."""
    unseen_workers: list[str] = []
    restores: int = 0
    """How many restores of its store the run knows of."""
    life: str = ""
    """The life of its store that the run knows of."""
    is_undoable: bool = False
    """Whether a step with a compensation has completed: to undo that, the code is replayed from the beginning."""
    books: KeptBooks | None = None
    """What the run has used, if it has a budget."""
    uncompensated: list[str] = []
    """Some of the steps that must not happen twice and have no compensation."""


class Checkpoint(NamedTuple):
    """A checkpoint that was read and found valid."""

    seq: int
    part: EnginePart
    state: bytes


class TakeCheckpoint(Command):
    """A call of `checkpoint` that is recorded."""

    kind = "checkpoint_taken"
    __slots__ = ("call", "keep", "number", "part", "source", "state")

    def __init__(self, call: int, number: int, state: bytes, part: EnginePart, keep: int, source: str) -> None:
        self.call = call
        self.number = number
        self.state = state
        self.part = part
        self.keep = keep
        self.source = source

    def body(self) -> ev.CheckpointTaken:
        return ev.CheckpointTaken(self.call, self.number, "", len(self.state), self.source)

    def text(self) -> str:
        return f"checkpoint {self.number}"

    def compare(self, recorded: ev.CheckpointTaken) -> tuple[str, bool]:
        return ("", False) if recorded.number == self.number else ("checkpoint", False)


class Jump(Command):
    """The first call of `checkpoint` in a resume. What the code asked for before it precedes the jump."""

    kind = "checkpoint_taken"
    __slots__ = ("source",)

    def __init__(self, source: str) -> None:
        self.source = source

    def text(self) -> str:
        return "checkpoint 1"


class Checkpoints:
    """The progress of one run's code with its checkpoints."""

    def __init__(self, recorded: Collection[int] = (), newest: Checkpoint | None = None) -> None:
        self.number = 0
        """How often the code has called `checkpoint`."""
        self.has_jumped = False
        self.unreadable = ""
        """Why the state of the newest checkpoint does not decode; empty if it does."""
        self._recorded = recorded
        """The numbers of the calls that the history has recorded."""
        self._newest = newest
        self._has_any = False
        self._outcomes = 0
        self._is_worth_it = False
        self._handled: BaseException | None = None
        """The exception that the engine handled when it resumed the code."""
        self._functions: tuple[CodeType, ...] = ()
        self._type: type = object
        self._types: Types
        self._witnesses: dict[str, Taken] = {}

    def saw(self, kind: str, body: Any, steps: "dict[int, StepCall]") -> None:
        """Note an outcome: the outcomes since the last checkpoint decide whether the next is recorded."""
        self._outcomes += 1
        self._handled = sys.exception()
        call = steps.get(body.call) if kind in ("step_completed", "step_failed") else None
        if (
            call is None
            or call.target.effect != "read"
            or body.attempt > 1
            or body.seconds > EXPENSIVE_SECONDS
            or call.target.cost is not None
        ):
            self._is_worth_it = True

    def take(self, execution: "Execution", state: Any, every: int | None, keep: int, frame: FrameType) -> Any:
        """Record the code's state, if it is worth it, and return it decoded; or jump, and return the newest one."""
        self.number += 1
        source, functions = persons_line(frame), persons_functions(frame)
        if self.number == 1:
            signature = execution.workflow.signature
            self._type = type(state)
            self._types = types_of(self._type) | signature.arguments | signature.result
            self._witnesses = dict(execution.witnesses)
            self._functions = functions
        elif functions != self._functions:
            raise Misuse(
                f"{_at(source)}everstep.checkpoint() by other functions than the first time: a resumed run comes "
                "back there, and not here. Call it at one place, at the top of the loop."
            )
        if execution.books is not None and not execution.books.come_to_checkpoint():
            raise Misuse(
                f"{_at(source)}everstep.checkpoint() in another part of the budget than the first time: a resumed "
                "run comes back there, and not here. Call it outside of the `with everstep.budget(…):` block."
            )
        _refuse_unknown_witnesses(execution, self._witnesses, source)
        payload = execution.codec.encode(state, self._types, "the state of the checkpoint")
        execution.loop.created = mark = execution.loop.created + 1
        if self._newest is not None and not self.has_jumped:
            return self._jump(execution, self._newest, source)
        if self._is_recorded(execution, every):
            call = execution.next_call()
            part = remembered(execution, self.number, mark + 1)
            part.is_of_first_type = type(state) is self._type
            execution.issue(TakeCheckpoint(call, self.number, payload, part, keep, source))
            self._begin_anew()
        return execution.codec.decode(payload, self._types)

    def _begin_anew(self) -> None:
        self._has_any, self._outcomes, self._is_worth_it = True, 0, False

    def _is_recorded(self, execution: "Execution", every: int | None) -> bool:
        """Return True if a call is recorded. In a replay the history decides. Live, the first one is recorded, then the
        policy decides.

        Not while a recorded outcome is unseen by the code, because a resume from there would lose it. Nor in a run that
        is being cancelled, which is about to end, or in the handler of an exception.
        """
        if self.number in self._recorded:
            return True
        if execution.replaying or execution.unapplied or execution.cancel is not None:
            return False
        handled = sys.exception()
        if handled is not None and handled is not self._handled:
            return False
        if not self._has_any:
            return True
        return self._outcomes >= every if every is not None else self._is_worth_it or self._outcomes >= OUTCOMES_MAX

    def _jump(self, execution: "Execution", newest: Checkpoint, source: str) -> Any:
        """Continue from the newest checkpoint. It restores what the events would have done that are not replayed."""
        self.has_jumped = True
        execution.issue(Jump(source))
        self.number = newest.part.number
        self._begin_anew()
        try:
            go_on_from(execution, newest.part, self._witnesses)
            state = execution.codec.decode(newest.state, self._types)
            if newest.part.is_of_first_type and type(state) is not self._type:
                kinds = type(state).__qualname__, self._type.__qualname__
                raise NotDecodable(f"the recorded state is a {kinds[0]}, and the code's is a {kinds[1]}")
        except NotDecodable as error:
            self.unreadable = str(error)
            raise
        return state


def take_checkpoint(execution: "Execution", state: Any, every: int | None, keep: int, frame: FrameType) -> Any:
    """Execute a call of `checkpoint` by workflow code, from this frame."""
    execution.require_live()
    if every is not None and every < 1:
        raise Misuse(f"every={every!r}: it is a number of steps, at least 1.")
    if keep < KEPT_MIN:
        raise Misuse(f"keep={keep!r}: it is how many checkpoints are kept, at least {KEPT_MIN}.")
    if found := under_way(execution):
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise Misuse(
            f"{_at(persons_line(frame))}everstep.checkpoint() with something else under way ({listed}): a run "
            "that continues from the checkpoint would not find it again. Await it or cancel it before."
        )
    return execution.checkpoints_of_run().take(execution, state, every, keep, frame)


def _at(source: str) -> str:
    return f"{source} — " if source else ""


def under_way(execution: "Execution") -> list[str]:
    """Return what the code has begun and not finished, except the call itself."""
    loop = execution.loop
    found = [f"step {call.step}" for call in execution.steps.values()]
    timers = [*loop.timers.values(), *loop.new_timers]
    found += [f"a timer of {timer.duration / 1e6:g} s" for timer in timers if not timer.cancelled()]
    found += [f"receive {name!r}" for name in execution.receiving.awaited()]
    if (requests := execution.receiving.requests) is not None:
        found += [f"requests {name!r}" for name in requests.awaited()]
        found += ["a request without an answer"] * len(requests.taken)
    found += [f"child run {call.run}" for call in execution.children.values()]
    others = [task for task in loop.tasks.values() if task is not execution.main and not task.done()]
    return found + [f"task {task.get_name()}" for task in others]


def _refuse_unknown_witnesses(execution: "Execution", known: "dict[str, Taken]", source: str) -> None:
    """Refuse a fact that needs a function of the code to observe or judge it, if it was made after the first
    checkpoint.
    """
    for subject, taken in execution.witnesses.items():
        if subject not in known and (taken.judge is not None or recipe_of(taken.witness) is None):
            raise Misuse(
                f"{_at(source)}everstep.checkpoint() of a run that remembers {subject}, which a resumed run "
                "could not observe again, or not judge. `expect` it before the first "
                "checkpoint, or `release` it."
            )


encode_part = msgspec.json.Encoder().encode
decode_part = msgspec.json.Decoder(EnginePart).decode


# -- what the engine remembers ----------------------------------------------------------------------------------------
def remembered(execution: "Execution", number: int, numbers: int) -> EnginePart:
    """Return what a resume needs in addition to the code's state."""
    part = EnginePart(
        number,
        execution._calls,
        numbers,
        execution.loop.now,
        execution.entropy,
        execution.branch,
        dict(execution._visits),
    )
    if execution._random is not None:
        part.random, part.gauss = packed_state(execution._random)
    part.signals = execution.receiving.unreceived()
    if execution.receiving.requests is not None:
        part.requests = execution.receiving.requests.untaken()
    part.facts = {subject: KeptFact.of(taken) for subject, taken in execution.witnesses.items()}
    part.kept = execution.kept.outcomes[:] if execution.kept is not None else []
    if execution.books is not None:
        part.books = execution.books.kept()
    return part


def go_on_from(execution: "Execution", part: EnginePart, known: Mapping[str, Taken]) -> None:
    """Restore what was remembered. `known` are the facts whose witnesses the code itself has made by now."""
    source = from_packed_state(part.random, part.gauss) if part.random else None
    execution.go_on_from(part.calls, part.visits, source)
    execution.branch_off(part.branch, part.entropy)
    execution.note_lost(part.caution, set(part.unseen_workers))
    execution.saga.uncompensated = list(part.uncompensated)
    if execution.books is not None and part.books is not None:
        execution.books.go_on_from(part.books)
    execution.loop.now, execution.loop.created = part.now, part.numbers - 1
    execution.receiving.restore(part.signals)
    if part.requests or execution.receiving.requests is not None:
        execution.receiving.requests_of_run().restore(part.requests)
    execution.witnesses.clear()
    for subject, kept in part.facts.items():
        if subject not in known and kept.recipe is None:
            raise NotDecodable(f"the run remembers {subject}, which the code no longer expects before it comes here")
        execution.remember(subject, kept.taken(known.get(subject)))
    execution.keep_outcomes(Kept(part.kept) if part.kept else None)
