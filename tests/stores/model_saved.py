"""What a store does with threads and items of frameworks, as a model: see model.py."""

from collections.abc import Callable, Sequence

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


class SavedModel:
    """Plain dicts by thread and key."""

    def __init__(self, lives: Callable[[str], bool]) -> None:
        self._lives = lives
        self._owners: dict[str, ThreadOwner] = {}
        self._states: dict[tuple[str, str, str], SavedState] = {}
        self._parts: dict[tuple[str, str, str, str, int], SavedPart] = {}
        self._writes: dict[tuple[str, str, str, str, int], SavedWrite] = {}
        self._items: dict[tuple[str, str], SavedItem] = {}

    # -- writing --------------------------------------------------------------------------------------------------
    def do(self, operation: SavedOperation) -> Verdict:
        """Do an operation, or refuse it and change nothing."""
        match operation:
            case ChangeThread():
                return self._change(operation)
            case TakeThread():
                return self._take(operation)
            case FreeThread():
                there = self._owners.get(operation.thread)
                if there is None or (there.owner, there.epoch) != (operation.worker, operation.epoch):
                    return Refused("fenced")
                self._owners[operation.thread] = there._replace(owner=None)
            case ChangeItems():
                self._change_items(operation)
        return Accepted()

    def _take(self, take: TakeThread) -> Verdict:
        there = self._owners.get(take.thread, ThreadOwner(None, 0, 0, take.at))
        if there.owner not in (None, take.worker) and self._lives(there.owner):
            return Refused("taken")
        epoch = there.epoch if there.owner == take.worker else there.epoch + 1
        self._owners[take.thread] = ThreadOwner(take.worker, epoch, take.at, there.born)
        return Taken(epoch, there.born)

    def _refusal(self, change: ChangeThread) -> Refused | None:
        there = self._owners.get(change.thread, ThreadOwner(None, 0, 0, 0))
        if change.epoch:
            if (there.owner, there.epoch) != (change.worker, change.epoch):
                return Refused("fenced")
        elif there.owner not in (None, change.worker) and self._lives(there.owner):
            return Refused("taken")
        if not change.everything:
            for part in change.parts:
                known = self._parts.get((change.thread, *part[:4]))
                if known is not None and known.digest != part.digest:
                    return Refused("key")
        elif change.unchanged_since is not None:
            times = [state.at for key, state in self._states.items() if key[0] == change.thread]
            was_taken = change.thread in self._owners and there.since >= change.unchanged_since
            if was_taken or not times or max(times) >= change.unchanged_since:
                return Refused("changed")
        return None

    def _change(self, change: ChangeThread) -> Verdict:
        refusal = self._refusal(change)
        if refusal is not None:
            return refusal
        thread = change.thread
        if change.everything:
            self._states = {key: state for key, state in self._states.items() if key[0] != thread}
            self._parts = {key: part for key, part in self._parts.items() if key[0] != thread}
            self._writes = {key: write for key, write in self._writes.items() if key[0] != thread}
            if thread in self._owners and self._owners[thread].owner is None:
                del self._owners[thread]
        if change.born:
            self._owners.setdefault(thread, ThreadOwner(None, 1, change.at, change.born))
        for forgotten in change.forgotten:
            self._states.pop((thread, *forgotten), None)
            self._writes = {key: write for key, write in self._writes.items() if key[:3] != (thread, *forgotten)}
        new = {(thread, *part[:4]): part for part in reversed(change.parts)}
        self._parts = self._parts if change.everything else new | self._parts
        for unneeded in change.unneeded:  # also a new one, unless it replaces everything
            self._parts = {key: part for key, part in self._parts.items() if key[:4] != (thread, *unneeded)}
        self._parts = new | self._parts if change.everything else self._parts
        for state in change.states:
            self._states[thread, state.namespace, state.id] = state
        for write in change.writes:
            self._writes.setdefault((thread, *write[:4]), write)
        for write in change.rewrites:
            self._writes[thread, *write[:4]] = write
        return Accepted()

    def _change_items(self, change: ChangeItems) -> None:
        for item in change.items:
            there = self._items.get(item[:2])
            self._items[item[:2]] = item._replace(created_at=there.created_at) if there is not None else item
        for deleted in change.deleted:
            self._items.pop(deleted, None)
        for namespace, key, until in change.seen:
            there = self._items.get((namespace, key))
            if there is not None and there.expires_at is not None:
                self._items[namespace, key] = there._replace(expires_at=until)
        for namespace, key, at in change.expired:
            there = self._items.get((namespace, key))
            if there is not None and not _is_alive(there, at):
                del self._items[namespace, key]

    # -- reading --------------------------------------------------------------------------------------------------
    def state(self, thread: str, namespace: str, id: str) -> SavedState | None:
        return self._states.get((thread, namespace, id))

    def states(
        self, thread: str, namespace: str | None = None, before: tuple[str, str] | None = None, limit: int = 100
    ) -> list[SavedState]:
        found = [state for key, state in self._states.items() if key[0] == thread]
        found = [state for state in found if namespace in (None, state.namespace)]
        if before is not None and namespace is None:
            found = [state for state in found if (state.id, state.namespace) < before]
        elif before is not None:
            found = [state for state in found if state.id < before[0]]
        return sorted(found, key=lambda state: (state.id, state.namespace), reverse=True)[:limit]

    def lineage(self, thread: str, namespace: str, id: str, limit: int = 100) -> list[SavedState]:
        found: list[SavedState] = []
        state = self.state(thread, namespace, id)
        while state is not None and len(found) < limit:
            found.append(state)
            state = self.state(thread, namespace, state.parent)
        return found

    def writes(self, thread: str, namespace: str, states: Sequence[str]) -> list[SavedWrite]:
        found = [write for key, write in self._writes.items() if key[:2] == (thread, namespace)]
        found = [write for write in found if write.state in states]
        return sorted(found, key=lambda write: (write.state, write.path, write.call, write.place))

    def parts(self, thread: str, namespace: str, channel: str, series: str, upto: int) -> list[SavedPart]:
        place = (thread, namespace, channel, series)
        found = [part for key, part in self._parts.items() if key[:4] == place and part.number <= upto]
        return sorted(found, key=lambda part: part.number)

    def series(self, thread: str) -> list[tuple[str, str, str]]:
        return sorted({key[1:4] for key in self._parts if key[0] == thread})

    def threads(self, after: str = "", limit: int = 100, before: int | None = None) -> list[str]:
        newest: dict[str, int] = {}
        for key, state in self._states.items():
            newest[key[0]] = max(newest.get(key[0], state.at), state.at)
        return sorted(one for one, at in newest.items() if one > after and (before is None or at < before))[:limit]

    def of_origins(self, origins: Sequence[str]) -> list[tuple[str, str, str]]:
        return sorted(key for key, state in self._states.items() if state.origin and state.origin in origins)

    def owner(self, thread: str) -> ThreadOwner | None:
        return self._owners.get(thread)

    def item(self, namespace: str, key: str, at: int) -> SavedItem | None:
        found = self._items.get((namespace, key))
        return found if found is not None and _is_alive(found, at) else None

    def items(self, prefix: str, at: int, after: tuple[str, str] = ("", ""), limit: int = 100) -> list[SavedItem]:
        found = [item for item in self._items.values() if _is_alive(item, at) and item.namespace.startswith(prefix)]
        return sorted((item for item in found if item[:2] > after), key=lambda item: item[:2])[:limit]

    def namespaces(self, at: int, after: str = "", limit: int = 1000) -> list[str]:
        found = {item.namespace for item in self._items.values() if _is_alive(item, at)}
        return sorted(one for one in found if one > after)[:limit]

    def dead_items(self, at: int, limit: int = 1000) -> list[tuple[str, str]]:
        dead = [item for item in self._items.values() if not _is_alive(item, at)]
        return [item[:2] for item in sorted(dead, key=lambda item: item.expires_at or 0)][:limit]


def _is_alive(item: SavedItem, at: int) -> bool:
    return item.expires_at is None or item.expires_at > at
