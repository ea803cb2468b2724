"""The reports of workers in their rows, as others read them."""

from collections.abc import Iterable, Sequence

import msgspec

from everstep.stores.protocol import WorkerRow


class Trouble(msgspec.Struct, omit_defaults=True):
    """The failures of a kind of background work."""

    failures: int = 0
    """Since the worker began."""
    error: str = ""
    """The type of the newest error."""
    since: int = 0
    """When the present series of failures began; 0 if it works again."""


class About(msgspec.Struct, omit_defaults=True):
    """What a worker serves, and how busy it was when it last renewed its lease."""

    recovers: bool = False
    """Whether it claims any free run; otherwise only those that it started."""
    workflows: dict[str, list[str]] = {}
    """By name: version, and the digest of the file that declares the workflow."""
    queues: list[str] | None = None
    """None: all."""
    concurrency: int = 0
    runs: int = 0
    """Runs in memory."""
    running: int = 0
    """Active runs."""
    draining: bool = False
    left: list[str] = []
    """Runs that its code does not match, which it gave back for another worker."""
    troubles: dict[str, Trouble] = {}
    """Background work that has failed, by name."""
    not_claiming: str = ""
    """Why it claims no more runs of others, for now."""
    lease: float = 30.0
    """Seconds after which others may take over its runs if it has not renewed its lease."""

    def serves(self, workflow: str, queue: str) -> bool:
        """Return True if it claims free runs of a workflow in a queue."""
        takes_up = self.recovers and not (self.draining or self.not_claiming)
        return takes_up and workflow in self.workflows and self._serves_queue(queue)

    def _serves_queue(self, queue: str) -> bool:
        return self.queues is None or queue in self.queues


def read_about(row: WorkerRow) -> About:
    """Return a worker's report; an empty one if it cannot be read."""
    try:
        return msgspec.json.decode(row.about, type=About)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return About()


def is_served(row_workflow: str, row_queue: str, abouts: Iterable[About]) -> bool:
    """Return True if any of these workers claims runs of a workflow in a queue."""
    return any(about.serves(row_workflow, row_queue) for about in abouts)


def living(rows: Sequence[WorkerRow]) -> list[About]:
    """Return the reports of workers whose lease has not lapsed."""
    return [read_about(row) for row in rows if row.has_lease]
