"""The verdict on a trial: which promise was broken, where in the user's code, and what to do about it."""

import os
import re
from typing import Any, Final

import msgspec

from everstep.codec.preview import harmless
from everstep.engine.holding import report_facts
from everstep.testing.crash_boundaries import Boundary
from everstep.testing.crash_trial import Account
from everstep.testing.suspects import Suspect, line_of_function, suspects_in

PLACE: Final = re.compile(r"([^\s:]+\.py):(\d+)")
KEPT: Final = frozenset({"in-doubt"})
"""A run that is held for these reasons keeps its promise: nothing is guessed, and a person is asked."""


class Broken(msgspec.Struct):
    """A broken promise: what was found, where, and the remedy."""

    promise: str
    place: str = ""
    """`file.py:12`."""
    why: str = ""
    remedy: str = ""
    found: list[str] = []
    boundaries: list[str] = []
    """Where the processes were killed, in words."""
    history: list[str] = []


class Expected(msgspec.Struct):
    """What undisturbed runs give. What differs between them is not judged, and said in `notes`."""

    accounts: list[Account]
    notes: list[str] = []

    @property
    def first(self) -> Account:
        """The undisturbed run that others are compared with."""
        return self.accounts[0]

    def differs(self, name: str) -> bool:
        """Tell whether undisturbed runs differ in this."""
        return any(getattr(one, name) != getattr(self.first, name) for one in self.accounts[1:])


class Judge:
    """Compares trials with undisturbed runs of the same workflow."""

    def __init__(self, file: str, expected: Expected) -> None:
        self._file = file
        self._expected = expected
        self._suspects = suspects_in(file)

    def undisturbed(self, account: Account) -> Broken | None:
        """Judge a run that nobody has disturbed."""
        if account.status == "failed" and "OutsideInWorkflow" in account.error:
            place = PLACE.search(account.error)
            line = self._at(int(place.group(2))) if place else ""
            what, _, remedy = account.error.partition(" — ")
            return Broken("a workflow's body does not touch the outside", line, harmless(what), harmless(remedy))
        if account.violations:
            return Broken("a history keeps its rules", found=account.violations, history=account.history)
        return None

    def judge(self, account: Account, killed: list[Boundary]) -> Broken | None:
        """Return the first promise that a trial has broken, with its cause as far as it can be told."""
        broken = self._first(account, killed)
        if broken is not None:
            broken.history = account.history
        return broken

    def _first(self, account: Account, killed: list[Boundary]) -> Broken | None:
        first = self._expected.first
        if account.violations:
            return Broken("a history keeps its rules", found=account.violations)
        if (held := self._held(account)) is not None:
            return held
        doubled, lost = self._effects(account)
        if doubled:
            return self._doubled(account, killed, doubled)
        is_kept = any(hold.reason in KEPT for hold in account.holds)
        if is_kept:
            return None
        if lost:
            return self._lost(account, killed, lost)
        for name, promise in (
            ("end", "the run ends as if nothing had happened"),
            ("published", "published values are those of an undisturbed run"),
            ("files", "files are those of an undisturbed run"),
            ("shape", "the history has the steps of an undisturbed run"),
        ):
            if not self._expected.differs(name) and getattr(account, name) != getattr(first, name):
                return self._different(promise, name, account, killed)
        return None

    # -- held runs --------------------------------------------------------------------------------------------------
    def _held(self, account: Account) -> Broken | None:
        usual = {hold.reason for hold in self._expected.first.holds}
        unusual = [hold for hold in account.holds if hold.reason not in KEPT | usual]
        if not unusual:
            return None
        hold = unusual[0]
        if hold.reason != "diverged":
            found = [f"held as {hold.reason}: {harmless(hold.summary)}"]
            return Broken("the run goes on by itself", self._step_place(hold.step or ""), found=found)
        differences = report_facts(hold).get("differences", [])
        found = [f"recorded: {one['recorded']}   now: {one['now']}" for one in differences[:3]]
        line = _line_in(str(differences[0].get("now_source", "")) if differences else "")
        broken = Broken("replayed code asks for the same as before", self._at(line), found=[harmless(x) for x in found])
        return self._explained(broken, ("chance", "set", "memory"), line) or self._unexplained(broken)

    def _unexplained(self, broken: Broken) -> Broken:
        broken.why = "after the crash the workflow's code took another way than before"
        broken.remedy = "whatever may differ between two processes belongs into a step (@everstep.step)"
        return broken

    # -- effects ----------------------------------------------------------------------------------------------------
    def _effects(self, account: Account) -> tuple[list[str], list[str]]:
        """Return the effects that were applied too often, and those that are missing."""
        if self._expected.differs("effects"):
            return [], []
        usual, now = self._expected.first.effects, account.effects
        doubled = [name for (name, digest), count in now.items() if count > usual.get((name, digest), 0)]
        lost = [name for (name, digest), count in usual.items() if now.get((name, digest), 0) < count]
        return doubled, lost

    def _doubled(self, account: Account, killed: list[Boundary], names: list[str]) -> Broken:
        found = [f"{name} was applied more often than in an undisturbed run" for name in dict.fromkeys(names)]
        broken = Broken("an effect happens as often as in an undisturbed run", found=found)
        return self._repeated(broken, account, killed)

    def _repeated(self, broken: Broken, account: Account, killed: list[Boundary]) -> Broken:
        """Something happened again: a step's body was repeated, or the workflow's own code did it in the replay."""
        repeated = [step for step, effect in account.repeated.items() if effect != "read"]
        again = [step for step in repeated if step in {one.step for one in killed}] or repeated
        if not again:
            if (explained := self._explained(broken, ("body",), 0)) is not None:
                return explained
            again = list(account.repeated)
        if not again:
            return self._explained(broken, ("memory",), 0) or self._unexplained(broken)
        step = again[-1]
        broken.place = self._step_place(step)
        if account.repeated[step] == "read":
            broken.why = f"{step} is declared a read, was done again after the crash, and changes something outside"
            broken.remedy = "declare the contract that it keeps: a read changes nothing"
            return broken
        if step in account.keyless:
            broken.why = f"{step} ({account.repeated[step]}) was done again after the crash and never used its key"
            broken.remedy = (
                "hand everstep.key() on to the receiver, which knows by it what it has done; if it knows no keys, "
                'declare the step effect="once" with a probe'
            )
        else:
            broken.why = (
                f"{step} ({account.repeated[step]}) was done again after the crash, and its receiver ignores keys"
            )
            broken.remedy = (
                'declare the step effect="once" with a probe that asks the receiver what it has done, '
                "or use a receiver that does one key once"
            )
        return broken

    def _lost(self, account: Account, killed: list[Boundary], names: list[str]) -> Broken:
        found = [f"{name} was applied in an undisturbed run, and now it is missing" for name in dict.fromkeys(names)]
        broken = Broken("an effect of a completed step has happened", found=found)
        inside = [one for one in killed if one.step and one.column in ("body", "commit", "outcome")]
        boundary = inside[0] if inside else killed[0]
        broken.place = _shown(boundary.place) or self._step_place(boundary.step)
        together = self._effects_of_one_step(names[0])
        if len(together) > 1:
            broken.why = (
                f"{boundary.step or names[0]} has {len(together)} effects ({', '.join(together)}) and one outcome"
            )
            broken.remedy = "two effects in one step cannot be told apart after a crash: give each a step of its own"
        else:
            broken.why = (
                f"{boundary.step or names[0]} was marked as done before it was done: killed in between, "
                "it is not done any more"
            )
            broken.remedy = (
                "do the effect first, with everstep.key(), and leave it to Everstep to record that it is done"
            )
        return broken

    def _effects_of_one_step(self, name: str) -> list[str]:
        """Return the effects that were asked for under the key of this one."""
        entries = self._expected.first.entries
        keys = {entry["key"] for entry in entries if entry["effect"] == name}
        return sorted({entry["effect"] for entry in entries if entry["key"] in keys})

    # -- everything else --------------------------------------------------------------------------------------------
    def _different(self, promise: str, name: str, account: Account, killed: list[Boundary]) -> Broken:
        usual, now = getattr(self._expected.first, name), getattr(account, name)
        broken = Broken(promise, found=_differences(name, usual, now))
        if name == "files" and _is_longer(usual, now):
            return self._repeated(broken, account, killed)
        if name == "files" and self._is_shorter(usual, now):
            boundary = killed[0]
            broken.place = _shown(boundary.place) or self._step_place(boundary.step)
            broken.why = "what was written before the crash is not all that is written without one"
            broken.remedy = (
                "do the effect first, with everstep.key(), and leave it to Everstep to record that it is done"
            )
            return broken
        explained = self._explained(broken, ("memory", "set", "chance", "body"), 0)
        if explained is not None:
            return explained
        boundary = killed[-1]
        broken.place = _shown(boundary.place) or self._step_place(boundary.step)
        return self._unexplained(broken)

    @staticmethod
    def _is_shorter(usual: dict[str, str], now: dict[str, str]) -> bool:
        return any(name not in now or len(now[name]) < len(usual[name]) for name in usual)

    def _explained(self, broken: Broken, sorts: tuple[str, ...], line: int) -> Broken | None:
        """Name the suspect that is the likeliest cause: of the first sort there is, nearest above a line."""
        for sort in sorts:
            of_sort = [one for one in self._suspects if one.sort == sort]
            if of_sort:
                nearest = max(of_sort, key=lambda one: _nearness(one, line))
                broken.place, broken.why, broken.remedy = self._at(nearest.line), nearest.what, nearest.remedy
                return broken
        return None

    def _at(self, line: int) -> str:
        return f"{os.path.basename(self._file)}:{line}" if line else os.path.basename(self._file)

    def _step_place(self, step: str) -> str:
        return self._at(line_of_function(self._file, step)) if step else ""


def _nearness(suspect: Suspect, line: int) -> tuple[bool, int]:
    return suspect.line <= line, suspect.line if suspect.line <= line else -suspect.line


def _line_in(source: str) -> int:
    found = PLACE.search(source)
    return int(found.group(2)) if found else 0


def _shown(place: str) -> str:
    return os.path.basename(place)


def _is_longer(usual: Any, now: Any) -> bool:
    return any(name not in usual or len(text) > len(usual[name]) for name, text in now.items())


def _differences(name: str, usual: Any, now: Any) -> list[str]:
    if isinstance(usual, dict):
        lines = []
        for key in sorted(set(usual) | set(now), key=str):
            if usual.get(key) != now.get(key):
                shown = " ".join(key) if isinstance(key, tuple) else key
                lines.append(f"{shown}: undisturbed {_text(usual.get(key))}, now {_text(now.get(key))}")
        return lines
    if name == "end":
        return [f"undisturbed: {_end(usual)}", f"now: {_end(now)}"]
    return [f"undisturbed: {_text(usual)}", f"now: {_text(now)}"]


def _end(end: tuple[str, str, str]) -> str:
    status, result, error = end
    return _text(f"{status} {error or result}")


def _text(value: Any) -> str:
    return harmless("nothing" if value is None else str(value))[:300]
