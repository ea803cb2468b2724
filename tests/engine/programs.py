"""Programs that tests run in processes of their own: `python programs.py NAME FOLDER`. A crash is a real one."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import everstep
from everstep import Retry, step, workflow

PROGRAMS: dict[str, Callable[[Path], None]] = {}


def program(function: Callable[[Path], None]) -> Callable[[Path], None]:
    PROGRAMS[function.__name__] = function
    return function


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'store.db'}"


def note(folder: Path, text: str) -> None:
    """Leave a line that the test reads."""
    with open(folder / "notes.txt", "a") as notes:
        notes.write(text + "\n")
        notes.flush()


FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


RACES_TELL = 16 + 24 + 1


# -- races, replayed under another hash seed in each process ---------------------------------------------------------
@step(effect="read")
async def turns(name: str, count: int) -> str:
    for _ in range(count):
        await asyncio.sleep(0)
    return name


async def cancelled_siblings() -> str:
    """Let a group cancel many tasks at once: in which order they clean up is part of the history."""
    told: list[str] = []

    async def sibling(number: int) -> None:
        try:
            await everstep.receive("never")
        finally:
            told.append(await turns(f"cancelled {number}", 0))

    async def failing() -> None:
        await turns("failing", 1)
        raise KeyError("now")

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(sibling(number))
            group.create_task(failing())
    except* KeyError:
        pass
    return " ".join(told)


@workflow
async def races(lives: int) -> list[str]:
    told: list[str] = []
    tasks = {
        asyncio.create_task(turns(name, count))
        for name, count in zip("abcdefgh", (5, 3, 8, 1, 9, 2, 7, 4), strict=True)
    }
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        told += [await turns(f"after {task.result()}", 0) for task in done]
    async with asyncio.TaskGroup() as group:
        for name in "uvwxyz":
            group.create_task(turns(name, len(told) % 3))
    told += [await one for one in asyncio.as_completed([turns(str(number), number % 4) for number in range(8)])]
    done, _ = await asyncio.wait({asyncio.create_task(turns(f"all {number}", 0)) for number in range(24)})
    told += [await turns(f"then {task.result()}", 0) for task in done]
    told.append(await cancelled_siblings())
    for number in range(lives):
        told.append(await everstep.receive(f"life-{number}", str))
        everstep.publish("told", list(told))
    return told


@program
def race(folder: Path) -> None:
    """Take up the run, send it the signal of this life, and die as soon as it is published."""

    async def main() -> None:
        async with everstep.open(url(folder)) as app:
            run = await app.start(races, 3, id="races")
            lives = len(list(folder.glob("life-*")))
            (folder / f"life-{lives}").touch()
            await run.signal(f"life-{lives}", f"seed {os.environ['PYTHONHASHSEED']}")
            if lives == 2:
                note(folder, repr(await run.result(timeout=60)))
                return
            while len((await run.published()).get("told", [])) < RACES_TELL + lives + 1:
                if await run.status() == "held":
                    print((await run.holds())[0].summary)
                    os._exit(4)
                await asyncio.sleep(0.005)
            note(folder, repr((await run.published())["told"]))
            os._exit(9)

    asyncio.run(main())


# -- keys, heartbeats, interrupts ------------------------------------------------------------------------------------
@step
def long_count(upto: int) -> list[object]:
    """Counts, leaves a heartbeat at each number, and is killed by its own test at the third."""
    before = everstep.current()
    note(FOLDER, f"attempt {before.attempt} from {before.details} with {everstep.key()}")
    for number in range((before.details or 0) + 1, upto + 1):
        everstep.heartbeat(number)
        if number == 3 and before.attempt == 1:
            wait_until_recorded(number)
            os.kill(os.getpid(), 9)
    return [before.attempt, before.details]


def wait_until_recorded(number: int) -> None:
    from everstep.stores.opening import open_store

    store = open_store(url(FOLDER))
    while not any(b'"details":[%d]' % number in event.body for event in store.events("count", 1)):
        time.sleep(0.01)


@workflow
async def counting() -> list[object]:
    return await asyncio.to_thread(long_count, 5)


@program
def count(folder: Path) -> None:
    note(folder, repr(everstep.run(counting, id="count", url=url(folder))))


@step
async def tell(text: str) -> None:
    note(FOLDER, text)


@step(retry=Retry(attempts=2))
async def wait_here(name: str) -> str:
    """Waits for ever in its first life."""
    note(FOLDER, f"begun {name}")
    if not (FOLDER / "second-life").exists():
        (FOLDER / "ready").touch()
        await asyncio.Event().wait()
    return name


@workflow
async def interrupted() -> str:
    print("the code begins")
    try:
        await tell("first")
        return await wait_here("middle")
    finally:
        await tell("finally")


@program
def interrupt(folder: Path) -> None:
    note(folder, everstep.run(interrupted, id="interrupted", url=url(folder)))


@program
def interrupt_blocking(folder: Path) -> None:
    with everstep.open(url(folder)) as app:
        note(folder, app.run(interrupted, id="interrupted"))


# -- def workflows ---------------------------------------------------------------------------------------------------
@step
def stamp(text: str) -> str:
    note(FOLDER, f"stamp {text}")
    return text.upper()


@workflow
def plain(name: str) -> list[str]:
    print("plain begins")
    told = [stamp(name)]
    told += everstep.blocking.gather(lambda: stamp("x"), lambda: stamp("y"))
    everstep.blocking.sleep(0.01)
    everstep.publish("ready", True)
    told.append(everstep.blocking.receive("word", str))
    told.append(stamp("end"))
    print("plain ends")
    return told


@program
def plain_def(folder: Path) -> None:
    with everstep.open(url(folder)) as app:
        run = app.start(plain, "ann", id="plain")
        if (folder / "second-life").exists():
            run.signal("word", "go")
            note(folder, repr(run.result(timeout=60)))
            return
        while not run.published().get("ready"):
            time.sleep(0.005)
        os._exit(9)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has children that ignore it
    PROGRAMS[sys.argv[1]](FOLDER)
