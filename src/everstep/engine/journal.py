"""The growing end of one run's history: events that are recorded in order, and wait for their commit."""

import zlib
from typing import Any, Final

import msgspec

from everstep.errors import Damaged
from everstep.model.digests import DIGEST_BYTES, chain_next, digest_of
from everstep.model.events import NO_PAYLOAD, Body, EventRow, encode_body
from everstep.stores.protocol import NewRun, Post

INLINE_BYTES_MAX: Final = 8 * 1024
"""A larger payload is kept beside the event, compressed, once per run."""
PAYLOAD_BYTES_MAX: Final = 1 << 30


class Journal:
    """The head of a history and what follows it but is not saved yet."""

    def __init__(self, run: str, generation: int, seq: int, digest: bytes, at: int, key: bytes) -> None:
        self.run = run
        self.generation = generation
        self.seq = seq
        self.digest = digest
        self.at = at
        self._key = key
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
        encoded = encode_body(body)
        seq = self.seq + 1
        digest = chain_next(self.digest, seq, kind, step, at, encoded, self._key)
        self.unsaved.append(EventRow(seq, kind, step, at, encoded, digest))
        self.seq, self.digest, self.at = seq, digest, at
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
    """Return a payload as it is stored beside events, and its digest.

    A compressed one carries a digest of its compressed bytes as well: not each of their bits shows in the payload, and
    what is damaged is never handed to the decompressor.
    """
    compressed = zlib.compress(payload, 1)
    if len(compressed) + DIGEST_BYTES < len(payload):
        return b"z" + digest_of(compressed) + compressed, digest_of(payload).hex()
    return b"r" + payload, digest_of(payload).hex()


def restore_payload(stored: bytes | None, digest: str) -> bytes:
    """Return the payload behind a digest, verified against it."""
    if stored is None:
        raise Damaged(f"The payload {digest} is missing.")
    kind, rest = stored[:1], stored[1:]
    if kind == b"z":
        own, rest = rest[:DIGEST_BYTES], rest[DIGEST_BYTES:]
        if digest_of(rest) != own:
            raise Damaged(f"The payload {digest} does not match its digest.")
        try:
            rest = _decompress(rest)
        except zlib.error as error:
            raise Damaged(f"The payload {digest} does not decompress: {error}.") from None
    if kind not in (b"z", b"r") or digest_of(rest).hex() != digest:
        raise Damaged(f"The payload {digest} does not match its digest.")
    return bytes(rest)


def _decompress(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    payload = decompressor.decompress(data, PAYLOAD_BYTES_MAX)
    if decompressor.unconsumed_tail:
        raise zlib.error("larger than a payload may be")
    return payload
