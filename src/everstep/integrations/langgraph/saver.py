"""The checkpointer: LangGraph's threads in an Everstep store."""

import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
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

from everstep.adapters import CURRENT, SavedState, ground_of
from everstep.errors import Damaged, Misuse
from everstep.integrations.langgraph.branches import Branches
from everstep.integrations.langgraph.nodes import Places
from everstep.integrations.langgraph.serde import Allowed, StrictSerializer
from everstep.integrations.langgraph.states import body_of
from everstep.integrations.langgraph.threads import Loaded, Threads, log

FRAMES_MAX: Final = 4
"""So far up the loop of a graph is looked for."""
RANDOM_BITS: Final = 32
KEEP_EACH: Final = 20
"""With `keep`: at least so many checkpoints come before old ones go."""


class EverstepSaver(BaseCheckpointSaver[Any]):
    """A checkpointer for LangGraph on SQLite or PostgreSQL.

    url: as for `everstep.open`; or an app that `with everstep.open() as app:` gave.
    allowed: types that stored values may be of, beside those that LangGraph holds for safe and plain data types of
        loaded modules: classes, or their modules and names.
    serde: another serializer. With LangGraph's own ones whoever can write the database may execute code.
    keep: how many checkpoints of each namespace stay; older ones go as new ones come. Default: all.
    options: as for `everstep.open`.
    """

    records_steps: Final = True
    """Steps that a node calls are recorded. (Another checkpointer does not have this name.)"""

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

    def __enter__(self) -> "EverstepSaver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "EverstepSaver":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def get_next_version(self, current: int | str | None, channel: None) -> int | str:
        """Return a version after another: no two forks of a thread have the same.

        They have the form that LangGraph's own checkpointers give them, so threads that come from those go on; after a
        number, which others give, comes a number.
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
        thread, namespace = _thread_of(config)
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
        """Save what a task wrote, before the checkpoint that has it. It is durable on return."""
        thread, namespace = _thread_of(config)
        place = (thread, namespace, config["configurable"]["checkpoint_id"])
        dump = self.serde.dumps_typed
        rows = [(WRITES_IDX_MAP.get(channel, at), channel, dump(value)) for at, (channel, value) in enumerate(writes)]
        self.threads.write(place, task_id, task_path, rows)

    # -- finding --------------------------------------------------------------------------------------------------
    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return a checkpoint by its id, or the newest one that is sound."""
        return self._get(config, _loop_of(sys._getframe(1)))

    def _get(self, config: RunnableConfig, loop: Any) -> CheckpointTuple | None:
        thread, namespace = _thread_of(config)
        if loop is not None and not loop.is_nested:
            self._begin(thread, loop)
        elif loop is not None:
            self._note_place(config)
        id = get_checkpoint_id(config) or ""
        found = self.threads.find(thread, namespace, id)
        if loop is not None and not loop.is_nested:
            self.branches.begin(thread, loop, found, is_addressed=bool(id))
        return self._tuple(thread, found) if found is not None else None

    def _note_place(self, config: RunnableConfig) -> None:
        """A graph begins to run in a node."""
        thread, configurable = _thread_of(config)[0], config["configurable"]
        self.places.note(thread, config, self.branches.of_call(thread, configurable))

    def _begin(self, thread: str, loop: Any) -> None:
        """A graph begins to run: nobody else may run this thread until it has ended."""
        if CURRENT.get() is not None:
            raise Misuse(
                "A graph that runs inside a workflow or a step needs no EverstepSaver: what it does is recorded in the "
                "run. Compile it without a checkpointer, and await everstep.receive() in a node, not interrupt()."
            )
        ground = self.ground
        ground.take(thread)
        end = weakref.finalize(loop, ground.free, thread)
        end.atexit = False

        async def end_soon() -> None:
            await ground.soon(end)

        push_async = getattr(loop.stack, "push_async_callback", None)
        if push_async is not None:
            push_async(end_soon)
        else:
            loop.stack.callback(end)

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
        """Give checkpoints, the newest first. The thread may be written to meanwhile."""
        if config is not None and before is not None and _loop_of(sys._getframe(1)) is not None:
            self._note_place(config)  # in time travel a graph in a node asks for its checkpoint in this way
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
    def delete_thread(self, thread_id: str) -> None:
        """Delete all that a thread has."""
        self.threads.forget_thread(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that runs of LangGraph have made, with what was written in them."""
        states: dict[str, list[tuple[str, str]]] = {}
        for thread, namespace, id in self.ground.saved.of_origins([str(one) for one in run_ids]):
            states.setdefault(thread, []).append((namespace, id))
        for thread, gone in states.items():
            self.threads.forget_states(thread, gone)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Let a thread have all that another one has."""
        self.threads.copy(str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Forget what is old: all but the latest checkpoint of each namespace and what that needs, or everything."""
        if strategy not in ("keep_latest", "delete"):
            raise Misuse(f'strategy={strategy!r}: it is "keep_latest" or "delete".')
        for thread in map(str, thread_ids):
            if strategy == "delete":
                self.threads.forget_thread(thread)
            else:
                self._keep_newest(thread, 1)

    def forget_threads(self, older_than: float) -> Sequence[str]:
        """Delete the threads that nobody has changed for so many seconds, and return their ids.

        What their steps came to goes with the retention of runs (`everstep gc`), which leaves that of other threads.
        """
        until = self.ground.now() - round(older_than * 1_000_000)
        gone: Sequence[str] = []
        while found := self.ground.saved.threads(gone[-1] if gone else "", 100, until):
            for thread in found:
                self.threads.forget_thread(thread)
            gone = [*gone, *found]
        return gone

    def _keep_newest(self, thread: str, count: int) -> None:
        """Forget all states but the newest of each namespace, and those that their delta channels are made from."""
        rows: dict[str, list[SavedState]] = {}
        for row in self.threads.rows(thread, None):
            rows.setdefault(row.namespace, []).append(row)
        gone: list[tuple[str, str]] = []
        for namespace, there in rows.items():
            kept: set[str] = set()
            for row in there[:count]:
                kept |= {row.id, *self._needed_by(thread, row)}
            gone += [(namespace, row.id) for row in there if row.id not in kept]
        if gone:
            self.threads.forget_states(thread, gone)

    def _needed_by(self, thread: str, row: SavedState) -> set[str]:
        """Return the states before one that its delta channels are made from."""
        found = self.threads.load(thread, row)
        counters = self.serde.loads_typed(found.body.metadata).get("counters_since_delta_snapshot") or {}
        missing = {channel for channel in counters if channel not in found.body.refs}
        needed: set[str] = set()
        while missing and row.parent:
            line = self.ground.saved.lineage(thread, row.namespace, row.parent)
            for row in line:
                needed.add(row.id)
                missing -= self.threads.load(thread, row).body.refs.keys()
                if not missing:
                    return needed
            if not line:
                break
        return needed

    # -- the same, in async code ----------------------------------------------------------------------------------
    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        return await self.ground.soon(self._get, config, _loop_of(sys._getframe(1)))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """See `list`."""
        if config is not None and before is not None and _loop_of(sys._getframe(1)) is not None:
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
        return await self.ground.soon(self.put, config, checkpoint, metadata, new_versions)

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


def _config(thread: str, namespace: str, id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": id}}


def _history(writes: Sequence[PendingWrite], channel: str, seeds: Mapping[str, Any]) -> DeltaChannelHistory:
    history: DeltaChannelHistory = {"writes": [*reversed(writes)]}
    if channel in seeds:
        history["seed"] = seeds[channel]
    return history


def _loop_of(frame: FrameType | None) -> Any:
    """Return the loop of a graph that is just beginning and asks for its checkpoint, or None.

    LangGraph does not tell a saver where an invocation begins and ends. Its loop asks for the checkpoint when it is
    entered, and closes its stack when it is left.
    """
    for _ in range(FRAMES_MAX):
        if frame is None:
            return None
        if frame.f_code.co_name in ("__enter__", "__aenter__"):
            asking = frame.f_locals.get("self")
            if all(hasattr(asking, name) for name in ("stack", "checkpoint_config", "is_nested")):
                return asking
        frame = frame.f_back
    return None
