"""Agents of Strands that a test kills: one with an agent inside that asks a person, and one that keeps a session."""

import json
from pathlib import Path
from typing import Any

from strands import Agent, ToolContext, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.types.exceptions import ContextWindowOverflowException

import everstep
from everstep.integrations.strands import EverstepSessionManager, ScriptedModel, durable
from everstep.testing import ledger
from tests.waiting import wait_until

WHERE = {"ledger": ""}


@tool(context=True)
def pay(usd: int, tool_context: ToolContext) -> str:
    """Pay, if a person says yes."""
    if tool_context.interrupt("may-i-pay", reason={"usd": usd}) != "yes":
        return "not allowed"
    ledger.apply(WHERE["ledger"], "pay", everstep.key(), str(usd))
    return f"paid {usd}"


@tool(context=True)
def note(word: str, tool_context: ToolContext) -> str:
    """Note a word in the agent's state, under its own name and in a list of all."""
    tool_context.agent.state.set(word, True)
    return "noted"


class Forgetful(ScriptedModel):
    """A model whose window is full once the conversation has eight messages, and that can summarize."""

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        if messages[-1]["content"][-1].get("text") == "Please summarize this conversation.":
            source = ScriptedModel("they noted and paid").stream([], *args)
        elif len(messages) >= 8:
            raise ContextWindowOverflowException("too long")
        else:
            source = super().stream(messages, *args, **kwargs)
        async for chunk in source:
            yield chunk


payer = Agent(name="payer", model=ScriptedModel([("pay", {"usd": 5})], "paid"), tools=[pay], callback_handler=None)
NOTES = [("note", {"word": word}) for word in ("tides", "ships", "moon")]
boss = Agent(
    name="boss",
    model=Forgetful(NOTES, [("payer", {"input": "pay"}), *NOTES[:1]], [("payer", {"input": "again"})], "done"),
    tools=[note, payer.as_tool(name="payer")],
    conversation_manager=SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=2),
    callback_handler=None,
)


@everstep.workflow
async def office() -> Any:
    called = durable(boss)
    text = str(await called.invoke_async("go")).strip()
    results = [
        [block["toolResult"]["toolUseId"], block["toolResult"]["content"]]
        for one in called.messages
        for block in one["content"]
        if "toolResult" in block
    ]
    again = str(await called.invoke_async("and now?")).strip()
    return [text, results, again, called.state.get(), len(called.messages)]


def work(store: str) -> Any:
    """Take the run to its end, and allow whatever it asks for."""
    with everstep.open(store) as app:
        run = app.start(office, id="office")

        def ended() -> bool:
            for one in run.approvals():
                try:
                    app.approve("office", "yes", id=one.id)
                except everstep.errors.ApprovalConflict:
                    pass  # it has its answer
            return app.get("office").status() in ("completed", "failed", "held")

        wait_until(ended)
        return run.result()


def talk(store: str, who: str, turns: str) -> Any:
    """Say some things in a session, and return all that was said in it."""
    manager = EverstepSessionManager("chat", url=store)
    talker = Agent(model=ScriptedModel("heard"), session_manager=manager, callback_handler=None)
    said = [one for one in talker.messages if one["role"] == "user"]
    for turn in range(len(said), int(turns)):
        talker(f"{who} {turn}")
        ledger.apply(WHERE["ledger"], "said", f"{who} {turn}", "")
    stored = manager.session_repository.list_messages("chat", talker.agent_id)
    manager.close()
    return [[one.message_id, one.message["role"], one.message["content"][0]] for one in stored]


def speak(store: str, who: str, folder: str) -> Any:
    """Open a session, wait until others have opened it too, and say something."""
    manager = EverstepSessionManager("chat", url=store)
    talker = Agent(model=ScriptedModel("heard"), session_manager=manager, callback_handler=None)
    talker.state.set("who", who)
    (Path(folder) / f"{who}-is-open").touch()
    wait_until((Path(folder) / "go").exists)
    return str(talker(f"{who} speaks"))


def main(store: str, ledger_url: str, action: str, *rest: str) -> None:
    """Do one of these, and print what came of it."""
    WHERE.update(ledger=ledger_url)
    actions: dict[str, Any] = {"work": work, "talk": talk, "speak": speak}
    print(json.dumps(actions[action](store, *rest)), flush=True)
