"""The checkpointer: LangGraph's threads in an Everstep store."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from everstep.adapters import CURRENT, Right, SavedState, ground_of
from everstep.errors import Damaged, Misuse, ThreadActive
from everstep.integrations.langgraph.branches import Branches
from everstep.integrations.langgraph.calls import Asking, asking_in, is_called_in, right_for
from everstep.integrations.langgraph.nodes import SCRATCHPAD, Places
from everstep.integrations.langgraph.serde import Allowed, StrictSerializer
from everstep.integrations.langgraph.states import body_of
from everstep.integrations.langgraph.threads import HIDDEN, Loaded, Threads, log

CHANGES: Final = ("bulk_update_state", "abulk_update_state")
"""LangGraph's functions by which a person changes a state."""
RANDOM_BITS: Final = 32
KEEP_EACH: Final = 20
"""With `keep`: the minimum number of new checkpoints before old ones are deleted."""


class EverstepSaver(BaseCheckpointSaver[Any]):
    """A checkpointer for LangGraph on SQLite or PostgreSQL.

    url: as for `everstep.open`; or an app that `with everstep.open() as app:` gave.
    allowed: types that stored values may be of, beside those that LangGraph holds for safe and plain data types of
        loaded modules: classes, or their modules and names.
    serde: another serializer. With LangGraph's own ones an attacker who can write the database can execute code.
    keep: how many checkpoints of each namespace stay; older ones go as new ones come. Default: all.
    options: as for `everstep.open`.
    """

    records_steps: Final = True
    """Marks a saver under which steps called by a node are recorded. (Other checkpointers have no such attribute.)"""

    def __init__(
        self,
        url: Any = None,
        *,
        allowed: Allowed = (),
        serde: SerializerProtocol | None = None,
        keep: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(serde=serde or StrictSerializer(allowed))
        if keep is not None and keep < 1:
            raise Misuse(f"keep={keep!r}: it is a number of checkpoints, at least 1.")
        self.ground = ground_of(url, **options)
        self.threads = Threads(self.ground)
        self.places = Places()
        self.branches = Branches(self.threads)
        self.keep = keep
        self._puts: Counter[str] = Counter()

    def close(self) -> None:
        """Close the store, if it was opened here."""
        self.ground.close()

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> "EverstepSaver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "EverstepSaver":
        await self.ground.opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def get_next_version(self, current: int | str | None, channel: None) -> int | str:
        """Return a version after another one, unique among the forks of a thread.

        They have the form that LangGraph's own checkpointers give them, so threads that come from those continue; after
        a number, which others give, comes a number.
        """
        chance = self.ground.random_bits(RANDOM_BITS)
        if isinstance(current, int):
            return current + 1 + chance
        number = int(current.partition(".")[0]) if current else 0
        return f"{number + 1:032}.{chance:016}"

    # -- saving ---------------------------------------------------------------------------------------------------
    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint. It is durable on return."""
        place = _thread_of(config)
        self._refuse_change(place[0], sys._getframe(1))
        return self._put(place, config, checkpoint, metadata, new_versions)

    def _refuse_change(self, thread: str, frame: FrameType | None) -> None:
        """Refuse a person's change while a graph runs. A node may make one: it is part of that graph."""
        if self.ground.is_run(thread) and is_called_in(frame, *CHANGES) and not _is_in_node(thread):
            self.ground.refuse_if_run(thread)

    def _put(
        self,
        place: tuple[str, str],
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        thread, namespace = place
        saved: dict[str, Any] = {**checkpoint}
        values = saved.pop("channel_values")
        whole = get_checkpoint_metadata(config, metadata)
        dump = self.serde.dumps_typed
        id, parent, source = checkpoint["id"], get_checkpoint_id(config) or "", str(metadata.get("source", ""))
        self.threads.save(
            (thread, namespace, id),
            parent,
            str(whole.get("run_id") or ""),
            dump(saved),
            dump(whole),
            checkpoint["channel_versions"],
            new_versions,
            values,
            dump,
            ("", 0) if namespace else self.branches.of_state(thread, id, parent, source),
            source,
        )
        if self.keep is not None:
            self._puts[thread] += 1
            if self._puts[thread] >= max(self.keep, KEEP_EACH):
                del self._puts[thread]
                self._keep_newest(thread, self.keep)
        return _config(thread, namespace, checkpoint["id"])

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a task wrote, before the checkpoint that includes it. It is durable on return."""
        thread, namespace = _thread_of(config)
        place = (thread, namespace, config["configurable"]["checkpoint_id"])
        dump = self.serde.dumps_typed
        rows = [(WRITES_IDX_MAP.get(channel, at), channel, dump(value)) for at, (channel, value) in enumerate(writes)]
        self.threads.write(place, task_id, task_path, rows)

    # -- finding --------------------------------------------------------------------------------------------------
    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return a checkpoint by its id, or the newest undamaged one."""
        asking = asking_in(sys._getframe(1))
        return self._get(config, asking, self._right_for(config, asking))

    def _get(self, config: RunnableConfig, asking: Asking | None, right: Right | None) -> CheckpointTuple | None:
        thread, namespace = _thread_of(config)
        if right is not None:
            self.ground.take(right)
        elif asking is not None and asking.loop.is_nested:
            self._note_place(config)
        id = get_checkpoint_id(config) or ""
        found = self.threads.find(thread, namespace, id)
        if asking is not None and not asking.loop.is_nested:
            self.branches.begin(thread, asking.loop, found, is_addressed=bool(id))
        return self._tuple(thread, found) if found is not None else None

    def _note_place(self, config: RunnableConfig) -> None:
        """Record that a graph begins to run in a node."""
        thread = _thread_of(config)[0]
        self.places.note(thread, config, self.branches.of_call(thread))

    def _right_for(self, config: RunnableConfig, asking: Asking | None) -> Right | None:
        """Return the right that a starting graph has to take: no other call may run its thread meanwhile."""
        if asking is None or asking.loop.is_nested:
            return None
        _refuse_in_workflow()
        thread = _thread_of(config)[0]
        if self.ground.is_run(thread, by=asking.loop):
            return None  # the graph asks once more
        return right_for(self.ground, thread, asking)

    def _tuple(self, thread: str, found: Loaded, writes: Sequence[Any] | None = None) -> CheckpointTuple:
        row, load = found.row, self.serde.loads_typed
        if writes is None:
            writes = self.threads.writes(thread, row.namespace, [row.id])
        checkpoint: Any = load(found.body.checkpoint)
        checkpoint["channel_values"] = {channel: load(value) for channel, value in found.values.items()}
        return CheckpointTuple(
            _config(thread, row.namespace, row.id),
            checkpoint,
            load(found.body.metadata),
            _config(thread, row.namespace, row.parent) if row.parent else None,
            [(one.call, one.channel, self.threads.value(thread, one, self.serde)) for one in writes],
        )

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Give checkpoints, the newest first. Other processes may write to the thread meanwhile."""
        if config is not None and before is not None and asking_in(sys._getframe(1)) is not None:
            self._note_place(config)  # in time travel a graph in a node gets its checkpoint by this call
        if limit is not None and limit <= 0:
            return
        namespace = config["configurable"].get("checkpoint_ns") if config is not None else None
        wanted = get_checkpoint_id(config) if config is not None else None
        until = (get_checkpoint_id(before) or "") if before is not None else ""
        given = 0
        for thread in [str(config["configurable"]["thread_id"])] if config is not None else self.threads.threads():
            for row in self.threads.rows(thread, namespace, until):
                if (not wanted or row.id == wanted) and (found := self._matching(thread, row, filter)) is not None:
                    yield self._tuple(thread, found)
                    given += 1
                    if given == limit:
                        return

    def _matching(self, thread: str, row: SavedState, filter: dict[str, Any] | None) -> Loaded | None:
        try:
            metadata = self.serde.loads_typed(body_of(thread, row).metadata) if filter else {}
            is_wanted = all(metadata.get(key) == value for key, value in (filter or {}).items())
            return self.threads.load(thread, row) if is_wanted else None
        except Damaged as error:
            log.error("%s It is left out of the list.", error)
            return None

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return what was written to channels since their last stored values, on the way to a checkpoint."""
        thread, namespace = _thread_of(config)
        remaining = set(channels)
        collected: dict[str, list[PendingWrite]] = {channel: [] for channel in channels}
        seeds: dict[str, Any] = {}
        target = self.threads.find(thread, namespace, get_checkpoint_id(config) or "") if channels else None
        parent = target.row.parent if target is not None else ""
        while parent and remaining:
            line = self.ground.saved.lineage(thread, namespace, parent)
            writes: dict[str, list[Any]] = {}
            for write in self.threads.writes(thread, namespace, [row.id for row in line], strict=True):
                writes.setdefault(write.state, []).append(write)
            for row in line:
                found = self.threads.load(thread, row)
                for write in reversed(writes.get(row.id, [])):
                    if write.channel in remaining:
                        value = self.threads.value(thread, write, self.serde)
                        collected[write.channel].append((write.call, write.channel, value))
                for channel in remaining & found.values.keys():
                    seeds[channel] = self.serde.loads_typed(found.values[channel])
                    remaining.discard(channel)
            parent = line[-1].parent if line else ""
        return {channel: _history(collected[channel], channel, seeds) for channel in channels}

    # -- forgetting and copying -----------------------------------------------------------------------------------
    # What another process may not do while a graph runs, another call here may not do either.
    def delete_thread(self, thread_id: str) -> None:
        """Delete the whole content of a thread."""
        self.ground.refuse_if_run(str(thread_id))
        self.threads.forget_thread(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that runs of LangGraph have made, with their writes.

        Those that delta channels of other checkpoints are made from are only hidden, and deleted with the last of
        these.
        """
        states: dict[str, list[tuple[str, str]]] = {}
        for thread, namespace, id in self.ground.saved.of_origins([str(one) for one in run_ids]):
            states.setdefault(thread, []).append((namespace, id))
        for thread in states:
            self.ground.refuse_if_run(thread)
        for thread, gone in states.items():
            self._forget(thread, gone)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy the whole content of a thread to another one."""
        self.ground.refuse_if_run(str(target_thread_id))
        self.threads.copy(str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete old checkpoints: all but the latest of each namespace and what that needs, or everything."""
        if strategy not in ("keep_latest", "delete"):
            raise Misuse(f'strategy={strategy!r}: it is "keep_latest" or "delete".')
        for thread in map(str, thread_ids):
            self.ground.refuse_if_run(thread)
            if strategy == "delete":
                self.threads.forget_thread(thread)
            else:
                self._keep_newest(thread, 1)

    def forget_threads(self, older_than: float) -> Sequence[str]:
        """Delete the threads that were neither changed nor run for this many seconds, and return their ids.

        Running threads stay, and those that are used meanwhile. The outcomes of their steps are deleted by the
        retention of runs (`everstep gc`), which leaves those of other threads.
        """
        until = self.ground.now() - round(older_than * 1_000_000)
        gone: list[str] = []
        last = ""
        while found := self.ground.saved.threads(last, 100, until):
            for thread in found:
                with suppress(ThreadActive):
                    self.ground.refuse_if_run(thread)
                    if self.threads.forget_thread(thread, unchanged_since=until):
                        gone.append(thread)
            last = found[-1]
        return gone

    def _keep_newest(self, thread: str, count: int) -> None:
        """Delete all states but the newest of each namespace, and those that their delta channels are made from."""
        rows: dict[str, list[SavedState]] = {}
        for row in self.threads.rows(thread, None):
            rows.setdefault(row.namespace, []).append(row)
        self._forget(thread, [(row.namespace, row.id) for there in rows.values() for row in there[count:]])

    def _forget(self, thread: str, gone: Sequence[tuple[str, str]]) -> None:
        """Delete states. Those that others are made from are hidden, until they are no longer needed."""
        rows = {(row.namespace, row.id): row for row in self.threads.rows(thread, None, hidden=True)}
        unwanted = {place for place, row in rows.items() if row.origin == HIDDEN}.union(gone)
        needed: set[tuple[str, str]] = set()
        for place, row in rows.items():
            if place not in unwanted:
                needed |= self._needed_by(thread, row, rows)
        hidden = [rows[place]._replace(origin=HIDDEN) for place in gone if place in needed]
        self.threads.forget_states(thread, sorted(unwanted - needed), hidden)

    def _needed_by(
        self, thread: str, row: SavedState, rows: Mapping[tuple[str, str], SavedState]
    ) -> set[tuple[str, str]]:
        """Return the states before one that its delta channels are made from."""
        needed: set[tuple[str, str]] = set()
        try:
            body = body_of(thread, row)
            metadata = self.serde.loads_typed(body.metadata)
        except Damaged:
            return needed
        missing = set(metadata.get("counters_since_delta_snapshot") or {}) - body.refs.keys()
        before = rows.get((row.namespace, row.parent))
        while missing and before is not None:
            needed.add((before.namespace, before.id))
            with suppress(Damaged):
                missing -= body_of(thread, before).refs.keys()
            before = rows.get((before.namespace, before.parent))
        return needed

    # -- the same, in async code ----------------------------------------------------------------------------------
    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        asking = asking_in(sys._getframe(1))
        return await self.ground.soon(self._get, config, asking, self._right_for(config, asking))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """See `list`."""
        if config is not None and before is not None and asking_in(sys._getframe(1)) is not None:
            self._note_place(config)
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (one := await self.ground.soon(next, found, None)) is not None:
            yield one

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        place = _thread_of(config)
        self._refuse_change(place[0], sys._getframe(1))
        return await self.ground.soon(self._put, place, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See `put_writes`."""
        await self.ground.soon(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """See `delete_thread`."""
        await self.ground.soon(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `delete_for_runs`."""
        await self.ground.soon(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """See `copy_thread`."""
        await self.ground.soon(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `prune`."""
        await self.ground.soon(lambda: self.prune(thread_ids, strategy=strategy))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """See `get_delta_channel_history`."""
        return await self.ground.soon(lambda: self.get_delta_channel_history(config=config, channels=channels))


def _thread_of(config: RunnableConfig) -> tuple[str, str]:
    configurable = config["configurable"]
    return str(configurable["thread_id"]), configurable.get("checkpoint_ns", "")


def _refuse_in_workflow() -> None:
    if CURRENT.get() is not None:
        raise Misuse(
            "A graph that runs inside a workflow or a step needs no EverstepSaver: what it does is recorded in the "
            "run. Compile it without a checkpointer, and await everstep.receive() in a node, not interrupt()."
        )


def _is_in_node(thread: str) -> bool:
    """Return True if this is called in a node of a graph that runs a thread."""
    config = var_child_runnable_config.get()
    configurable: Any = config.get("configurable") or {} if config is not None else {}
    return SCRATCHPAD in configurable and str(configurable.get("thread_id")) == thread


def _config(thread: str, namespace: str, id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": id}}


def _history(writes: Sequence[PendingWrite], channel: str, seeds: Mapping[str, Any]) -> DeltaChannelHistory:
    history: DeltaChannelHistory = {"writes": [*reversed(writes)]}
    if channel in seeds:
        history["seed"] = seeds[channel]
    return history
