"""LangGraph's own conformance suite for checkpointers, in full, on every store."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import ALL_CAPABILITIES

from everstep.integrations.langgraph import EverstepSaver


def check(url: str) -> None:
    @checkpointer_test(name=url)
    async def made() -> AsyncGenerator[BaseCheckpointSaver, None]:
        async with EverstepSaver(url) as saver:
            yield saver

    report = asyncio.run(validate(made))
    failures = [failure for result in report.results.values() for failure in result.failures or []]
    assert not failures
    assert {name for name, result in report.results.items() if result.passed} == {one.value for one in ALL_CAPABILITIES}
    assert report.conformance_level() == "FULL"


def test_every_capability_passes_and_none_is_skipped(url: str) -> None:
    check(url)


def test_so_it_does_in_memory() -> None:
    check("memory:")


def test_a_suite_that_finds_a_mistake_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EverstepSaver, "delete_thread", lambda self, thread_id: None)
    with pytest.raises(AssertionError):
        check("memory:")
