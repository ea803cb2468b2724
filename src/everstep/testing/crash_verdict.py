"""The verdict on a trial: which promise was broken, where in the user's code, and what to do about it."""

import os
import re
from typing import Any, Final

import msgspec

from everstep.codec.preview import harmless
from everstep.engine.run.holds import report_facts
from everstep.lint.finding import Finding
from everstep.model import mistakes
from everstep.model.mistakes import Mistake
from everstep.testing.causes import BY_CHANCE, BY_ORDER, IN_MEMORY, IN_THE_BODY, Causes
from everstep.testing.crash_boundaries import Boundary
from everstep.testing.crash_trial import Account

PLACE: Final = re.compile(r"([^\s:]+\.py):(\d+)")
KEPT: Final = frozenset({"in-doubt"})
"""Reasons for a hold with which a run keeps its promise: nothing is guessed, and a person decides."""


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
    """The results of undisturbed runs. What differs between them is not judged, and `notes` says so."""

    accounts: list[Account]
    notes: list[str] = []

    @property
    def first(self) -> Account:
        """The undisturbed run that others are compared with."""
        return self.accounts[0]

    def differs(self, name: str) -> bool:
        """Return True if undisturbed runs differ in this."""
        return any(getattr(one, name) != getattr(self.first, name) for one in self.accounts[1:])


class Judge:
    """Compares trials with undisturbed runs of the same workflow."""

    def __init__(self, causes: Causes, expected: Expected) -> None:
        self._causes = causes
        self._expected = expected

    def undisturbed(self, account: Account) -> Broken | None:
        """Judge an undisturbed run."""
        if account.status == "failed" and "OutsideInWorkflow" in account.error:
            return self._refused(account.error)
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
        most = first.model_calls + len(killed) * first.models_at_once
        if account.model_calls > most and not self._expected.differs("model_calls"):
            found = f"{account.model_calls} model calls, and at most {most} may be: {first.model_calls} undisturbed"
            return Broken(
                "a model is called again only if its call was under way", found=[f"{found}, and those under way"]
            )
        is_kept = any(hold.reason in KEPT for hold in account.holds)
        if is_kept:
            return None
        if lost:
            return self._lost(account, killed, lost)
        for name, promise in (
            ("end", "the run ends as if nothing had happened"),
            ("answers", "a request gets the answer of an undisturbed run"),
            ("published", "published values are those of an undisturbed run"),
            ("files", "files are those of an undisturbed run"),
            ("shape", "the history has the steps of an undisturbed run"),
        ):
            if not self._expected.differs(name) and getattr(account, name) != getattr(first, name):
                return self._different(promise, name, account, killed)
        return None

    def _refused(self, error: str) -> Broken:
        """Explain an error by which the engine refused something in the workflow's body, in lint's words."""
        broken = Broken("a workflow's body does not touch the outside")
        line = _line_in(error)
        if (seen := self._causes.refused(line)) is not None:
            return self._found(broken, seen)
        what, _, remedy = error.partition(": ")[2].partition(" — ")
        return _told(broken, Mistake("", harmless(what), harmless(remedy)), self._causes.at(line) if line else "")

    # -- held runs --------------------------------------------------------------------------------------------------
    def _held(self, account: Account) -> Broken | None:
        usual = {hold.reason for hold in self._expected.first.holds}
        unusual = [hold for hold in account.holds if hold.reason not in KEPT | usual]
        if not unusual:
            return None
        hold = unusual[0]
        if hold.reason != "diverged":
            found = [f"held as {hold.reason}: {harmless(hold.summary)}"]
            place = self._causes.place_of(hold.step or "") or self._causes.own_place()
            return Broken("the run continues by itself", place, found=found)
        return self.diverged(report_facts(hold).get("differences", []))

    def diverged(self, differences: list[dict[str, Any]]) -> Broken:
        """The replayed code asks for something else than what is recorded."""
        found = [f"recorded: {one['recorded']}   now: {one['now']}" for one in differences[:3]]
        line = _line_in(str(differences[0].get("now_source", "")) if differences else "")
        broken = Broken("replayed code asks for the same as before", found=[harmless(one) for one in found])
        if (seen := self._causes.likeliest((BY_CHANCE, BY_ORDER, IN_MEMORY), line)) is not None:
            return self._found(broken, seen)
        return _told(broken, mistakes.takes_another_way(), self._causes.at(line) if line else self._causes.own_place())

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
        new = [f"{name} was applied with arguments that no undisturbed run has" for name in self._new(account)]
        if new and len(new) == len(names) and not set(account.repeated) & set(account.keyless):
            broken.found = list(dict.fromkeys(new))  # nothing was done twice; something different was done
            return self._another_way(broken, killed)
        return self._repeated(broken, account, killed)

    def _new(self, account: Account) -> list[str]:
        """Return the effects that an undisturbed run does not have at all."""
        return [name for name, digest in account.effects if (name, digest) not in self._expected.first.effects]

    def _repeated(self, broken: Broken, account: Account, killed: list[Boundary]) -> Broken:
        """Something happened again: a step's body was repeated, or the workflow's own code did it in the replay."""
        repeated = [step for step, effect in account.repeated.items() if effect != "read"]
        again = [step for step in repeated if step in {one.step for one in killed}] or repeated
        if not again:
            if (seen := self._causes.likeliest([IN_THE_BODY])) is not None:
                return self._found(broken, seen)
            again = list(account.repeated)
        if not again:
            seen = self._causes.likeliest([IN_MEMORY])
            return self._found(broken, seen) if seen is not None else self._another_way(broken, killed)
        step = again[-1]
        place = self._causes.place_of(step)
        if account.repeated[step] == "read":
            return _told(broken, mistakes.read_changes(step), place)
        if step not in account.keyless:
            return _told(broken, mistakes.key_ignored(step), place)
        seen = self._causes.of_step("key", step)
        return self._found(broken, seen) if seen is not None else _told(broken, mistakes.key_unused(step), place)

    def _lost(self, account: Account, killed: list[Boundary], names: list[str]) -> Broken:
        found = [f"{name} was applied in an undisturbed run, and now it is missing" for name in dict.fromkeys(names)]
        broken = Broken("an effect of a completed step has happened", found=found)
        inside = [one for one in killed if one.step and one.column in ("body", "commit", "outcome")]
        boundary = inside[0] if inside else killed[0]
        step = boundary.step or names[0]
        together = self._effects_of_one_step(names[0])
        if len(together) < 2:
            return _told(broken, mistakes.marked_too_early(step), self._place(boundary))
        broken.found.append(f"{step} has the effects {', '.join(together)}, and one outcome")
        if (seen := self._causes.of_step("effects", step)) is not None:
            return self._found(broken, seen)
        mistake = mistakes.two_effects(step, account.contracts.get(boundary.step, "once"))
        return _told(broken, mistake, self._place(boundary))

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
            return _told(broken, mistakes.written_in_part(), self._place(killed[0]))
        return self._another_way(broken, killed)

    def _another_way(self, broken: Broken, killed: list[Boundary]) -> Broken:
        """The workflow's code did something else. Lint's findings may name the cause; otherwise it is unknown."""
        seen = self._causes.likeliest((IN_MEMORY, BY_ORDER, BY_CHANCE, IN_THE_BODY))
        if seen is not None:
            return self._found(broken, seen)
        return _told(broken, mistakes.takes_another_way(), self._place(killed[-1]))

    @staticmethod
    def _is_shorter(usual: dict[str, str], now: dict[str, str]) -> bool:
        return any(name not in now or len(now[name]) < len(usual[name]) for name in usual)

    def _found(self, broken: Broken, seen: Finding) -> Broken:
        """Explain it by lint's finding."""
        return _told(broken, Mistake(seen.rule, seen.what, seen.remedy), self._causes.at(seen.line))

    def _place(self, boundary: Boundary) -> str:
        return os.path.basename(boundary.place) or self._causes.place_of(boundary.step) or self._causes.own_place()


def _told(broken: Broken, mistake: Mistake, place: str = "") -> Broken:
    broken.place, broken.why, broken.remedy = place, mistake.what, mistake.remedy
    return broken


def _line_in(source: str) -> int:
    found = PLACE.search(source)
    return int(found.group(2)) if found else 0


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
