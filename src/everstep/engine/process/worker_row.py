"""What workers say about themselves in their rows, as others read it."""

from collections.abc import Iterable, Sequence

import msgspec

from everstep.stores.protocol import WorkerRow


class Trouble(msgspec.Struct, omit_defaults=True):
    """How a kind of background work fares that has failed."""

    failures: int = 0
    """Since the worker began."""
    error: str = ""
    """The type of the newest error."""
    since: int = 0
    """Since when it has failed again and again; 0 if it works again."""


class About(msgspec.Struct, omit_defaults=True):
    """What a worker serves, and how busy it was when it last prolonged its lease."""

    recovers: bool = False
    """Whether it takes up any free run; otherwise only those that it started."""
    workflows: dict[str, list[str]] = {}
    """Name to version and print: the digest of the file that declares it."""
    queues: list[str] | None = None
    """None: all."""
    concurrency: int = 0
    runs: int = 0
    """In memory."""
    running: int = 0
    """Of those, at work."""
    draining: bool = False
    left: list[str] = []
    """Runs that its code does not match, which it gave back for another worker."""
    troubles: dict[str, Trouble] = {}
    """Background work that has failed, by name."""
    not_claiming: str = ""
    """Why it takes up no more runs of others, for now."""
    lease: float = 30.0
    """Seconds after which others may take over its runs if it has not prolonged its lease."""

    def serves(self, workflow: str, queue: str) -> bool:
        """Tell whether it takes up free runs of a workflow in a queue."""
        takes_up = self.recovers and not (self.draining or self.not_claiming)
        return takes_up and workflow in self.workflows and self._serves_queue(queue)

    def _serves_queue(self, queue: str) -> bool:
        return self.queues is None or queue in self.queues


def read_about(row: WorkerRow) -> About:
    """Return what a worker says about itself; nothing, if that cannot be read."""
    try:
        return msgspec.json.decode(row.about, type=About)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return About()


def is_served(row_workflow: str, row_queue: str, abouts: Iterable[About]) -> bool:
    """Tell whether any of these workers takes up runs of a workflow in a queue."""
    return any(about.serves(row_workflow, row_queue) for about in abouts)


def living(rows: Sequence[WorkerRow]) -> list[About]:
    """Return what workers say whose lease has not lapsed."""
    return [read_about(row) for row in rows if row.has_lease]
