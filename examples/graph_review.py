"""A graph: research in parallel, a draft that is checked and written again, a person's approval, and a file.

The model is scripted, so this needs no account and no network. Try it in an empty folder, with two terminals:

    python graph_review.py            # works, asks, and waits; kill it whenever you like and start it again
    python graph_review.py yes        # in the other terminal: the answer (or: no)

Nodes that have finished are not done again, also not when the process is killed in the middle of the second lap. Look
at it with `everstep show review-1`, and have it drawn with `everstep show review-1 --svg review.svg`.
"""

import asyncio
import sys
from dataclasses import dataclass, field

import everstep
from everstep import step

RUN = "review-1"


@dataclass
class Review:
    topic: str
    questions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text: str = ""
    drafts: int = 0
    good: bool = False
    approved: bool = False


# Calls of a model change nothing outside: they are reads. Put calls of your model's client here.
@step(effect="read")
async def plan(state: Review) -> dict[str, list[str]]:
    await asyncio.sleep(0.1)
    return {"questions": [f"What are {state.topic}?", f"What causes {state.topic}?", f"Who needs {state.topic}?"]}


@step(effect="read", timeout=60, retry=everstep.Retry(attempts=4, first=0.5))
async def research(question: str) -> dict[str, list[str]]:
    await asyncio.sleep(0.1)
    return {"notes": [f"{question} It is known."]}


@step(effect="read")
async def draft(state: Review) -> dict[str, str | int]:
    await asyncio.sleep(0.1)
    text = "\n".join([f"# About {state.topic}", *state.notes, *["It was revised."] * state.drafts])
    return {"text": text, "drafts": state.drafts + 1}


# A plain function is workflow code: it decides, and may call steps. It does not touch the outside itself.
async def check(state: Review) -> dict[str, bool]:
    return {"good": "revised" in state.text}


async def publish(state: Review) -> None:
    await everstep.files.write(f"{state.topic}.md", state.text + "\n")


# Several visits add to the notes at the same time, and in any order.
def put_together(notes: list[str], new: list[str]) -> list[str]:
    return sorted([*notes, *new])


graph = everstep.Graph("review", state=Review, reduce={"notes": put_together}, max_concurrency=2)
graph.node(plan)
graph.node(research)
graph.node(draft)
graph.node(check, limit=5)
graph.approval("approve", lambda s: {"topic": s.topic, "text": s.text}, into="approved", timeout=7 * 86400)
graph.node(publish)

graph.each("plan", "research", over="questions")  # one visit for each question, two at a time
graph.edge("research", "draft")  # waits for all of them
graph.edge("draft", "check")
graph.edge("check", "draft", when=lambda s: not s.good)
graph.edge("check", "approve", when=lambda s: s.good)
graph.edge("approve", "publish", when=lambda s: s.approved)
graph.edge("approve", graph.end, when=lambda s: not s.approved)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with everstep.open() as app:
            app.approve(RUN, sys.argv[1] == "yes")
        print("sent")
    else:
        ended = everstep.run(graph, Review("tides"), id=RUN)
        print(f"published tides.md after {ended.drafts} drafts" if ended.approved else "not published")
