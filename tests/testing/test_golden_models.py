"""Golden files of runs that were sent plain data for models."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

import everstep
from everstep import workflow
from everstep.engine.app.client import Client
from everstep.testing import replay_golden, save_history

SENT: dict[str, Any] = {"title": "tea"}


class Ticket(BaseModel):
    id: uuid.UUID = Field(default_factory=uuid.uuid4)
    title: str


@workflow
async def golden_tickets(first: Ticket) -> list[str]:
    second = await everstep.receive("ticket", Ticket)
    everstep.publish("ids", [str(first.id), str(second.id)])
    return [first.title, second.title]


async def saved(folder: Path, *, by_name: bool, payloads: bool) -> Path:
    async with everstep.open("memory:") as app:
        if by_name:
            await Client(app).start("golden_tickets", SENT, id="r")
            await app.take_up_run("r")
        else:
            await app.start(golden_tickets, SENT, id="r")  # type: ignore[arg-type]
        await app.signal("r", "ticket", SENT)
        assert await app.get("r").result(timeout=60) == ["tea", "tea"]
        return save_history(app, "r", folder / "golden.json", payloads=payloads)


@pytest.mark.parametrize("by_name", [True, False])
async def test_a_file_with_payloads_is_replayed_with_what_the_models_became(tmp_path: Path, by_name: bool) -> None:
    replay_golden(await saved(tmp_path, by_name=by_name, payloads=True), golden_tickets)


async def test_a_file_without_payloads_is_replayed_with_what_was_sent(tmp_path: Path) -> None:
    path = await saved(tmp_path, by_name=True, payloads=False)
    assert "tea" not in path.read_text()
    replay_golden(path, golden_tickets, SENT, signals={"ticket": SENT})
