"""A store in memory that outlives its apps: tests read it later, open other apps on it, and change what is in it."""

from collections.abc import Iterable
from typing import Any

from everstep.stores.protocol import CheckpointRow
from everstep.stores.sqlite import MemoryStore

LIFE = "INSERT INTO meta (name, value) VALUES ('life', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
CHECKPOINT = (
    "INSERT INTO checkpoints (run, generation, seq, previous, engine, state, digest, complete) VALUES (?,?,?,?,?,?,?,?)"
)


class LastingStore(MemoryStore):
    """A store that stays as it is when an app closes it. It is gone when nothing refers to it any more."""

    def close(self) -> None:
        """Do nothing."""

    def go_on_from(self, other: "LastingStore") -> None:
        """Be no other store: the same one after a crash."""
        self.do(LIFE, other.life().partition(".")[0])

    def put_checkpoints(self, rows: Iterable[CheckpointRow]) -> None:
        """Let just these checkpoints be there, whatever they say: behind the engine's back."""
        self.do("DELETE FROM checkpoints")
        for row in rows:
            self.do(CHECKPOINT, *row)

    def do(self, statement: str, *parameters: Any) -> None:
        """Change what is in the store behind the engine's back."""
        with self._writer._lock:
            self._writer.connection.execute(statement, parameters)
