"""The workers of a store, and the workers and hosts that a person has declared gone."""

from typing import Final, Literal, NamedTuple

import msgspec


class WorkerRow(msgspec.Struct):
    """A process that drives runs. `place` is its byte in the file of liveness locks."""

    id: str
    place: int
    pid: int
    host: str
    started_at: int
    lease_until: int
    """When its lease would lapse, by its own clock. Other workers compare it only with what they have read before, and
    never with a time. Not positive: another worker has watched it for a whole lease without a renewal (see
    `Store.lapse`).
    """
    targets: list[str] = []
    """The names of the targets to which it delivers notifications of holds."""
    about: bytes = b"{}"
    """JSON: what it serves, and how busy it is. For people and other workers; no decision depends on it."""

    @property
    def has_lease(self) -> bool:
        """Whether its lease is still valid."""
        return self.lease_until > 0


GoneKind = Literal["worker", "host"]


class GoneRow(NamedTuple):
    """A person's statement that a worker, or everything that had begun on a host until then, is gone for good."""

    kind: GoneKind
    name: str
    at: int
    by: str
    note: str


ENDED_KEPT_MICROSECONDS: Final = 90 * 86_400 * 1_000_000
"""How long the store remembers that a worker has provably ended. After that a person settles its steps in doubt."""
