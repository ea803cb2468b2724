"""What the body of a step may ask for: its key, its attempt, its heartbeat."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from everstep.codec import Codec
from everstep.effects.step import Step
from everstep.effects.surroundings import code_here, require
from everstep.errors import Misuse
from everstep.model.digests import step_key
from everstep.model.mistakes import Mistake, nested_key, nested_step
from everstep.stores.protocol import Store


class Fate(msgspec.Struct):
    """What is known of an attempt's end, for code that the attempt has started."""

    is_settled: bool = False
    """Whether its outcome is known, or does not matter: code that still runs then proves nothing and delays nothing."""


SETTLED: Final = Fate(True)


class Means(NamedTuple):
    """What an atomic step needs of the app that runs it."""

    store: "Store"
    codec: "Codec"
    now: Callable[[], int]


class StepBody(msgspec.Struct, eq=False):
    """The context of a step's body: one attempt."""

    place: ClassVar[str] = "step"
    wants_places: ClassVar[bool] = False

    run: str
    workflow: str
    step: str
    arguments: str
    entropy: str
    attempt: int
    details: Any
    key_used: bool = False

    def worker(self) -> str:
        """Return the worker whose attempt it is."""
        raise AssertionError("an attempt that runs has a worker")

    def shared_fate(self) -> Fate:
        """Return the shared record that tells code which outlives this attempt whether it is settled."""
        raise AssertionError("an attempt that runs has a fate")

    def number(self) -> int:
        """Return the number of the call. Below zero: this is only a question to a probe about it."""
        raise AssertionError("an attempt that runs has a number")

    def idempotency_key(self) -> str:
        """Return the value of `everstep.key()`."""
        return step_key(self.entropy, self.step, self.arguments)

    def take_heartbeat(self, details: Any) -> None:
        """Record how far the body is. May be called on any thread."""
        raise AssertionError("an attempt that runs takes heartbeats")

    def means(self) -> Means:
        """Return what an atomic step needs of the app."""
        raise AssertionError("an attempt that runs knows its app")

    def take_charge(self, nanos: int | None, tokens: int | None) -> None:
        """Add a charge of the body. May be called on any thread."""
        raise AssertionError("an attempt that runs takes charges")

    def take_entry(self, name: str, value: Any) -> None:
        """Append to a stream of the run. May be called on any thread."""
        raise AssertionError("an attempt that runs has streams")

    def refuse_given_up(self) -> None:
        """Raise `NotDone` if the engine has given the attempt up. May be called on any thread."""
        raise AssertionError("an attempt that runs knows whether the run waits for it")

    def refuse_overtaken(self) -> None:
        """Raise `NotDone` if the attempt was given up, or if its run was taken over, as the store itself says.

        May be called on any thread. Raises `StoreError` if the store cannot be read.
        """
        raise AssertionError("an attempt that runs knows its store")

    def call_step(self, step: "Step", args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
        """Call a step as the plain function, because the outer step's contract covers it."""
        here = code_here()
        if here is not None and here.place == "workflow":  # it was given a body's context
            return here.call_step(step, args, kwargs, sys._getframe(2))
        refuse_nested(step, self.step)
        return step.function(*args, **kwargs)

    def call_workflow(
        self, workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Call a workflow as the plain function."""
        return workflow.function(*args, **kwargs)


def refuse_nested(step: "Step", outer: str) -> None:
    """Raise `Misuse` if a step called in the body of another one needs a record of its own."""
    if step.effect in ("once", "atomic"):
        raise _misuse(nested_step(step.name, step.effect, outer))
    if step.key is not None:
        raise _misuse(nested_key(step.name, outer))


def _misuse(wrong: Mistake) -> Misuse:
    return Misuse(f"{wrong.what}: {wrong.remedy}.")


def key() -> str:
    """Return the idempotency key of the step whose body this is: the same in every attempt, and in no other step.

    For a step with `key=` it derives from that key and the store's own random bits: all steps of the store that do this
    action present the same one to its receiver, whichever run they belong to. It is another one after the action was
    done and then compensated, or freed by hand.
    """
    body: StepBody = require("everstep.key()", StepBody)
    body.key_used = True
    return body.idempotency_key()


def heartbeat(details: Any = None) -> None:
    """Say that this step's body is alive, and leave `details` for its next attempt (`everstep.current().details`)."""
    body: StepBody = require("everstep.heartbeat()", StepBody)
    body.take_heartbeat(details)
