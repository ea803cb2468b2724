"""How large payloads are kept beside the events."""

import random

from everstep.engine.history.journal import UNSAMPLED, Journal, restore_payload

SAME = b'"' + b"the same words again " * 1_000 + b'"'


def noise(seed: int) -> bytes:
    return b'"' + random.Random(seed).randbytes(12_000).hex().encode() + b'"'


def kept_by(journal: Journal, payload: bytes) -> bytes:
    """Return how a journal keeps a payload, which must come back as it was."""
    _, ref = journal.pack(payload)
    found, stored = journal.attachments().payloads[-1]
    assert found == ref
    assert restore_payload(stored, ref) == payload
    return stored


def test_a_payload_that_becomes_much_shorter_is_kept_compressed() -> None:
    stored = kept_by(Journal("r", 1, 0, b"", 0, b""), SAME)

    assert stored[:1] == b"z"
    assert len(stored) < len(SAME) / 10


def test_after_noise_a_few_payloads_are_kept_as_they_are_and_then_one_is_tried_again() -> None:
    journal = Journal("r", 1, 0, b"", 0, b"")

    assert kept_by(journal, noise(0))[:1] == b"r"
    kinds = [kept_by(journal, SAME + str(number).encode())[:1] for number in range(UNSAMPLED + 2)]

    assert kinds == [b"r"] * UNSAMPLED + [b"z", b"z"]


def test_what_is_always_short_is_sampled_every_time() -> None:
    journal = Journal("r", 1, 0, b"", 0, b"")

    kinds = {kept_by(journal, SAME + str(number).encode())[:1] for number in range(2 * UNSAMPLED)}

    assert kinds == {b"z"}
