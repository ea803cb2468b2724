"""What the processes of the stop-and-close trials serve: steps whose effect is left to every kind of task and thread.

Each body tells the till that it is about to act, waits until it may, and then acts. The till is a socket of the trial
(`STOPPING_TILL`): it sees which bodies are still able to act, and what they did, without a word from the engine.
"""

import asyncio
import functools
import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import everstep
from everstep import Done, NotDone, Retry, step, workflow

TILL = "STOPPING_TILL"
PATIENT = Retry(attempts=1000, first=0.2, factor=1.0, jitter=0.0)


class AnswerLost(Exception):
    """What a body raises that does not wait for the work it began."""


class Knock:
    """The work of a body, on whichever thread or task it is done: it knocks, waits until it may act, and acts."""

    def __init__(self, effect: str, number: int) -> None:
        self.effect = effect
        self.at_the_till = threading.Event()
        """Set once the till knows of it."""
        facts = {"who": "body", "effect": effect, "number": number, "key": everstep.key(), "pid": os.getpid()}
        self._hello = json.dumps(facts).encode() + b"\n"

    def on_thread(self) -> str:
        """Do it here and now; it blocks."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[TILL])
            with connection.makefile("rwb", buffering=0) as till:
                till.write(self._hello)
                self._heard(till.readline())
                self._heard(till.readline())
                till.write(b"apply\n")
                return self._heard(till.readline())

    async def on_loop(self) -> str:
        """Do it as a task."""
        reader, writer = await asyncio.open_unix_connection(os.environ[TILL])
        try:
            writer.write(self._hello)
            self._heard(await reader.readline())
            self._heard(await reader.readline())
            writer.write(b"apply\n")
            return self._heard(await reader.readline())
        finally:
            writer.close()

    def _heard(self, line: bytes) -> str:
        if not line:
            raise ConnectionError("The till has closed.")
        self.at_the_till.set()
        return line.decode().strip()


def ask_till(key: str, *arguments: object) -> Done | NotDone:
    """Ask the till what it has applied. Of a body that is about to act it says, as a till would: it has not acted."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[TILL])
        with connection.makefile("rwb", buffering=0) as till:
            till.write(json.dumps({"who": "probe", "key": key, "pid": os.getpid()}).encode() + b"\n")
            said = till.readline()
    if not said:
        raise ConnectionError("The till has closed.")
    value = said.decode().strip()
    return Done(value) if value else NotDone()


# -- how a body does its work -----------------------------------------------------------------------------------------
async def as_task(work: Knock) -> str:
    return await work.on_loop()


async def as_stubborn_task(work: Knock) -> str:
    """It does not let itself be cancelled."""
    task = asyncio.ensure_future(work.on_loop())
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise


async def as_shielded_task(work: Knock) -> str:
    return await asyncio.shield(asyncio.ensure_future(work.on_loop()))


async def in_to_thread(work: Knock) -> str:
    return await asyncio.to_thread(work.on_thread)


async def in_executor(work: Knock) -> str:
    return await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), work.on_thread)


async def in_own_thread(work: Knock) -> str:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()
    threading.Thread(target=_tell, args=(work, loop, done), daemon=True).start()
    return await done


def _tell(work: Knock, loop: asyncio.AbstractEventLoop, done: "asyncio.Future[str]") -> None:
    try:
        value = work.on_thread()
        loop.call_soon_threadsafe(lambda: done.done() or done.set_result(value))
    except (OSError, RuntimeError):
        pass  # the till or the loop is closed


async def left_behind(begin: Callable[[Knock], Any], work: Knock) -> str:
    """Begin the work, and fail without waiting for it: it acts when it may."""
    task = asyncio.ensure_future(begin(work))
    LEFT_TASKS.add(task)  # else it would end with the garbage
    task.add_done_callback(LEFT_TASKS.discard)
    while not task.done() and not work.at_the_till.is_set():
        await asyncio.sleep(0.005)
    await asyncio.wait([task], timeout=0.05)
    if task.done():
        return str(task.result())
    raise AnswerLost("the work goes on")


LEFT_TASKS: set[asyncio.Future[str]] = set()
AWAITED: dict[str, Callable[[Knock], Any]] = {
    "task": as_task,
    "stubborn": as_stubborn_task,
    "shielded": as_shielded_task,
    "to_thread": in_to_thread,
    "executor": in_executor,
    "own_thread": in_own_thread,
}
LEFT = {f"left_{name}": functools.partial(left_behind, AWAITED[name]) for name in AWAITED if name != "stubborn"}
CONTRACTS = ("once", "blind", "repeat")
"""`once` with a probe, `once` without, and `repeat`."""
KINDS = ("pool", "timed", *AWAITED, *LEFT)
"""Where bodies act. `pool`: a `def` body. `timed`: a body that is past its timeout."""
STEPS: dict[str, Any] = {}


def declare(kind: str, contract: str) -> None:
    """Declare the step of this kind of body and contract."""
    name = f"{kind}_{contract}"
    if kind == "pool":

        def body(number: int) -> str:
            return Knock(name, number).on_thread()
    else:
        how = LEFT.get(kind) or AWAITED.get(kind, in_to_thread)

        async def body(number: int) -> str:  # type: ignore[misc]
            return str(await how(Knock(name, number)))

    body.__name__ = body.__qualname__ = name
    options: dict[str, Any] = {"retry": PATIENT} if contract == "repeat" else {"effect": "once"}
    if contract == "once":
        options |= {"probe": ask_till}
    if kind == "timed":
        options |= {"timeout": 0.5}
    STEPS[name] = step(**options)(body)


for _kind in KINDS:
    for _contract in CONTRACTS:
        declare(_kind, _contract)


@step(retry=PATIENT)
async def stamp(number: int) -> str:
    """Nothing is waited for here: it acts at once."""
    return await asyncio.to_thread(Knock("stamp", number).on_thread)


@workflow
async def stop_order(name: str, number: int) -> dict[str, str]:
    """One effect that is disturbed, a signal, a timer, and another effect."""
    does = STEPS[name]
    acted = await (asyncio.to_thread(does, number) if name.startswith("pool_") else does(number))
    word = await everstep.receive("word", str)
    await asyncio.sleep(0.02)
    stamped = await stamp(number)
    return {"acted": acted, "word": word, "stamped": stamped}
