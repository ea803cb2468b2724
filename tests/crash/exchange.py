"""The part of the workload that exchanges something with others: a run is asked, answers, and writes a stream.

Whoever asks uses the same ids in every life, and whoever reads goes on behind the last entry that its file has.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import everstep
from everstep import step, workflow
from everstep.testing.journals import ClientJournal
from everstep.testing.ledger import apply

RUN = "exchange-1"
TOKENS = 9
LEDGER: list[str] = [""]
"""The address of the ledger."""


@step(effect="read")
async def speak(words: str) -> str:
    """A model that says one word after the other, over several batches."""
    stream = everstep.stream("tokens")
    for number in range(TOKENS):
        stream.append(f"{words}{number}")
        await asyncio.sleep(0.015)
    return words


@step
def shout(words: str) -> str:
    stream = everstep.stream("tokens")
    for number in range(3):
        stream.append(f"{words}{number}")
    return words.upper()


@step
async def rename(name: str) -> str:
    return await asyncio.to_thread(apply, LEDGER[0], "rename", everstep.key(), name)


@workflow
async def exchange_talk() -> list[str]:
    stream, names = everstep.stream("tokens"), []
    stream.append("begin")
    await asyncio.gather(speak("a"), asyncio.to_thread(shout, "b"))
    async for request in everstep.requests("rename", str, answer=str):
        if not request.value:
            request.refuse("a name is not empty")
            continue
        names.append(await rename(request.value))
        request.answer(names[-1])
        if request.value == "last":
            break
    stream.append("end")
    return names


async def ask_all(app: everstep.App, journal: ClientJournal) -> list[str]:
    """Ask what every life asks, with the same ids, and return the answers."""
    answers = []
    for number, value in enumerate(["first", "", "last"]):
        journal.note("ask", RUN, "asked", id=f"ask-{number}")
        try:
            answers.append(await app.ask(RUN, "rename", value, id=f"ask-{number}", answer=str))
        except everstep.errors.RequestRefused as refused:
            answers.append(f"refused: {refused}")
        journal.note("ask", RUN, "acknowledged", id=f"ask-{number}", value=answers[-1])
    return answers


async def read_all(app: everstep.App, folder: Path) -> list[list[object]]:
    """Read along, and write each entry down before the next one. Returns all that this and earlier lives have read."""
    path = folder / "read.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    read: list[list[object]] = [json.loads(line) for line in lines]
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    async for entry in app.get(RUN).stream("tokens", after=int(str(read[-1][0])) if read else 0):
        read.append([entry.position, entry.value, entry.step, entry.attempt, entry.first])
        os.write(file, json.dumps(read[-1]).encode() + b"\n")
    os.close(file)
    return read


def kept(read: list[list[object]]) -> dict[str, list[object]]:
    """Return what counts, by step: when an attempt begins, what an earlier one wrote is dropped."""
    found: dict[str, list[object]] = {}
    for _, value, name, _, first in read:
        if first:
            found[str(name)] = []
        found.setdefault(str(name), []).append(value)
    return found


async def exchange(
    app: everstep.App,
    journal: ClientJournal,
    folder: Path,
    journalled: Callable[..., Awaitable[object]],
) -> None:
    """Start the run, ask it and read along; note what came of it."""
    await journalled(journal, "start", RUN, app.start(exchange_talk, id=RUN))
    answers, read = await asyncio.gather(ask_all(app, journal), read_all(app, folder))
    names = await app.get(RUN).result(timeout=60)
    assert [entry[0] for entry in read] == list(range(1, len(read) + 1)), read
    whole = [[one.position, one.value, one.step, one.attempt, one.first] async for one in app.get(RUN).stream("tokens")]
    assert whole == read, "each entry was read once, in order, over all lives"
    verified = await app.get(RUN).verify()
    assert verified.sound, verified
    journal.note("result", RUN, "acknowledged", value=[answers, names, kept(read)], published={})
