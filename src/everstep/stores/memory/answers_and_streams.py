"""Answers and streams of the in-memory store: the reference that every other store is compared with."""

import threading

from everstep.stores.rows.answers_and_streams import AnswerRow, Beside, EntryRow


class MemoryBeside:
    """Rows by their keys. The store's lock guards them."""

    _lock: threading.RLock

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int], AnswerRow] = {}
        self._streams: dict[tuple[str, int, str], dict[int, EntryRow]] = {}

    def _keep_beside(self, beside: Beside) -> None:
        for answer in beside.answers:
            self._answers.setdefault((answer.run, answer.number), answer)
        for entry in beside.entries:
            place = (entry.run, entry.generation, entry.name)
            self._streams.setdefault(place, {}).setdefault(entry.position, entry)

    def _forget_beside(self, run: str, generation: int, keep: int) -> list[EntryRow]:
        """Forget what belongs to events of this generation after a number. Returns the entries that are gone."""
        for place, answer in list(self._answers.items()):
            if answer.run == run and answer.generation == generation and answer.seq > keep:
                del self._answers[place]
        gone = [
            entry
            for (id, number, _), entries in sorted(self._streams.items())
            for _, entry in sorted(entries.items())
            if id == run and number == generation and entry.seq > keep
        ]
        for entry in gone:
            del self._streams[entry.run, entry.generation, entry.name][entry.position]
        return gone

    def answer(self, run: str, number: int) -> AnswerRow | None:
        """Return where the answer to a request stands."""
        with self._lock:
            return self._answers.get((run, number))

    def stream(self, run: str, generation: int, name: str, after: int = 0, limit: int = 1000) -> list[EntryRow]:
        """Return entries of a stream after a position, in order."""
        with self._lock:
            entries = self._streams.get((run, generation, name), {})
            return [entries[position] for position in sorted(entries) if position > after][:limit]

    def stream_head(self, run: str, generation: int, name: str) -> EntryRow | None:
        """Return the newest entry of a stream."""
        with self._lock:
            entries = self._streams.get((run, generation, name), {})
            return entries[max(entries)] if entries else None

    def streams(self, run: str, generation: int) -> list[tuple[str, int]]:
        """Return the names of a run's streams, and the position of the newest entry of each."""
        with self._lock:
            found = {
                name: max(entries)
                for (id, number, name), entries in self._streams.items()
                if id == run and number == generation and entries
            }
            return sorted(found.items())
