"""LangGraph's long-term memory in an Everstep store: items by namespace and key, with search and with time to live."""

import asyncio
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, cast

import msgspec
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    InvalidNamespaceError,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
)
from langgraph.store.base.embed import ensure_embeddings, get_text_at_path, tokenize_path

from everstep.adapters import ChangeItems, SavedItem, ground_of, labels_of, namespace_of
from everstep.errors import Damaged, Misuse
from everstep.integrations.langgraph.serde import Allowed, StrictSerializer

PAGE: Final = 500
SECOND: Final = 1_000_000
TTL_MINUTES_MAX: Final = 10**10
"""The largest number of minutes that a database can store: some 20,000 years."""
Vectors = dict[str, list[float]]

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[str, bytes, Vectors]).decode


def _numbers(compare: Callable[[float, float], bool]) -> Callable[[Any, Any], bool]:
    def are_so(value: Any, wanted: Any) -> bool:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return False  # an item without a number there does not match
        return compare(number, float(wanted))

    return are_so


COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": _numbers(operator.gt),
    "$gte": _numbers(operator.ge),
    "$lt": _numbers(operator.lt),
    "$lte": _numbers(operator.le),
}


class EverstepStore(BaseStore):
    """LangGraph's store on SQLite or PostgreSQL.

    url: as for `everstep.open`; an app from `with everstep.open() as app:`; or an `EverstepSaver`, to share its store.
    index: how to search by meaning, as LangGraph's stores take it. All items below the namespace are compared. ttl: how
    long items live, as LangGraph's stores take it. Each put also deletes expired items. allowed: as for
    `EverstepSaver`. options: as for `everstep.open`.
    """

    supports_ttl = True

    def __init__(
        self,
        url: Any = None,
        *,
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
        allowed: Allowed = (),
        serde: SerializerProtocol | None = None,
        **options: Any,
    ) -> None:
        _seconds((ttl or {}).get("default_ttl"), "default_ttl")
        self._shares = hasattr(url, "ground")
        self._ground = url.ground if self._shares else ground_of(url, **options)
        self._serde = serde or StrictSerializer(allowed)
        self.ttl_config = ttl
        self._embeddings = ensure_embeddings(index.get("embed")) if index else None
        self._fields = [*((index or {}).get("fields") or ["$"])]

    def close(self) -> None:
        """Close the store, if it was opened here."""
        if not self._shares:
            self._ground.close()

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> "EverstepStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "EverstepStore":
        await self._ground.opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- operations -----------------------------------------------------------------------------------------------
    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Do operations. Reads see the state before the puts. Everything is durable on return."""
        results: list[Result] = []
        puts: dict[tuple[str, str], PutOp] = {}
        seen: list[tuple[str, str, int]] = []
        for op in ops:
            match op:
                case GetOp():
                    results.append(self._get(op, seen))
                case SearchOp():
                    results.append(self._search(op, seen))
                case ListNamespacesOp():
                    results.append(self._namespaces(op))
                case PutOp():
                    puts[_joined(op.namespace), _checked(op.key)] = op
                    results.append(None)
                case _:
                    raise Misuse(f"{type(op).__name__} is not an operation of a store.")
        if puts or seen:
            self._write(puts, seen)
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """See `batch`."""
        return await self._ground.soon(self.batch, list(ops))

    def _write(self, puts: dict[tuple[str, str], PutOp], seen: Sequence[tuple[str, str, int]]) -> None:
        now, saved = self._ground.now(), self._ground.saved
        vectors = self._embedded(puts)
        items = []
        for place, op in puts.items():
            if op.value is not None:
                kind, data = self._serde.dumps_typed(dict(op.value))
                seconds = _seconds(op.ttl)
                until = now + round(seconds * SECOND) if seconds is not None else None
                items.append(SavedItem(*place, _encode((kind, data, vectors.get(place, {}))), now, now, until, seconds))
        gone = [place for place, op in puts.items() if op.value is None]
        expired: list[tuple[str, str, int]] = []
        if self.ttl_config is not None or any(item.expires_at is not None for item in items):
            expired = [(*place, now) for place in saved.dead_items(now)]
        self._ground.commit(ChangeItems(items, gone, seen, expired))

    # -- reading --------------------------------------------------------------------------------------------------
    def _get(self, op: GetOp, seen: list[tuple[str, str, int]]) -> Item | None:
        now = self._ground.now()
        item = self._ground.saved.item(_joined(op.namespace), _checked(op.key), now)
        if item is None:
            return None
        _note_seen(item, now, seen, wanted=op.refresh_ttl)
        return Item(value=self._loaded(item)[0], **_about(item))

    def _items(self, namespace: tuple[str, ...], now: int) -> Iterator[SavedItem]:
        last = ("", "")
        while page := self._ground.saved.items(_joined(namespace), now, last, PAGE):
            yield from page
            last = page[-1][:2]

    def _loaded(self, item: SavedItem) -> tuple[dict[str, Any], Vectors]:
        try:
            kind, data, vectors = _decode(item.value)
        except msgspec.MsgspecError as error:
            raise Damaged(f"The saved item {item.key!r} cannot be read.") from error
        return cast(dict[str, Any], self._serde.loads_typed((kind, data))), vectors

    def _search(self, op: SearchOp, seen: list[tuple[str, str, int]]) -> list[SearchItem]:
        now = self._ground.now()
        found: list[tuple[SavedItem, dict[str, Any], Vectors]] = []
        for item in self._items(op.namespace_prefix, now):
            value, vectors = self._loaded(item)
            if all(_matches(value.get(key), wanted) for key, wanted in (op.filter or {}).items()):
                found.append((item, value, vectors))
        found.sort(key=lambda one: -one[0].updated_at)
        scores: dict[int, float] = {}
        if op.query and self._embeddings is not None:
            asked = self._embeddings.embed_query(op.query)
            for place, (_, _, vectors) in enumerate(found):
                if vectors:
                    scores[place] = max(_likeness(asked, one) for one in vectors.values())
        order = sorted(range(len(found)), key=lambda place: -scores.get(place, -2.0))[op.offset : op.offset + op.limit]
        for place in order:
            _note_seen(found[place][0], now, seen, wanted=op.refresh_ttl)
        return [SearchItem(value=found[at][1], score=scores.get(at), **_about(found[at][0])) for at in order]

    def _namespaces(self, op: ListNamespacesOp) -> list[tuple[str, ...]]:
        now, found, last = self._ground.now(), set[tuple[str, ...]](), ""
        while page := self._ground.saved.namespaces(now, last):
            last = page[-1]
            names = [tuple(labels_of(one)) for one in page]
            met = [one for one in names if all(_meets(one, condition) for condition in op.match_conditions or ())]
            found |= {one[: op.max_depth] for one in met}
        return sorted(found)[op.offset : op.offset + op.limit]

    # -- meaning --------------------------------------------------------------------------------------------------
    def _embedded(self, puts: dict[tuple[str, str], PutOp]) -> dict[tuple[str, str], Vectors]:
        """Return the vectors of the new values, by place and path."""
        if self._embeddings is None:
            return {}
        texts: list[tuple[tuple[str, str], str, str]] = []
        for place, op in puts.items():
            if op.value is None or op.index is False:
                continue
            for path in op.index or self._fields:
                fields = path if path == "$" else tokenize_path(path)
                texts += [(place, f"{path}.{at}", one) for at, one in enumerate(get_text_at_path(op.value, fields))]
        found: dict[tuple[str, str], Vectors] = {}
        if texts:
            made = self._embeddings.embed_documents([one for _, _, one in texts])
            for (place, path, _), vector in zip(texts, made, strict=True):
                found.setdefault(place, {})[path] = [float(number) for number in vector]
        return found


def _joined(namespace: tuple[str, ...]) -> str:
    """Return a namespace as it is stored: no two have the same text, and one below another begins with its text."""
    for label in namespace:
        if not isinstance(label, str):
            raise InvalidNamespaceError(f"A label of a namespace is a text, not {type(label).__name__}.")
    return namespace_of(namespace)


def _checked(key: str) -> str:
    """Return a key, if it is a text: a database would take 1 for "1"."""
    if not isinstance(key, str):
        raise Misuse(f"The key of an item is a text, not {type(key).__name__}.")
    return key


def _seconds(minutes: Any, option: str = "ttl") -> float | None:
    """Return how long an item lives, in seconds; None without an end."""
    if minutes is None:
        return None
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not abs(minutes) <= TTL_MINUTES_MAX:
        raise Misuse(f"{option}={minutes!r} ({type(minutes).__name__}): it is a finite number of minutes, such as 60.")
    return minutes * 60


def _about(item: SavedItem) -> dict[str, Any]:
    created, updated = (datetime.fromtimestamp(at / SECOND, UTC) for at in (item.created_at, item.updated_at))
    return {
        "namespace": tuple(labels_of(item.namespace)),
        "key": item.key,
        "created_at": created,
        "updated_at": updated,
    }


def _note_seen(item: SavedItem, now: int, seen: list[tuple[str, str, int]], *, wanted: bool) -> None:
    if wanted and item.seconds is not None:
        seen.append((item.namespace, item.key, now + round(item.seconds * SECOND)))


def _meets(namespace: tuple[str, ...], condition: MatchCondition) -> bool:
    path, names = condition.path, namespace
    if len(names) < len(path):
        return False
    part = names[: len(path)] if condition.match_type == "prefix" else names[len(names) - len(path) :]
    return all(wanted in ("*", name) for name, wanted in zip(part, path, strict=True))


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        if any(key.startswith("$") for key in wanted):
            unknown = [key for key in wanted if key not in COMPARISONS]
            if unknown:
                raise ValueError(f"Unsupported operator: {unknown[0]}")
            return all(COMPARISONS[key](value, one) for key, one in wanted.items())
        return isinstance(value, dict) and all(_matches(value.get(key), one) for key, one in wanted.items())
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(_matches(one, other) for one, other in zip(value, wanted, strict=True))
        )
    return bool(value == wanted)


def _likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    lengths = sum(a * a for a in one) ** 0.5 * sum(b * b for b in other) ** 0.5
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
