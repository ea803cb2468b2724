"""A body that replaces the authorizer of its connection is not prevented from ending the transaction, and is found."""

from typing import Any

import pytest

from everstep import STORE, Retry, transaction, workflow
from everstep.errors import Misuse
from tests.effects.shops import store_rows
from tests.effects.test_atomic import sell
from tests.engine.resume_helpers import Machine

RETRY = Retry(attempts=3, first=5.0, factor=1.0, jitter=0.0)


UNGUARDED: dict[str, tuple[str, ...]] = {
    "committed": ("COMMIT",),
    "committed and begun": ("COMMIT", "BEGIN IMMEDIATE"),
    "rolled back and begun": ("ROLLBACK", "BEGIN IMMEDIATE"),
}


@pytest.mark.parametrize("how", UNGUARDED)
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("where", ["file", "store"])
async def test_a_body_that_takes_the_guard_away_and_ends_the_transaction_is_found_and_not_done_again(
    machine: Machine, where: str, raises: bool, how: str
) -> None:
    path = machine.folder / "shop.db" if where == "file" else machine.path
    calls: list[int] = []

    @transaction(path if where == "file" else STORE, retry=RETRY)
    def breaking(connection: Any) -> str:
        calls.append(1)
        sold = sell(connection, "lamp")
        connection.set_authorizer(None)
        if where == "store":
            connection.set_commit_hook(None)
        for statement in UNGUARDED[how]:
            connection.execute(statement)
        if raises:
            raise ValueError("sold out")
        return sold

    @workflow
    def flow() -> str:
        try:
            return breaking()
        except Misuse as refused:
            return f"refused: {refused}"

    app = await machine.boot()
    assert "nothing undoes what a body commits" in await app.run(flow, id="r")
    assert calls == [1]
    assert len(store_rows(path)) == ("COMMIT" in UNGUARDED[how])
