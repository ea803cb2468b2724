"""Large payloads: compressed when that is worth its time, and always what they were."""

import random

import pytest

from everstep.engine.journal import packed, restore_payload, store_payload

NOISE = random.Random(1).randbytes(50_000)
WORDS = b" ".join(b"%x" % random.Random(number).randrange(2000) for number in range(20_000))


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", b"r"),
        (b"x", b"r"),
        (b"x" * 100_000, b"z"),
        (b'{"name": "ann", "city": "Oslo"},' * 3000, b"z"),
        (NOISE, b"r"),
        (WORDS, b"r"),
        (NOISE[:45_000] + b"\0" * 4000 + NOISE[:45_000], b"z"),  # the sample shrinks much, the rest does not
    ],
    ids=["nothing", "a byte", "one letter", "records", "noise", "words", "a quiet middle"],
)
def test_a_payload_is_compressed_if_that_makes_it_much_shorter(payload: bytes, kind: bytes) -> None:
    stored, digest = store_payload(payload)
    assert stored[:1] == kind
    assert len(stored) <= len(payload) + 1, "never longer, but for the letter that says how it is kept"
    assert restore_payload(stored, digest) == payload
    assert packed(payload) == stored


@pytest.mark.parametrize("length", range(200))
def test_short_ones_do_not_become_longer(length: int) -> None:
    for payload in (b"x" * length, NOISE[:length], (b"ab" * length)[:length]):
        stored, digest = store_payload(payload)
        assert len(stored) <= length + 1
        assert restore_payload(stored, digest) == payload
