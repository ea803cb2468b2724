"""An agent that takes thousands of turns: it asks a model in each, and writes something down now and then."""

import sqlite3
import sys

import everstep
from everstep import step, workflow


@step(effect="read")
async def think(turn: int, before: int) -> int:
    return (before * 31 + turn) % 1_000_003


@step
async def write_down(turn: int, thought: int) -> None:
    with sqlite3.connect("outside.db", timeout=30) as outside:
        outside.execute("create table if not exists notes (turn, thought, key primary key)")
        outside.execute("insert or ignore into notes values (?, ?, ?)", (turn, thought, everstep.key()))


@workflow
async def agent(turns: int) -> int:
    turn, thought = 0, 1
    while turn < turns:
        turn, thought = await everstep.checkpoint((turn, thought))
        thought = await think(turn, thought)
        turn += 1
        if turn % 100 == 0:
            await write_down(turn, thought)
    return thought


if __name__ == "__main__":
    print(everstep.run(agent, int(sys.argv[1]), id="agent-1"))
