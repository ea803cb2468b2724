"""Events of approvals and of graphs: a flipped bit in any of them is found before the run goes on."""

from typing import Any

import apsw
import pytest

import everstep
from everstep import workflow
from everstep.engine.code.recovery_point import verify_whole
from everstep.errors import Damaged
from everstep.model.events import BODIES
from tests.damage.subject import bits_of, flip
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw

KINDS = {kind for kind in BODIES if kind.startswith(("approval_", "graph_"))}


@workflow
async def hurried() -> str:
    try:
        await everstep.approval("wait", {"usd": 1}, timeout=5)
    except TimeoutError:
        return str(await everstep.approval("pay", {"usd": 120}))
    return ""


def drawn() -> Any:
    graph = everstep.Graph("damaged")

    @graph.node
    async def first(state: dict[str, Any]) -> dict[str, Any]:
        return {"said": str(await everstep.approval("go on", {"to": "second"}))}

    @graph.node
    async def second(state: dict[str, Any]) -> None:
        return None

    graph.edge("first", "second")
    return graph


def events_of(raw: apsw.Connection, run: str) -> list[tuple[int, str, bytes]]:
    found = raw.execute("SELECT seq, kind, body FROM events WHERE run = ? ORDER BY seq", (run,)).fetchall()
    return [(seq, kind, body) for seq, kind, body in found if kind in KINDS]


async def test_a_flipped_bit_of_an_approval_or_a_graph_is_found(machine: Machine) -> None:
    app, _ = await machine.start(hurried, id="asked")
    await machine.until_status("asked", "waiting")
    await machine.advance(6)
    await machine.until(lambda: "approval_withdrawn" in machine.kinds("asked"))
    await app.start(drawn(), {}, id="drawn")
    await machine.until(lambda: "graph_moved" in machine.kinds("drawn"))
    await machine.until_status("drawn", "waiting")
    await machine.stop(app)

    store = machine.open_store()
    raw = open_raw(store.path)
    seen = set()
    for run in ("asked", "drawn"):
        verify_whole(store, run)
        for seq, kind, body in events_of(raw, run):
            seen.add(kind)
            count = bits_of(body)
            for bit in (0, count // 3, count // 2, count - 1):
                raw.execute("UPDATE events SET body = ? WHERE run = ? AND seq = ?", (flip(body, bit), run, seq))
                with pytest.raises(Damaged):
                    verify_whole(store, run)
            raw.execute("UPDATE events SET body = ? WHERE run = ? AND seq = ?", (body, run, seq))
        verify_whole(store, run)
    raw.close()
    assert seen == KINDS
