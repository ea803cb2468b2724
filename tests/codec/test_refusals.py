"""What the machine refuses while a value is written or read says nothing about the value."""

from typing import Any

import pytest

from everstep import register
from everstep.codec import Codec

codec = Codec()


class NoRoom:
    """A value for which the machine has no memory."""

    def __init__(self, way: str) -> None:
        self.way = way


def has_no_memory(given: Any) -> Any:
    if given == "decode" or getattr(given, "way", "") == "encode":
        raise MemoryError
    return given.way


register(NoRoom, encode=has_no_memory, decode=has_no_memory)


def test_refused_memory_says_nothing_about_a_value_or_a_payload() -> None:
    with pytest.raises(MemoryError):
        codec.encode([NoRoom("encode")])
    payload = codec.encode([NoRoom("decode")])
    with pytest.raises(MemoryError):
        codec.decode(payload)
