"""The growing end of one run's history: events that are recorded in order, and wait for their commit."""

import zlib
from typing import Any, Final

import msgspec

from everstep.errors import Damaged
from everstep.model.digests import chain_next, digest_of
from everstep.model.events import NO_PAYLOAD, Body, EventRow, encode_body
from everstep.stores.protocol import NewRun, Post

INLINE_BYTES_MAX: Final = 8 * 1024
"""A larger payload is kept beside the event, compressed, once per run."""
PAYLOAD_BYTES_MAX: Final = 1 << 30
_new_tuple = tuple.__new__  # what EventRow(…) comes down to, in a third of the time


class Journal:
    """The head of a history and what follows it but is not saved yet."""

    def __init__(self, run: str, generation: int, seq: int, digest: bytes, at: int) -> None:
        self.run = run
        self.generation = generation
        self.seq = seq
        self.digest = digest
        self.at = at
        self.unsaved: list[EventRow] = []
        self.payloads: list[tuple[str, bytes]] = []
        self.undurable: dict[str, bytes] = {}
        """Payloads of the code's newest outcomes, which the store may not have yet."""
        self.consumed: list[int] = []
        self.starts: list[NewRun] = []
        self.posts: list[Post] = []

    def record(self, kind: str, step: str, body: Body, at: int) -> int:
        """Append an event and return its number. Its time is never before its predecessor's."""
        if at < self.at:
            at = self.at
        self.at = at
        encoded = encode_body(body)
        self.seq = seq = self.seq + 1
        self.digest = digest = chain_next(self.digest, seq, kind, step, at, encoded)
        self.unsaved.append(_new_tuple(EventRow, (seq, kind, step, at, encoded, digest)))
        return seq

    def pack(self, payload: bytes) -> tuple[msgspec.Raw, str]:
        """Return a payload as it stands in a body: itself, or the digest under which it is kept."""
        if len(payload) <= INLINE_BYTES_MAX:
            return msgspec.Raw(payload) if payload else NO_PAYLOAD, ""
        stored, ref = store_payload(payload)
        self.payloads.append((ref, stored))
        self.undurable[ref] = payload
        return NO_PAYLOAD, ref

    def pack_into(self, body: Any, field: str) -> Any:
        """Move a body's payload beside the event if it is large."""
        payload = bytes(getattr(body, field))
        if len(payload) > INLINE_BYTES_MAX:
            raw, ref = self.pack(payload)
            setattr(body, field, raw)
            body.ref = ref
        return body


def store_payload(payload: bytes) -> tuple[bytes, str]:
    """Return a payload as it is stored beside events, and its digest."""
    compressed = zlib.compress(payload, 1)
    stored = b"z" + compressed if len(compressed) < len(payload) else b"r" + payload
    return stored, digest_of(payload).hex()


def restore_payload(stored: bytes | None, digest: str) -> bytes:
    """Return the payload behind a digest, verified against it."""
    if stored is None:
        raise Damaged(f"The payload {digest} is missing.")
    try:
        payload = _decompress(stored[1:]) if stored[:1] == b"z" else bytes(stored[1:])
    except zlib.error as error:
        raise Damaged(f"The payload {digest} does not decompress: {error}.") from None
    if digest_of(payload).hex() != digest:
        raise Damaged(f"The payload {digest} does not match its digest.")
    return payload


def _decompress(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    payload = decompressor.decompress(data, PAYLOAD_BYTES_MAX)
    if decompressor.unconsumed_tail:
        raise zlib.error("larger than a payload may be")
    return payload
