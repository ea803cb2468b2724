"""A research agent, as anybody would write it. `everstep demo` kills it three times; it does not know.

Its model is scripted, so it needs no network and no key. What it does to the outside goes to a ledger: a process of its
own that writes down every request it gets and everything it applies.
"""

import asyncio
import os
from pathlib import Path

import everstep
from everstep import step, workflow
from everstep.testing import ledger

LEDGER = os.environ.get("EVERSTEP_DEMO_LEDGER") or ledger.offered()
QUESTIONS = ("What are they?", "What makes them?", "Who needs them?", "What is still unknown?")


# -- read: no change outside, so after a crash it is simply asked again ---------------------------------------------
@step(effect="read")
async def plan(topic: str) -> list[str]:
    """Decide what to ask."""
    await asyncio.sleep(0.3)
    return [f"{topic}: {question}" for question in QUESTIONS]


@step(effect="read")
async def ask_model(question: str) -> str:
    """Ask the model, which takes its time."""
    await asyncio.to_thread(ledger.ask, LEDGER, "ask_model", everstep.key(), question)
    await asyncio.sleep(0.3 + 0.4 * (len(question) % 4))
    return f"A careful answer to: {question}"


@step(effect="read")
async def outline(answers: list[str]) -> list[str]:
    """Make chapters of the answers."""
    await asyncio.sleep(0.4)
    return [f"Chapter {number}" for number in range(1, len(answers))]


# -- repeat: done again after a crash with the same key, by which the receiver knows it ------------------------------
@step
async def publish_chapter(title: str, text: str) -> str:
    """Publish one chapter; the receiver knows by the key if it has it already."""
    receipt = await asyncio.to_thread(ledger.apply, LEDGER, "publish_chapter", everstep.key(), [title, text])
    await asyncio.sleep(0.5)  # the answer is on its way back: applied, and not known here yet
    return receipt


@step
async def post_to_board(text: str) -> str:
    """Tell everybody."""
    return await asyncio.to_thread(ledger.apply, LEDGER, "post_to_board", everstep.key(), text)


@step
def write_file(name: str, text: str) -> int:
    """Write the report."""
    return Path(os.environ.get("EVERSTEP_DEMO_FOLDER", "."), name).write_text(text)


@workflow
async def report(topic: str) -> str:
    """Research a topic and publish a report about it."""
    questions = await plan(topic)
    answers = await asyncio.gather(*(ask_model(question) for question in questions))
    everstep.publish("answers", len(answers))
    chapters = await outline(answers)
    receipts = []
    for title, answer in zip(chapters, answers, strict=False):
        receipts.append(await publish_chapter(title, answer))
        everstep.publish("chapters", len(receipts))
    text = "\n".join(["# A report on " + topic, *answers, "Receipts: " + ", ".join(receipts)])
    await asyncio.to_thread(write_file, "report.md", text)
    if await everstep.receive("approved", bool):
        await post_to_board(f"A report on {topic} is out.")
    return text


if __name__ == "__main__":
    everstep.run(report, "tides", id="report")
