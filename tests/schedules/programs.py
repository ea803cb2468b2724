"""What runs in processes of its own: workers that look after a schedule until they are killed."""

import asyncio
import sys
from pathlib import Path

import everstep
from everstep import step, workflow


@step
def note(folder: str, run: str) -> None:
    with open(Path(folder) / "notes.txt", "a") as notes:  # one short line is written at once
        notes.write(f"{run}\n")


@workflow
def beat(folder: str) -> None:
    note(folder, everstep.current().run)


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/store.db"


async def define(folder: Path) -> None:
    """Define a schedule of seconds, and say which second it is."""
    async with everstep.open(url(folder), durability="process") as app:
        options = {"name": "beat", "every": 1, "overlap": "allow", "catch_up": "all", "catch_up_max": 1_000}
        await app.schedule(beat, str(folder), **options)
        facts = await app.get_schedule("beat").show()
        assert facts.next_tick is not None
        print(facts.next_tick)


async def work(folder: Path) -> None:
    """Look after schedules until somebody ends this process."""
    async with everstep.open(url(folder), recover=True, durability="process"):
        print("at work", flush=True)
        await asyncio.Event().wait()


async def finish(folder: Path) -> None:
    """Pause the schedule, wait until all of its runs have ended, and say how many ticks there were."""
    async with everstep.open(url(folder), recover=True, durability="process") as app:
        schedule = app.get_schedule("beat")
        while not (await schedule.show()).fired:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        await schedule.pause()
        while await app.list(status=["queued", "running", "waiting"], limit=1):
            await asyncio.sleep(0.05)
        facts = await schedule.show()
        assert not facts.missed
        print(facts.fired)


if __name__ == "__main__":
    program, folder = sys.argv[1:]
    asyncio.run({"define": define, "work": work, "finish": finish}[program](Path(folder)))
