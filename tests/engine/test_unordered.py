"""Sets have another order in every process: nothing that is compared with a history depends on it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.codec import Codec, is_same
from everstep.errors import Misuse, RunHeld

PROGRAM = '''
import asyncio, json, sys
from dataclasses import dataclass
import everstep
from everstep import step, workflow

@dataclass(frozen=True)
class Person:
    name: str

WORDS = {"alpha", "beta", "gamma", "delta", "epsilon"}
VALUES = [
    WORDS,
    frozenset(WORDS),
    {"a": WORDS, "b": [WORDS, (frozenset(WORDS),)]},
    {1: WORDS, (2, 3): frozenset(WORDS)},
    {frozenset({"a", "b"}), frozenset({"c", "d"}), frozenset()},
    {Person("ann"), Person("bob"), Person("eve")},
    {1, "1", 1.5, None, ("a",), b"1"},
]

@everstep.tool(approval=True, effect="repeat")
async def pay(to: set[str]) -> int:
    return len(to)

@step(effect="repeat")
async def send(to: frozenset[str], others: dict[str, set[str]]) -> set[str]:
    return set(to)

@workflow
async def flow() -> set[str]:
    everstep.publish("words", WORDS)
    await send(frozenset(WORDS), {"x": WORDS})
    for number, value in enumerate(VALUES):
        await everstep.approval(f"value-{number}", value, answer=bool)
    async for request in everstep.requests("words", str):
        request.answer(WORDS)
        break
    await pay(to=WORDS)
    return WORDS

async def life():
    """Let one more thing happen, and leave."""
    async with everstep.open(sys.argv[1], recover=True) as app:
        run = await app.start(flow, id="r")
        while True:
            row = app.store.run("r")
            if row.status == "completed":
                assert (await run.result()) == WORDS
                return "completed"
            if row.status == "held":
                return app.store.holds(run="r")[0].summary
            if row.status == "waiting":
                if asked := await app.approvals("r"):
                    await run.approve(True, id=asked[0].id)
                else:
                    await run.ask("words", "", id="q")
                return "went on"
            await asyncio.sleep(0.005)

print(json.dumps(asyncio.run(life())))
'''


def test_what_has_sets_in_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    said: list[str] = []
    for seed in range(1, 40):
        # A process of its own, not a fork: the order of sets is chosen when Python starts.
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, str(path), str(tmp_path / "runs.db")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        out = done.stdout
        said.append(json.loads(out.splitlines()[-1]))
        if said[-1] != "went on":
            break
    assert said[-1] == "completed"
    assert len(said) > 8


def test_a_set_is_stored_in_the_same_bytes_whatever_its_order() -> None:
    codec = Codec()
    forward, backward = dict.fromkeys(range(50)), dict.fromkeys(reversed(range(50)))
    names = [{f"word-{number}" for number in order} for order in (forward, backward)]
    assert codec.encode(names[0]) == codec.encode(names[1])
    values: set[Any] = {1, "1", 1.5, None, ("a", frozenset({"x", "y"})), b"1", 2**70}
    assert codec.decode(codec.encode(values)) == values


def test_what_an_older_release_wrote_in_another_order_is_the_same() -> None:
    assert is_same(b'[["b","a"],"set"]', b'[["a","b"],"set"]')
    assert not is_same(b'[["b","a"]]', b'[["a","b"]]')
    assert not is_same(b'[["a"],"set"]', b'[["a","b"],"set"]')
    assert not is_same(b"damaged", b'["a"]')


@pytest.mark.parametrize("given", [{"a"}, [{"a"}], ({"a": frozenset("b")},), {frozenset("a"): 1}])
def test_a_key_must_not_depend_on_the_order_of_a_set(given: Any) -> None:
    @step(key="k:{what}")
    async def keyed(what: Any) -> None:
        pass

    @workflow
    async def flow() -> None:
        await keyed(given)

    async def main() -> None:
        async with everstep.open("memory:") as app:
            with pytest.raises(Misuse, match="has no order"):
                await app.run(flow)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_code_that_spins_from_its_start_is_stuck_whoever_else_is_started(kind: str, tmp_path: Path) -> None:
    @workflow
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    @workflow
    async def fine() -> int:
        return 1

    async with everstep.open("memory:" if kind == "memory" else str(tmp_path / "runs.db")) as app:
        ran = [app.run(one) for one in (fine, spin, fine)]
        first, held, last = await asyncio.gather(*ran, return_exceptions=True)
        assert (first, last) == (1, 1)
        assert isinstance(held, RunHeld)
        assert held.reason == "stuck"
