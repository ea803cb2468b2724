"""Commands about facts of the outside that a run remembers, and their effect on what it remembers."""

from typing import Any

import msgspec

from everstep.codec import ANY
from everstep.effects.step import declared_name
from everstep.effects.witnesses import Judge, Taken, Witness, from_subject, recipe_of
from everstep.engine.code.commands import Command
from everstep.engine.code.execution import Execution
from everstep.model import events as ev


class TakeWitness(Command):
    """The code remembers a fact about the outside."""

    kind = "witness_taken"
    payload_field = "fact"
    __slots__ = ("call", "on_drift", "payload", "source", "subject", "witness")

    def __init__(self, call: int, witness: Witness, payload: bytes, on_drift: str, source: str) -> None:
        self.call = call
        self.witness = witness
        self.subject = witness.subject
        self.payload = payload
        self.on_drift = on_drift
        self.source = source

    def body(self) -> ev.WitnessTaken:
        body = ev.WitnessTaken(self.call, self.subject, self.on_drift, msgspec.Raw(self.payload), "", self.source)
        if from_subject(self.subject) is None:
            body.recipe = recipe_of(self.witness) or []
        return body

    def text(self) -> str:
        return f"expect {self.subject}"

    def compare(self, recorded: ev.WitnessTaken) -> tuple[str, bool]:
        return ("", False) if recorded.subject == self.subject else ("witness", False)


class ChangeWitness(Command):
    """The code changed a file that remembered folders may contain."""

    kind = "witness_changed"
    __slots__ = ("call", "content", "path", "source")

    def __init__(self, call: int, path: str, content: str | None, source: str) -> None:
        self.call = call
        self.path = path
        self.content = content
        self.source = source

    def body(self) -> ev.WitnessChanged:
        return ev.WitnessChanged(self.call, self.path, self.content or "", self.source)

    def text(self) -> str:
        return f"change of {self.path}"

    def compare(self, recorded: ev.WitnessChanged) -> tuple[str, bool]:
        return ("", False) if recorded.path == self.path else ("path", False)


class ReleaseWitness(Command):
    """The code no longer remembers a fact."""

    kind = "witness_released"
    __slots__ = ("call", "source", "subject")

    def __init__(self, call: int, subject: str, source: str) -> None:
        self.call = call
        self.subject = subject
        self.source = source

    def body(self) -> ev.WitnessReleased:
        return ev.WitnessReleased(self.call, self.subject, self.source)

    def text(self) -> str:
        return f"release {self.subject}"

    def compare(self, recorded: ev.WitnessReleased) -> tuple[str, bool]:
        return ("", False) if recorded.subject == self.subject else ("witness", False)


def take_witness(execution: "Execution", witness: Witness, fact: Any, on_drift: str | Judge, source: str) -> None:
    """Remember a fact about the outside. A newer fact about the same subject replaces it."""
    execution.require_live()
    payload = execution.codec.encode(fact, ANY, witness.subject)
    judge, policy = (None, on_drift) if isinstance(on_drift, str) else (on_drift, f"{declared_name(on_drift)}()")
    execution.remember(witness.subject, Taken(witness, payload, policy, judge))
    execution.issue(TakeWitness(execution.next_call(), witness, payload, policy, source))


def change_file(execution: "Execution", path: str, digest: str | None, source: str) -> None:
    """Update remembered folders, because the code itself changed a file."""
    execution.require_live()
    covering = [taken for taken in execution.witnesses.values() if taken.witness.covered is not None]
    for taken in covering:
        taken.changes[path] = digest
    if covering:
        execution.issue(ChangeWitness(execution.next_call(), path, digest, source))


def release_witness(execution: "Execution", subject: str, source: str) -> None:
    """Stop remembering a fact."""
    execution.require_live()
    if execution.witnesses.pop(subject, None) is not None:
        execution.issue(ReleaseWitness(execution.next_call(), subject, source))


def note_judgement(execution: "Execution", body: ev.DriftJudged) -> None:
    """Apply a recorded decision to the remembered facts."""
    taken = execution.witnesses.get(body.subject)
    if taken is None:
        return  # it was taken between a failure and its retry
    if body.decision == "accept":
        taken.remember(execution.payload(body.fact, body.ref))
    elif body.decision == "ignore":
        taken.ignored = execution.payload(body.fact, body.ref)
