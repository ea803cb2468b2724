"""Chain keys: kept outside the database, they prevent anyone without the key from forging a history unnoticed.

A run is made with one key, whose id is in its first event, and keeps it. A process has one key for new runs, and may
have older ones to read and continue runs that were made before. A process that has a key believes nothing that was made
without one, unless it is configured to: otherwise anyone who can write the database could leave the key away.

What histories take from elsewhere, the outcomes kept under keys of actions and in markers of atomic steps, is sealed
with the key of the process that wrote it.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from everstep.errors import ChainKeyMissing, Damaged, Misuse
from everstep.model.digests import DIGEST_BYTES

KEY_BYTES_MIN: Final = 16
NO_KEY_WORD: Final = "none"
"""In `EVERSTEP_CHAIN_KEY`: runs that were made without a key are believed as well."""

ChainKeyOption = bytes | Sequence[bytes | None] | Callable[[], "bytes | Sequence[bytes | None]"] | None


class ChainKey(NamedTuple):
    """A chain key, and the id by which histories name it. Both are empty for "no key"."""

    id: str = ""
    key: bytes = b""


NO_KEY: Final = ChainKey()


class ChainKeys:
    """The keys of this process. New runs are made with the first one; histories made with any of them are believed."""

    def __init__(self, keys: Sequence[ChainKey] = (NO_KEY,)) -> None:
        self.writing = keys[0]
        self._known = {key.id: key.key for key in keys}

    def key(self, id: str, run: str) -> bytes:
        """Return the key with this id, which a run was made with. Raises `ChainKeyMissing` if this process does not
        have it.
        """
        return self._key(id, f"The history of run {run}")

    def seal(self, payload: bytes, *place: str) -> str:
        """Return the seal of a payload that is kept outside histories: a digest, made with the key if there is one.

        place: what the payload belongs to. The seal does not fit a payload of another place.
        """
        id, key = self.writing
        digest = _seal(key, payload, place)
        return f"{id}:{digest}" if id else digest

    def check(self, payload: bytes, seal: str, what: str, *place: str) -> None:
        """Raise `Damaged` if a payload is not the sealed one, `ChainKeyMissing` if this process lacks the key
        to tell.
        """
        id, _, digest = seal.rpartition(":")
        if _seal(self._key(id, what), payload, place) != digest:
            raise Damaged(f"{what} does not match its digest.")

    def _key(self, id: str, what: str) -> bytes:
        if id in self._known:
            return self._known[id]
        if id:
            raise ChainKeyMissing(
                f"{what} was made with the chain key {id}, which this process does not have. Give it with chain_key= "
                "or EVERSTEP_CHAIN_KEY. Nothing was changed."
            )
        raise ChainKeyMissing(
            f"{what} was made without a chain key, and this process believes only what was made with one. If it is "
            "older than the key, put None beside the key (`none` in EVERSTEP_CHAIN_KEY). Nothing was changed."
        )

    def __repr__(self) -> str:
        return f"<chain keys {', '.join(id or 'none' for id in self._known)}>"


def _seal(key: bytes, payload: bytes, place: tuple[str, ...]) -> str:
    """Return a digest over the place and the payload. The header has the lengths of the names, so no two places
    collide.
    """
    names = [name.encode() for name in place]
    header = b" ".join(str(len(name)).encode() for name in names) + b"\0" + b"".join(names)
    return blake2b(header + payload, digest_size=DIGEST_BYTES, key=key, person=b"everstep/seal").hexdigest()


def chain_keys(option: ChainKeyOption, environment: str = "") -> ChainKeys:
    """Return the keys that `chain_key=` gives, or else the environment's."""
    given: object = option() if callable(option) else option
    if given is None and environment:
        given = [None if word == NO_KEY_WORD else word.encode() for word in environment.split(",")]
    listed = [given] if isinstance(given, bytes) else list(given) if isinstance(given, list | tuple) else []
    if given is not None and not listed:
        raise Misuse("chain_key= is a secret of bytes, a list of such, or a function that returns one.")
    if not listed:
        return ChainKeys()
    if listed[0] is None:
        raise Misuse("chain_key=: the first key makes new runs, so it cannot be None.")
    return ChainKeys([NO_KEY if one is None else _chain_key(one) for one in listed])


def _chain_key(secret: object) -> ChainKey:
    """Derive a key and its id. The id tells nothing about the key."""
    if not isinstance(secret, bytes) or len(secret) < KEY_BYTES_MIN:
        raise Misuse(
            f"A chain key is at least {KEY_BYTES_MIN} random bytes, for example the output of `openssl rand -hex 32`."
        )
    id = blake2b(secret, digest_size=8, person=b"everstep/chainid").hexdigest()
    return ChainKey(id, blake2b(secret, digest_size=32, person=b"everstep/chainke").digest())
