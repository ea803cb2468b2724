"""Tools: steps with a description for models, and with a person's approval of their exact arguments."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import everstep
from everstep import blocking, tool, workflow
from everstep.errors import Misuse, Refused
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Machine

SENT: list[str] = []


@dataclass
class Letter:
    to: str
    text: str = ""


@tool(effect="once", approval=lambda letter, copies=1: letter.to != "me", approval_timeout=3600)
async def send(letter: Letter, copies: int = 1) -> str:
    """Send a letter.

    It cannot be called back.

    Args:
        letter: What is sent,
            and to whom.
        copies (int): How many.
    """
    SENT.append(letter.to)
    return f"sent {copies} to {letter.to}"


@tool(approval=True, secret=True)
def whisper(word: str) -> str:
    SENT.append(word)
    return word.upper()


@tool
async def look(path: str) -> str:
    return path


@workflow
async def sending(to: str) -> str:
    try:
        return await send(Letter(to), copies=2)
    except Refused as refused:
        return str(refused)
    except TimeoutError:
        return "nobody answered"


@workflow
async def whispering() -> str:
    return await asyncio.to_thread(whisper, "abracadabra")


@workflow
def plainly() -> str:
    return whisper("hush")


async def asked(machine: Machine, run: str) -> None:
    await machine.until(lambda: machine.kinds(run, "approval_asked"))


async def test_a_person_approves_the_exact_arguments_before_the_body_runs(machine: Machine) -> None:
    SENT.clear()
    _, run = await machine.start(sending, "ann", id="r")
    await asked(machine, "r")
    (one,) = await run.approvals()
    assert (one.what, one.arguments) == ("send", {"letter": {"to": "ann", "text": ""}, "copies": 2})
    assert machine.kinds("r", "step_started") == []
    await run.approve(True)
    assert await run.result() == "sent 2 to ann"
    assert SENT == ["ann"]
    assert machine.replay("r").differences == []
    assert check(export_histories(machine.store)) == []


@pytest.mark.parametrize(
    ("answer", "note", "said"),
    [
        (False, "", "refused by a person (bob)"),
        (False, "too dear", "refused by a person (bob): too dear"),
        ("not today", "", "refused by a person (bob): not today"),
        (None, "", "refused by a person (bob)"),
        (1, "", "refused by a person (bob)"),
    ],
)
async def test_any_other_answer_refuses_it_and_nothing_is_done(
    machine: Machine, answer: Any, note: str, said: str
) -> None:
    SENT.clear()
    _, run = await machine.start(sending, "ann", id="r")
    await asked(machine, "r")
    await run.approve(answer, by="bob", note=note)
    assert await run.result() == said
    assert SENT == []
    assert machine.kinds("r", "step_started") == []


async def test_a_function_of_the_arguments_says_whether_somebody_is_asked(machine: Machine) -> None:
    app = await machine.boot()
    assert await app.run(sending, "me", id="r") == "sent 2 to me"
    assert machine.kinds("r", "approval_asked") == []


async def test_nobody_answers_in_time(machine: Machine) -> None:
    _, run = await machine.start(sending, "ann", id="r")
    await asked(machine, "r")
    await machine.advance(3601)
    assert await run.result() == "nobody answered"


@pytest.mark.parametrize("way", [whispering, plainly])
async def test_a_def_tool_is_approved_from_both_kinds_of_workflows(machine: Machine, way: Any) -> None:
    SENT.clear()
    _, run = await machine.start(way, id="r")
    await asked(machine, "r")
    (one,) = await run.approvals()
    assert one.arguments == "(secret)"
    assert SENT == []
    await run.approve(True)
    assert await run.result() in ("ABRACADABRA", "HUSH")
    assert len(SENT) == 1


def test_what_a_model_is_told_comes_from_the_signature_and_the_docstring() -> None:
    spec = send.spec  # type: ignore[attr-defined]
    assert spec["name"] == "send"
    assert spec["description"] == "Send a letter.\n\nIt cannot be called back."
    schema = spec["inputSchema"]
    assert schema["required"] == ["letter"]
    assert schema["properties"]["copies"] == {"description": "How many.", "type": "integer", "default": 1}
    assert schema["properties"]["letter"]["description"] == "What is sent, and to whom."
    assert schema["$defs"]["Letter"]["properties"]["to"] == {"type": "string"}
    assert look.spec["inputSchema"]["properties"] == {"path": {"type": "string"}}  # type: ignore[attr-defined]


def test_outside_a_run_it_is_the_plain_function() -> None:
    assert asyncio.run(look("a")) == "a"
    assert whisper("b") == "B"
    assert look.effect == "repeat"  # type: ignore[attr-defined]
    assert repr(send) == "<tool send (once)>"


def test_a_timeout_without_an_approval_is_a_mistake() -> None:
    with pytest.raises(Misuse, match="approval_timeout= is for tools"):
        tool(approval_timeout=5)(look)
    assert blocking.approval is not None
    assert everstep.tool is tool
