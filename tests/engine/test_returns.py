"""What a process gives back reaches the store at last, however often that refuses it."""

from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.ground import Ground, Right
from everstep.errors import Misuse, StoreError, StoreFull
from everstep.stores.protocol import Release
from everstep.stores.rows.saved import FreeThread
from everstep.testing.faulty_store import FaultyStore
from tests.engine.resume_helpers import Machine
from tests.waiting import wait_on_loop_until, wait_until


@step(effect="once")
async def pay() -> int:
    return 1


@workflow
async def paying() -> int:
    return await pay()


def releases(operations: Any, **_: Any) -> bool:
    return any(isinstance(one, Release) for one in operations)


async def test_a_run_that_a_command_could_not_give_back_is_given_back_later(machine: Machine) -> None:
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store(), clock=None)
    run = await app.start(paying, id="r")
    await run.result(timeout=60)
    fault = store.fail("commit", after=False, error=StoreFull("no room"), count=2, when=releases)
    with pytest.raises((Misuse, StoreError)):
        await app.rollback("r")
    await wait_on_loop_until(lambda: fault.fired == 2 and machine.store.run("r").owner is None)


def test_a_thread_that_the_store_did_not_take_back_is_given_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with everstep.open(str(tmp_path / "runs.db")) as app:
        ground = Ground(app, owned=False)
        commit, refusals = ground.commit, 2

        def refuse(operation: Any, **options: Any) -> Any:
            nonlocal refusals
            if isinstance(operation, FreeThread) and refusals:
                refusals -= 1
                raise StoreFull("no room")
            return commit(operation, **options)

        monkeypatch.setattr(ground, "commit", refuse)
        ground.free(ground.take(Right("t", app)))
        wait_until(lambda: ground.saved.owner("t").owner is None)  # type: ignore[union-attr]
        refusals = 1
        ground.free(ground.take(Right("t", app)))
        right = ground.take(Right("t", app))  # at the same epoch: what is owed must not be given back now
        ground._free_owed()
        assert ground.saved.owner("t").owner == ground.worker  # type: ignore[union-attr]
        ground.free(right)
