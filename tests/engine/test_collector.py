"""While much is built up that stays, the garbage collector rests; then it takes that for old."""

import gc
from collections.abc import Iterator

import pytest

from everstep.model.collector import paused_collector


@pytest.fixture(autouse=True)
def young() -> Iterator[None]:
    """Nothing is young when a test begins, and nothing stays frozen."""
    gc.collect()
    yield
    gc.unfreeze()
    assert gc.isenabled()


def built(count: int) -> list[list[int]]:
    with paused_collector():
        assert not gc.isenabled()
        return [[number] for number in range(count)]


def is_young(one: object) -> bool:
    return any(other is one for other in gc.get_objects(0))


def is_collected(one: object) -> bool:
    return any(other is one for other in gc.get_objects())


def test_what_was_built_up_counts_as_old() -> None:
    much = built(10 * gc.get_threshold()[0])
    assert not is_young(much[0])
    assert gc.get_freeze_count() == 0


def test_a_little_stays_young() -> None:
    assert is_young(built(10)[0])


def test_what_a_program_has_frozen_stays_so() -> None:
    held = built(10)
    assert is_collected(held)
    gc.freeze()
    built(10 * gc.get_threshold()[0])
    assert not is_collected(held), "the collector does not know what is frozen"
    assert gc.get_freeze_count() > 0
