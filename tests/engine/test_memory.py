"""A run that has left memory is gone at once: circles would wait for the garbage collector, and make it work."""

import asyncio
import gc
from collections import Counter
from typing import Any

import everstep
from everstep import step, workflow


@step(effect="read")
async def look(number: int) -> int:
    return number + 1


@step
async def act(number: int) -> int:
    await asyncio.sleep(0)
    return number + 1


@workflow
async def plain_walk(times: int) -> int:
    number = 0
    for _ in range(times):
        number = await act(await look(number))
    return number


@workflow
async def walk_with_friends(times: int) -> int:
    numbers = await asyncio.gather(*(act(number) for number in range(times)))
    await asyncio.sleep(0.001)
    return sum(numbers)


def left_behind(*workflows: Any) -> Counter[str]:
    """Run workflows, and return what of this package only the garbage collector would have found."""

    async def main() -> None:
        async with everstep.open("memory:") as app:
            for one in workflows:
                await app.run(one, 3)  # whatever is made once, is made now
            await asyncio.sleep(0.01)
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            for one in workflows:
                await app.run(one, 3)
            await asyncio.sleep(0.01)
            gc.collect()

    try:
        asyncio.run(main())
        return Counter(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("everstep"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_run_that_ended_leaves_nothing_to_the_garbage_collector() -> None:
    assert left_behind(plain_walk, walk_with_friends) == Counter()
