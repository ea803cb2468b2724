"""How long ended runs and keys of actions are kept."""

from dataclasses import dataclass
from typing import Any

from everstep.errors import Misuse
from everstep.model.durations import Duration
from everstep.model.options import checked_seconds, refused


@dataclass(frozen=True, slots=True)
class Retention:
    """How long ended runs, and the keys of actions, are kept. Times are `3600`, `"30d"` or a `timedelta`; None is for
    ever.

    runs: time after its end after which a run is deleted with all its data: history, result, published values, inbox.
    keys: a key (`key=`) that is done or free, and has not changed for this time, is forgotten: then its action may be
        done again. Keys outlive their runs, so they have a time of their own.
    keep: number of newest ended runs of each workflow that stay, however old they are.
    every: seconds between two looks for old runs.
    """

    runs: Duration | None = None
    keys: Duration | None = None
    keep: int = 0
    every: Duration = 300.0

    def __post_init__(self) -> None:
        for name in ("runs", "keys", "every"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _seconds(name, given))
        if type(self.keep) is not int or not 0 <= self.keep < 2**53:
            raise refused("keep", self.keep, "a Retention keeps a number of runs, at least 0")
        if _seconds("every", self.every) <= 0:
            raise Misuse("Retention(every=0): there has to be a time between two looks.")

    @property
    def seconds_of_runs(self) -> float | None:
        """How long ended runs are kept."""
        return None if self.runs is None else _seconds("runs", self.runs)

    @property
    def seconds_of_keys(self) -> float | None:
        """How long keys are kept."""
        return None if self.keys is None else _seconds("keys", self.keys)

    @property
    def seconds_between(self) -> float:
        """How long to wait before looking again."""
        return _seconds("every", self.every)


def _seconds(name: str, given: Any) -> float:
    try:
        return float(checked_seconds(name, given))
    except Misuse:
        raise refused(
            name,
            given,
            'it is a number of seconds, a text such as "30d" or a timedelta, not below 0, and in a Retention None is '
            "for ever",
        ) from None


def retention_of(given: Any) -> Retention | None:
    """Return what `retention=` means: a time alone is that of runs."""
    if given is None or type(given) is Retention:
        return given
    return Retention(runs=_seconds("retention", given))
