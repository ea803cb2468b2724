"""Digests: of values, and the chain that makes a history tamper-evident.

Each event's digest covers the digest before it, so a flipped bit, a missing, swapped or foreign row shows at the first
event it touches. The chain of a run begins with its id and generation: rows of another run do not fit.

With a key (`model/chains.py`) the digests of the chain are keyed BLAKE2b, a MAC: an attacker who can write the database
and does not have the key cannot make an event that fits.
"""

from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Any, Final

DIGEST_BYTES: Final = 16
LONG_BYTES: Final = 4096
"""Values longer than this get a SHA-256, because processors compute it in half the time; BLAKE2b is faster for shorter
ones.
"""


class _Decimals(dict[int, str]):
    """Caches the decimal text of small numbers: few lengths of kinds and steps exist, and each `str(n)` costs
    a call.
    """

    def __missing__(self, number: int) -> str:
        return str(number)


DECIMALS: Final = _Decimals((number, str(number)) for number in range(128))
_new_state: Final[Callable[[], Any]] = blake2b(digest_size=DIGEST_BYTES).copy  # a copy costs half of a new object


def digest_of(data: bytes) -> bytes:
    """Return the digest of a value's canonical bytes."""
    if len(data) > LONG_BYTES:
        return sha256(data).digest()[:DIGEST_BYTES]
    state = _new_state()
    state.update(data)
    return state.digest()  # type: ignore[no-any-return]


def hex_digest_of(data: bytes) -> str:
    """Return the digest of a value's canonical bytes, as hexadecimal text."""
    if len(data) > LONG_BYTES:
        return digest_of(data).hex()
    state = _new_state()
    state.update(data)
    return state.hexdigest()  # type: ignore[no-any-return]


def chain_start(run: str, generation: int) -> bytes:
    """Return the digest that precedes a run's first event."""
    return blake2b(f"{run}\0{generation}".encode(), digest_size=DIGEST_BYTES, person=b"everstep/chain").digest()


def chain_next(previous: bytes, seq: int, kind: str, step: str, at: int, body: bytes, key: bytes = b"") -> bytes:
    """Return the digest of an event that follows `previous`.

    The header has the lengths of the texts, so that no two different events have the same bytes.
    """
    state = chain_state(key)()
    state.update(previous + f"{seq} {at} {DECIMALS[len(kind)]} {DECIMALS[len(step)]} {kind}{step}".encode() + body)
    return state.digest()  # type: ignore[no-any-return]


def chain_state(key: bytes = b"") -> Callable[[], Any]:
    """Return a factory of hash states for loops that compute the same digests as `chain_next` themselves."""
    return blake2b(digest_size=DIGEST_BYTES, key=key).copy if key else _new_state


def checkpoint_digest(run: str, generation: int, seq: int, previous: bytes, engine: bytes, state: bytes) -> bytes:
    """Return the digest of a checkpoint: of its content, its place, and the chain before its event.

    The header has the lengths of the parts, so that no two different checkpoints have the same bytes.
    """
    header = f"{run}\0{generation} {seq} {len(previous)} {len(engine)} ".encode()
    return blake2b(header + previous + engine + state, digest_size=DIGEST_BYTES, person=b"everstep/point").digest()


def stream_start(run: str, generation: int, name: str) -> bytes:
    """Return the digest that precedes a stream's first entry."""
    text = f"{run}\0{generation}\0{name}"
    return blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"everstep/stream").digest()


def entry_digest(
    previous: bytes,
    position: int,
    seq: int,
    step: str,
    attempt: int,
    first: int,
    secret: int,
    at: int,
    value: bytes,
    *,
    key: bytes = b"",
) -> bytes:
    """Return the digest of an entry that follows `previous`. It covers every stored column of the entry."""
    header = f"{position} {seq} {attempt} {first} {secret} {at} {len(step)} {step}".encode()
    return blake2b(previous + header + value, digest_size=DIGEST_BYTES, key=key, person=b"everstep/entry").digest()


def step_key(entropy: str, step: str, arguments: str) -> str:
    """Return the idempotency key of a step: the same in each attempt, and in no other step of any run.

    The arguments' digest is part of it, because a crash may lose outcomes of quick reads: the code may then take
    another branch, and the n-th call of a step be another call than before.
    """
    return derived_key(entropy, f"{step}\0{arguments}")


def shared_key(store: str, key: str, step: str, arguments: str, round: int) -> str:
    """Return the idempotency key of a step with `key=`: the same for this action in every run of a store.

    `store` is the store's own random value, so that two stores never share a key. `round` goes up when an action that
    was done is compensated, or its key is freed by hand: what is done after that is a new action for its receiver.
    """
    return derived_key(store, f"{key}\0{step}\0{arguments}\0{round}")


def derived_key(entropy: str, name: str) -> str:
    """Derive a key from a run's entropy and a name. No other run has the same one."""
    return blake2b(f"{entropy}\0{name}".encode(), digest_size=DIGEST_BYTES, person=b"everstep/key").hexdigest()


def compensation_entropy(entropy: str, call: int) -> str:
    """Derive the entropy for the key of a call's compensation. No other call has the same one, not even of the same
    step.
    """
    return derived_key(entropy, f"#compensation\0{call}")
