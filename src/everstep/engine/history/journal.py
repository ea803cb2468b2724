"""The growing end of one run's history: events that are recorded in order, and wait for their commit."""

import zlib
from typing import Any, Final

import msgspec

from everstep.errors import Damaged
from everstep.model.digests import DECIMALS, DIGEST_BYTES, chain_next, chain_state, digest_of
from everstep.model.events import NO_PAYLOAD, Body, EventRow, encode_body
from everstep.stores.protocol import Append, CheckpointRow, NewRun, Post
from everstep.stores.rows.answers_and_streams import Beside
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import KeyChanges

INLINE_BYTES_MAX: Final = 8 * 1024
"""Size up to which a payload is part of its event. Larger ones are stored once per run, compressed if worthwhile."""
SAMPLE_BYTES: Final = 2 * 1024
"""The size of the sample of a large payload that is compressed first, to estimate the rest."""
WORTH_IT: Final = 0.4
"""A payload that does not shrink to this share is stored uncompressed: compressing it takes longer than writing it."""
UNSAMPLED: Final = 3
"""The number of large payloads that are stored uncompressed after one that did not shrink: most steps return
similar data.
"""
PAYLOAD_BYTES_MAX: Final = 1 << 30
_new_tuple = tuple.__new__  # what EventRow(…) does internally, in a third of the time


class Attachments:
    """What is written together with events and belongs to them. Most units have none."""

    def __init__(self) -> None:
        self.payloads: list[tuple[str, bytes]] = []
        self.consumed: list[int] = []
        self.starts: list[NewRun] = []
        self.posts: list[Post] = []
        self.keys: KeyChanges | None = None
        self.checkpoints: list[CheckpointRow] = []
        self.checkpoints_kept = 0
        self.archive: list[ArchiveRow] = []
        self.beside: Beside | None = None

    def put_into(self, unit: Append) -> None:
        """Add everything to a unit."""
        unit.payloads, unit.consumed, unit.starts, unit.posts = self.payloads, self.consumed, self.starts, self.posts
        unit.checkpoints, unit.checkpoints_kept = self.checkpoints, self.checkpoints_kept
        unit.archive, unit.keys, unit.beside = self.archive, self.keys, self.beside

    def follow(self, unit: Append) -> None:
        """Put the attachments of a refused unit before these."""
        self.payloads, self.consumed = [*unit.payloads, *self.payloads], [*unit.consumed, *self.consumed]
        self.starts, self.posts = [*unit.starts, *self.starts], [*unit.posts, *self.posts]
        self.checkpoints, self.archive = [*unit.checkpoints, *self.checkpoints], [*unit.archive, *self.archive]
        self.checkpoints_kept = self.checkpoints_kept or unit.checkpoints_kept
        if unit.beside is not None:
            later = self.beside or Beside()
            self.beside = Beside([*unit.beside.answers, *later.answers], [*unit.beside.entries, *later.entries])
        if unit.keys is not None:
            newer = self.keys or KeyChanges()
            self.keys = KeyChanges(
                [*unit.keys.claims, *newer.claims],
                [*unit.keys.ends, *newer.ends],
                [*unit.keys.waits, *newer.waits],
                [*unit.keys.shares, *newer.shares],
                [*unit.keys.undoing, *newer.undoing],
            )


class Journal:
    """The head of a history and the events after it that are not saved yet."""

    unsampled = 0
    """The number of coming large payloads that are stored uncompressed."""

    def __init__(self, run: str, generation: int, seq: int, digest: bytes, at: int, key: bytes) -> None:
        self.run = run
        self.generation = generation
        self.seq = seq
        self.digest = digest
        self.at = at
        self._key = key
        self._new_state = chain_state(key)
        self.unsaved: list[EventRow] = []
        self.attached: Attachments | None = None
        """What is to be written together with the unsaved events, if anything."""
        self.undurable: dict[str, bytes] = {}
        """Payloads of the code's newest outcomes, which the store may not have yet."""

    def record(self, kind: str, step: str, body: Body, at: int) -> int:
        """Append an event and return its number. Its time is never before its predecessor's."""
        if at < self.at:
            at = self.at
        self.at = at
        encoded = encode_body(body)
        self.seq = seq = self.seq + 1
        state = self._new_state()  # from here on the same as chain_next
        header = f"{seq} {at} {DECIMALS[len(kind)]} {DECIMALS[len(step)]} {kind}{step}"
        state.update(self.digest + header.encode() + encoded)
        self.digest = digest = state.digest()
        self.unsaved.append(_new_tuple(EventRow, (seq, kind, step, at, encoded, digest)))
        return seq

    def attachments(self) -> Attachments:
        """Return the attachments of the events that are recorded now."""
        if self.attached is None:
            self.attached = Attachments()
        return self.attached

    def key_changes(self) -> KeyChanges:
        """Return the key changes that are written together with the events that are recorded now."""
        attached = self.attachments()
        if attached.keys is None:
            attached.keys = KeyChanges()
        return attached.keys

    def beside_events(self) -> Beside:
        """Return the answers and stream entries that are written together with the events that are recorded now."""
        attached = self.attachments()
        if attached.beside is None:
            attached.beside = Beside()
        return attached.beside

    @property
    def key(self) -> bytes:
        """The run's chain key; empty without one."""
        return self._key

    def take_back(self, unit: Append, count: int) -> None:
        """Take a refused unit back: its first `count` events, and its attachments, are unsaved again."""
        self.unsaved = [*unit.events[:count], *self.unsaved]
        self.attachments().follow(unit)

    def rewrite(self, before: bytes, changed: dict[int, tuple[str, Body]]) -> None:
        """Replace unsaved events under the same numbers, and compute their digests again.

        before: the digest of the event before the unsaved ones. No other process has seen the replaced events.
        """
        digest, events = before, self.unsaved
        self.unsaved = []
        for event in events:
            kind, body = event.kind, event.body
            if event.seq in changed:
                kind, body = changed[event.seq][0], encode_body(changed[event.seq][1])
            digest = chain_next(digest, event.seq, kind, event.step, event.at, body, self._key)
            self.unsaved.append(EventRow(event.seq, kind, event.step, event.at, body, digest))
        self.digest = digest

    def pack(self, payload: bytes) -> tuple[msgspec.Raw, str]:
        """Return a payload as it is in a body: itself, or the digest under which it is stored."""
        if len(payload) <= INLINE_BYTES_MAX:
            return msgspec.Raw(payload) if payload else NO_PAYLOAD, ""
        if self.unsampled:
            self.unsampled -= 1
            stored, ref = b"r" + payload, digest_of(payload).hex()
        else:
            stored, ref = store_payload(payload)
            self.unsampled = UNSAMPLED if stored[:1] == b"r" else 0
        self.attachments().payloads.append((ref, stored))
        self.undurable[ref] = payload
        return NO_PAYLOAD, ref

    def pack_into(self, body: Any, field: str) -> Any:
        """Store a body's payload outside the event if it is large."""
        payload = bytes(getattr(body, field))
        if len(payload) > INLINE_BYTES_MAX:
            raw, ref = self.pack(payload)
            setattr(body, field, raw)
            body.ref = ref
        return body


def store_payload(payload: bytes) -> tuple[bytes, str]:
    """Return a payload in its stored form, and its digest."""
    return packed(payload), digest_of(payload).hex()


def packed(payload: bytes) -> bytes:
    """Return a payload as it is stored: compressed, if a sample of it becomes much shorter.

    A compressed one carries a digest of its compressed bytes as well, because not each of their bits shows in the
    payload, and damaged data must never reach the decompressor.
    """
    middle = len(payload) // 2
    sample = payload[middle : middle + SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) > WORTH_IT * len(sample):
        return b"r" + payload
    compressed = zlib.compress(payload, 1)
    return b"z" + digest_of(compressed) + compressed


def unpacked(stored: bytes, what: str) -> bytes:
    """Return the payload from the result of `packed`. Raises `Damaged` for anything else."""
    kind, rest = stored[:1], bytes(stored[1:])
    if kind == b"r":
        return rest
    own, rest = rest[:DIGEST_BYTES], rest[DIGEST_BYTES:]
    if kind != b"z" or digest_of(rest) != own:
        raise Damaged(f"The {what} does not match its digest.")
    try:
        return _decompress(rest)
    except zlib.error as error:
        raise Damaged(f"The {what} does not decompress: {error}.") from None


def restore_payload(stored: bytes | None, digest: str) -> bytes:
    """Return the payload behind a digest, verified against it."""
    if stored is None:
        raise Damaged(f"The payload {digest} is missing.")
    payload = unpacked(stored, f"payload {digest}")
    if digest_of(payload).hex() != digest:
        raise Damaged(f"The payload {digest} does not match its digest.")
    return payload


def _decompress(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    payload = decompressor.decompress(data, PAYLOAD_BYTES_MAX)
    if decompressor.unconsumed_tail:
        raise zlib.error("larger than a payload may be")
    return payload
