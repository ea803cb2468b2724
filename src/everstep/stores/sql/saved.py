"""Threads and items in a SQL database."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from everstep.stores.protocol import Accepted, Refused, Verdict
from everstep.stores.rows.saved import (
    ChangeItems,
    ChangeThread,
    FreeThread,
    SavedItem,
    SavedOperation,
    SavedPart,
    SavedState,
    SavedWrite,
    Taken,
    TakeThread,
    ThreadOwner,
)
from everstep.stores.sql.rows import Row, text
from everstep.stores.sql.statements import Statements

ACCEPTED: Final = Accepted()
LAST: Final = "\U0010ffff" * 8
"""Greater than any namespace."""


class SavedTables:
    """Operations on threads and items, inside an open transaction."""

    def __init__(self, statements: Statements) -> None:
        self._all = statements.all
        self._run = statements.run
        self._many = statements.many

    def do(self, operation: SavedOperation) -> Verdict:
        """Do an operation, or refuse it and change nothing."""
        match operation:
            case ChangeThread():
                return self._change(operation)
            case TakeThread():
                rows = self._all("take_thread", operation.thread, operation.worker, operation.at)
                return Taken(*rows[0]) if rows else Refused("taken")
            case FreeThread():
                freed = self._run("free_thread", operation.thread, operation.worker, operation.epoch)
                return ACCEPTED if freed else Refused("fenced")
            case ChangeItems():
                return self._change_items(operation)

    def _change(self, change: ChangeThread) -> Verdict:
        thread = change.thread
        if change.everything and change.unchanged_since is not None:
            self._run("hold_thread", thread)
            refusal = self._refusal(change) or self._forget_old(thread, change.unchanged_since)
            self._run("drop_held_thread", thread)
        else:
            refusal = self._refusal(change)
        if refusal is not None:
            return refusal
        if change.parts and not change.everything and not self._add_parts(change):
            return Refused("key")
        if change.everything and change.unchanged_since is None:
            for statement in ("forget_states", "forget_parts", "forget_writes", "forget_thread"):
                self._run(statement, thread)
        for forgotten in change.forgotten:
            self._run("forget_state", thread, *forgotten)
            self._run("forget_writes_of_state", thread, *forgotten)
        for unneeded in change.unneeded:
            self._run("forget_series", thread, *unneeded)
        if change.everything:
            self._many("save_part", [(thread, *part) for part in change.parts])
        if change.born:
            self._run("put_thread", thread, change.at, change.born)
        kinds: tuple[tuple[str, Sequence[Row]], ...] = (
            ("save_state", change.states),
            ("save_write", change.writes),
            ("save_rewrite", change.rewrites),
        )
        for name, saved in kinds:
            if len(saved) == 1:
                self._run(name, thread, *saved[0])
            elif saved:
                self._many(name, [(thread, *row) for row in saved])
        return ACCEPTED

    def _refusal(self, change: ChangeThread) -> Refused | None:
        rows = self._all("thread_guard", change.thread)
        owner, epoch, lives = rows[0] if rows else (None, 0, 0)
        if change.epoch:
            return Refused("fenced") if (owner, epoch) != (change.worker, change.epoch) else None
        return Refused("taken") if owner is not None and owner != change.worker and lives else None

    def _forget_old(self, thread: str, since: int) -> Refused | None:
        """Delete the content of a thread, if all of it is older than a time."""
        ((_, epoch, taken_at, _),) = self._all("thread_owner", thread)
        if epoch and taken_at >= since:
            return Refused("changed")
        if not self._run("forget_old_states", thread, since):
            return Refused("changed")
        for statement in ("forget_old_parts", "forget_old_writes", "forget_thread"):
            self._run(statement, thread)
        return None

    def _add_parts(self, change: ChangeThread) -> bool:
        """Add parts, if each is new or equals the stored one, as nearly always."""
        added: list[SavedPart] = []
        for part in change.parts:
            if self._run("save_part", change.thread, *part):
                added.append(part)
            elif self._all("digest_of_part", change.thread, *part[:4]) != [(part.digest,)]:
                for one in added:
                    self._run("forget_part", change.thread, *one[:4])
                return False
        return True

    def _change_items(self, change: ChangeItems) -> Verdict:
        for item in change.items:
            self._run("save_item", *item)
        for deleted in change.deleted:
            self._run("delete_item", *deleted)
        for namespace, key, until in change.seen:
            self._run("see_item", namespace, key, until)
        for expired in change.expired:
            self._run("delete_expired_item", *expired)
        return ACCEPTED


class SavedReading:
    """Reads about threads and items. See `SavedReads`."""

    def __init__(self, all_of: Callable[..., list[Row]], texts: Callable[[Sequence[str]], Any]) -> None:
        self._all = all_of
        self._texts = texts

    def state(self, thread: str, namespace: str, id: str) -> SavedState | None:
        """Return a state, or None."""
        rows = self._all("saved_state", thread, namespace, id)
        return _state(rows[0]) if rows else None

    def states(
        self, thread: str, namespace: str | None = None, before: tuple[str, str] | None = None, limit: int = 100
    ) -> list[SavedState]:
        """Return states by falling ids, then namespaces."""
        id, last = before if before is not None else (None, None)
        if namespace is None:
            return [_state(row) for row in self._all("saved_states_of_thread", thread, id, last, limit)]
        return [_state(row) for row in self._all("saved_states", thread, namespace, id, limit)]

    def lineage(self, thread: str, namespace: str, id: str, limit: int = 100) -> list[SavedState]:
        """Return a state, its parent, the parent's parent and so on."""
        return [_state(row) for row in self._all("saved_lineage", thread, namespace, id, limit)]

    def writes(self, thread: str, namespace: str, states: Sequence[str]) -> list[SavedWrite]:
        """Return the writes of states, by state, path, call and place."""
        rows = self._all("saved_writes", thread, namespace, self._texts(states))
        return [
            SavedWrite(text(ns), text(state), text(call), place, text(path), text(channel), body, digest)
            for ns, state, call, place, path, channel, body, digest in rows
        ]

    def parts(self, thread: str, namespace: str, channel: str, series: str, upto: int) -> list[SavedPart]:
        """Return the parts of a series up to a number, in order."""
        rows = self._all("saved_parts", thread, namespace, channel, series, upto)
        return [SavedPart(namespace, channel, series, *row) for row in rows]

    def series(self, thread: str) -> list[tuple[str, str, str]]:
        """Return all series of a thread."""
        return [(text(a), text(b), text(c)) for a, b, c in self._all("saved_series", thread)]

    def threads(self, after: str = "", limit: int = 100, before: int | None = None) -> list[str]:
        """Return ids of threads after one, in order; with `before` only those whose newest state is older."""
        return [text(row[0]) for row in self._all("saved_threads_listed", after, limit, before)]

    def of_origins(self, origins: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return the states that these origins made, by thread, namespace and id."""
        rows = self._all("states_of_origins", self._texts(origins))
        return [(text(thread), text(namespace), text(id)) for thread, namespace, id in rows]

    def owner(self, thread: str) -> ThreadOwner | None:
        """Return the worker that runs a thread."""
        rows = self._all("thread_owner", thread)
        return ThreadOwner(*rows[0]) if rows else None

    def item(self, namespace: str, key: str, at: int) -> SavedItem | None:
        """Return an item that has not expired at a time."""
        rows = self._all("saved_item", namespace, key, at)
        return SavedItem(*rows[0]) if rows else None

    def items(self, prefix: str, at: int, after: tuple[str, str] = ("", ""), limit: int = 100) -> list[SavedItem]:
        """Return unexpired items in namespaces with a prefix, by namespace and key, after `after`."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else LAST
        return [SavedItem(*row) for row in self._all("saved_items_listed", prefix, end, *after, at, limit)]

    def namespaces(self, at: int, after: str = "", limit: int = 1000) -> list[str]:
        """Return the namespaces of unexpired items, after `after`."""
        return [text(row[0]) for row in self._all("saved_namespaces", at, after, limit)]

    def dead_items(self, at: int, limit: int = 1000) -> list[tuple[str, str]]:
        """Return expired items."""
        return [(text(namespace), text(key)) for namespace, key in self._all("dead_items", at, limit)]


def _state(row: Row) -> SavedState:
    namespace, id, parent, origin, body, digest, at = row
    return SavedState(text(namespace), text(id), text(parent), text(origin), body, digest, at)
