"""The retry policy of a step: which failures get another attempt, and when."""

import random
from datetime import timedelta
from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from everstep.errors import Fatal, NotDone
from everstep.model.durations import Duration
from everstep.model.options import checked_choice, checked_errors, checked_number, checked_seconds, checked_whole
from everstep.model.untrusted import attempted, attribute, is_a

ErrorTypes = tuple[type[BaseException], ...]


class Retry(Struct, frozen=True):
    """How often, and how patiently, a failing step is tried again.

    attempts: how many attempts in all; an attempt that a crash cut off does not count.
    first, factor, most: the delay before the second attempt (`2`, `"2s"` or a `timedelta`), its growth, its limit.
    jitter: the share of the delay that is random, so that many runs do not come back at once.
    only, never: exception types that get another attempt, or never do. `Fatal` never does; `NotDone` always may.
    then: what happens when all attempts are used up: `"raise"` in the workflow, or `"hold"` for a person.
    retry_after_most: the longest pause that a server may ask for by `Retry-After` (default: a day).
    """

    attempts: int = 3
    first: Duration = 1.0
    factor: float = 2.0
    most: Duration = 60.0
    jitter: float = 0.1
    only: ErrorTypes = ()
    never: ErrorTypes = ()
    then: Literal["raise", "hold"] = "raise"
    retry_after_most: Duration = 86_400.0

    def __post_init__(self) -> None:
        force_setattr(self, "only", checked_errors("only", self.only))
        force_setattr(self, "never", checked_errors("never", self.never))
        checked_whole("attempts", self.attempts, least=1)
        for name in ("first", "most", "retry_after_most"):
            force_setattr(self, name, checked_seconds(name, getattr(self, name)))
        checked_number("factor", self.factor, least=1)
        checked_number("jitter", self.jitter, least=0, most=1)
        checked_choice("then", self.then, ("raise", "hold"))

    def allows(self, failures: int, error: BaseException) -> bool:
        """Tell whether another attempt follows after this many failed ones."""
        return failures < self.attempts and self.may_retry(error)

    def may_retry(self, error: BaseException) -> bool:
        """Tell whether this error is of a kind that gets another attempt at all."""
        if is_a(error, Fatal, *self.never):
            return False
        return not self.only or is_a(error, NotDone, *self.only)

    def delay(self, failures: int, error: BaseException, randomness: random.Random) -> float:
        """Return the seconds to wait after this many failed attempts.

        A `Retry-After` that the error carries wins, up to `retry_after_most`.
        """
        asked = retry_after(error)
        if asked is not None:
            return min(asked, _seconds(self.retry_after_most))
        most = _seconds(self.most)
        try:
            grown = _seconds(self.first) * self.factor ** (failures - 1)
        except OverflowError:
            grown = most
        return min(most, grown) * (1 + self.jitter * (2 * randomness.random() - 1))


def _seconds(duration: Duration) -> float:
    """Return a duration of a policy, which is seconds since the policy was made."""
    assert not isinstance(duration, str | timedelta)
    return duration


ONE_ATTEMPT = Retry(attempts=1)


def retry_after(error: BaseException) -> float | None:
    """Return the seconds that an error asks to wait: its `retry_after`, or its response's `Retry-After` header.

    None if it says nothing that could be believed: a date, a negative number, something that raises.
    """
    value = attribute(error, "retry_after")
    if value is None:
        headers = attribute(attribute(error, "response"), "headers")
        value = attempted(attribute(headers, "get"), "Retry-After") if headers is not None else None
    seconds = attempted(float, value) if not is_a(value, bool) else None
    return seconds if type(seconds) is float and 0 <= seconds < float("inf") else None
