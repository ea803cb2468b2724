"""Digests: of values, and the chain that makes a history tamper-evident.

Each event's digest covers the digest before it, so a flipped bit, a missing, swapped or foreign row shows at the
first event it touches. The chain of a run begins with its id and generation: rows of another run do not fit.

With a key (`model/chains.py`) the digests of the chain are BLAKE2b's own keyed ones, a MAC: whoever can write the
database and does not have the key cannot make an event that fits.
"""

from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Any, Final

DIGEST_BYTES: Final = 16
LONG_BYTES: Final = 4096
"""What is longer has a SHA-256, which processors compute in half the time; of what is shorter a BLAKE2b is quicker."""


class _Decimals(dict[int, str]):
    """Numbers as texts: the lengths of kinds and steps are few, and making such a text costs as much as a call."""

    def __missing__(self, number: int) -> str:
        return str(number)


DECIMALS: Final = _Decimals((number, str(number)) for number in range(128))
_new_state: Final[Callable[[], Any]] = blake2b(digest_size=DIGEST_BYTES).copy  # half of what a new one costs


def digest_of(data: bytes) -> bytes:
    """Return the digest of a value's canonical bytes."""
    if len(data) > LONG_BYTES:
        return sha256(data).digest()[:DIGEST_BYTES]
    state = _new_state()
    state.update(data)
    return state.digest()  # type: ignore[no-any-return]


def hex_digest_of(data: bytes) -> str:
    """Return the same as text."""
    if len(data) > LONG_BYTES:
        return digest_of(data).hex()
    state = _new_state()
    state.update(data)
    return state.hexdigest()  # type: ignore[no-any-return]


def chain_start(run: str, generation: int) -> bytes:
    """Return the digest that stands before a run's first event."""
    return blake2b(f"{run}\0{generation}".encode(), digest_size=DIGEST_BYTES, person=b"everstep/chain").digest()


def chain_next(previous: bytes, seq: int, kind: str, step: str, at: int, body: bytes, key: bytes = b"") -> bytes:
    """Return the digest of an event that follows `previous`.

    The lengths of the texts stand in the header, so that no two different events have the same bytes.
    """
    state = chain_state(key)()
    state.update(previous + f"{seq} {at} {DECIMALS[len(kind)]} {DECIMALS[len(step)]} {kind}{step}".encode() + body)
    return state.digest()  # type: ignore[no-any-return]


def chain_state(key: bytes = b"") -> Callable[[], Any]:
    """Return what makes the state of which each digest of a chain is made: for loops that do what `chain_next` does."""
    return blake2b(digest_size=DIGEST_BYTES, key=key).copy if key else _new_state


def checkpoint_digest(run: str, generation: int, seq: int, previous: bytes, engine: bytes, state: bytes) -> bytes:
    """Return the digest of a checkpoint: of all that is kept, of its place, and of the chain before its event.

    The lengths of the parts stand in the header, so that no two different checkpoints have the same bytes.
    """
    header = f"{run}\0{generation} {seq} {len(previous)} {len(engine)} ".encode()
    return blake2b(header + previous + engine + state, digest_size=DIGEST_BYTES, person=b"everstep/point").digest()


def stream_start(run: str, generation: int, name: str) -> bytes:
    """Return the digest that stands before a stream's first entry."""
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
    """Return the digest of an entry that follows `previous`; of all that is stored of it, in a form that is its own."""
    header = f"{position} {seq} {attempt} {first} {secret} {at} {len(step)} {step}".encode()
    return blake2b(previous + header + value, digest_size=DIGEST_BYTES, key=key, person=b"everstep/entry").digest()


def step_key(entropy: str, step: str, arguments: str) -> str:
    """Return the idempotency key of a step: the same in each attempt, and in no other step of any run.

    The arguments' digest is part of it: a crash may lose outcomes of quick reads, the code may then take another turn,
    and the n-th call of a step be another one than before.
    """
    return derived_key(entropy, f"{step}\0{arguments}")


def shared_key(store: str, key: str, step: str, arguments: str, round: int) -> str:
    """Return the idempotency key of a step with `key=`: the same for this action in every run of a store.

    `store` is the store's own random value, so that two stores share none. `round` goes up when an action that was done
    is compensated, or its key is freed by hand: what is done after that is another action to its receiver.
    """
    return derived_key(store, f"{key}\0{step}\0{arguments}\0{round}")


def derived_key(entropy: str, name: str) -> str:
    """Return something that only a run with this entropy has under this name."""
    return blake2b(f"{entropy}\0{name}".encode(), digest_size=DIGEST_BYTES, person=b"everstep/key").hexdigest()


def compensation_entropy(entropy: str, call: int) -> str:
    """Return what the key of a compensation hangs on: no call of the code shares it, also not one of the same step."""
    return derived_key(entropy, f"#compensation\0{call}")
