"""The retry policy of a step: which failures get another attempt, and when."""

import random
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from everstep.errors import Fatal, Misuse, NotDone

ErrorTypes = tuple[type[BaseException], ...]


def _as_types(value: type[BaseException] | Iterable[type[BaseException]]) -> ErrorTypes:
    return (value,) if isinstance(value, type) else tuple(value)


class Retry(Struct, frozen=True):
    """How often, and how patiently, a failing step is tried again.

    attempts: how many attempts in all; an attempt that a crash cut off does not count.
    first, factor, most: seconds before the second attempt, its growth, and its limit.
    jitter: the share of the delay that is random, so that many runs do not come back at once.
    only, never: exception types that get another attempt, or never do. `Fatal` never does; `NotDone` always may.
    then: what happens when all attempts are used up: `"raise"` in the workflow, or `"hold"` for a person.
    """

    attempts: int = 3
    first: float = 1.0
    factor: float = 2.0
    most: float = 60.0
    jitter: float = 0.1
    only: ErrorTypes = ()
    never: ErrorTypes = ()
    then: Literal["raise", "hold"] = "raise"

    def __post_init__(self) -> None:
        force_setattr(self, "only", _as_types(self.only))
        force_setattr(self, "never", _as_types(self.never))
        if self.attempts < 1:
            raise Misuse(f"Retry(attempts={self.attempts}): a step needs at least one attempt.")
        if self.first < 0 or self.factor < 1 or self.most < 0 or not 0 <= self.jitter <= 1:
            raise Misuse("Retry needs first >= 0, factor >= 1, most >= 0 and jitter between 0 and 1.")
        if self.then not in ("raise", "hold"):
            raise Misuse(f'Retry(then={self.then!r}): it is "raise" or "hold".')

    def allows(self, failures: int, error: BaseException) -> bool:
        """Tell whether another attempt follows after this many failed ones."""
        return failures < self.attempts and self.may_retry(error)

    def may_retry(self, error: BaseException) -> bool:
        """Tell whether this error is of a kind that gets another attempt at all."""
        if isinstance(error, Fatal) or (self.never and isinstance(error, self.never)):
            return False
        if isinstance(error, NotDone) or not self.only:
            return True
        return isinstance(error, self.only)

    def delay(self, failures: int, error: BaseException, randomness: random.Random) -> float:
        """Return the seconds to wait after this many failed attempts. A `Retry-After` that the error carries wins."""
        asked = retry_after(error)
        if asked is not None:
            return asked
        delay: float = min(self.most, self.first * self.factor ** min(failures - 1, 1000))
        return delay * (1 + self.jitter * (2 * randomness.random() - 1))


ONE_ATTEMPT = Retry(attempts=1)


def retry_after(error: BaseException) -> float | None:
    """Return the seconds that an error asks to wait: its `retry_after`, or its response's `Retry-After` header."""
    value = getattr(error, "retry_after", None)
    if value is None:
        headers = getattr(getattr(error, "response", None), "headers", None)
        getter = getattr(headers, "get", None)
        value = getter("Retry-After") if callable(getter) else None
    try:
        seconds = float(value)  # type: ignore[arg-type]  # None and dates raise here, and mean: it did not say
    except (TypeError, ValueError):
        return None
    return seconds if 0 <= seconds < float("inf") else None
