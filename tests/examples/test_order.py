"""The order: services that see each request once, however often the process dies."""

from pathlib import Path

import pytest

from tests.examples import kit
from tests.waiting import open_sqlite

SHIPPED = ["charge ann 120", "reserve lamp", "ship lamp to ann"]
REFUNDED = ["charge ann 120", "free stock", "refund payment", "reserve piano"]


def done(folder: Path) -> list[str]:
    """Return what the services did, without the numbers in it."""
    database = open_sqlite(folder / "services.db")
    found = sorted(what.partition("-")[0] for (what,) in database.execute("select what from done"))
    database.close()
    return found


# Each dies after the service has acted and before anybody knows; `run.end` when all is done but the end not recorded.
POINTS = ["body.after:1", "body.after:2", "body.after:4", "body.after:5", "run.end:1"]


@pytest.mark.parametrize("at", POINTS)
@pytest.mark.parametrize(
    ("item", "outcome", "expected"), [("lamp", "shipped", SHIPPED), ("piano", "refunded", REFUNDED)]
)
def test_an_order_that_is_killed_is_done_once(
    tmp_path: Path, item: str, outcome: str, expected: list[str], at: str
) -> None:
    kit.run_into_crash("order", tmp_path, item, at=at)
    assert kit.run("order", tmp_path, item).startswith(outcome)
    assert done(tmp_path) == expected


def test_shipping_is_tried_again_and_the_attempts_are_in_the_history(tmp_path: Path) -> None:
    kit.run("order", tmp_path, "lamp")
    events = [event for event in kit.history(tmp_path, "order-lamp") if event.step == "ship"]
    assert [event.kind for event in events] == ["step_started", "attempt_failed"] * 2 + [
        "step_started",
        "step_completed",
    ]
    assert [event.body.get("attempt", 1) for event in events if event.kind == "step_started"] == [1, 2, 3]
