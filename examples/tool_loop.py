"""An agent: a model that calls tools in a loop, until it has an answer.

The model is scripted, so this needs no account and no network. Try it in an empty folder:

    python tool_loop.py          # kill it whenever you like
    python tool_loop.py          # it goes on in the middle of the conversation

Answers of the model that were recorded are not paid for again. A tool that was under way is called again with the same
key, so its effect happens once.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import everstep
from everstep import step, workflow

SCRIPT: list[dict[str, Any]] = [
    {"tool": "search", "arguments": {"words": "high tide"}},
    {"tool": "search", "arguments": {"words": "moon"}},
    {"tool": "save_note", "arguments": {"title": "tides", "text": "The moon pulls, the sea follows."}},
    {"answer": "I wrote a note about tides."},
]


# A model call changes nothing outside: it is a "read". It may be slow and it may fail, so it has a timeout for each
# attempt, and several attempts. Put a call of your model's client here.
@step(effect="read", timeout=60, retry=everstep.Retry(attempts=4, first=0.5))
async def ask_model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    with open("model.log", "a") as log:
        log.write(f"{len(messages)} messages\n")
    await asyncio.sleep(0.2)
    said = sum(message["role"] == "assistant" for message in messages)
    return SCRIPT[said]


@step(effect="read")
async def search(words: str) -> str:
    await asyncio.sleep(0.1)
    return f"three pages about {words}"


# A tool that changes something takes its key along. Here the key is the file's name, so a second attempt writes the
# same file again; a service would take it as the idempotency key of the request.
@step
async def save_note(title: str, text: str) -> str:
    await asyncio.sleep(0.1)
    name = f"{title}-{everstep.key()[:8]}.txt"
    Path(name).write_text(text + "\n")
    return name


TOOLS = {"search": search, "save_note": save_note}


@workflow
async def agent(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        reply = await ask_model(messages)
        messages.append({"role": "assistant", "content": json.dumps(reply)})
        if "answer" in reply:
            return reply["answer"]
        print("calls", reply["tool"], reply["arguments"], flush=True)  # silent in a replay
        result = await TOOLS[reply["tool"]](**reply["arguments"])
        messages.append({"role": "tool", "content": result})


if __name__ == "__main__":
    print(everstep.run(agent, "Write me a note about tides.", id="agent-1"))
