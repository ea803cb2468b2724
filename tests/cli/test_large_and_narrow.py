"""Runs of very many steps, and terminals of few columns: what matters is seen, and nothing is cut that is pasted."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from everstep.cli.drawing import abridged
from everstep.cli.terminal import add_fitted, print_rows, styled
from everstep.cli.watching import _drawn
from everstep.view.store import RunningView, StoreView
from everstep.view.timeline import Row

ID = "order-2026-11-16-of-a-customer-with-a-long-name"


def row(number: int, state: str = "completed") -> Row:
    return Row(kind="step", name=f"one#{number}", seq=number, started_at=number, state=state)


def narrow() -> Console:
    return Console(file=io.StringIO(), width=30, markup=False, highlight=False)


def printed(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_of_ten_thousand_steps_the_first_the_last_and_those_that_did_not_complete_are_shown() -> None:
    rows = [row(number, "failed" if number == 5000 else "completed") for number in range(10_000)]
    shown = abridged(rows)
    assert (shown[0].name, shown[-1].name) == ("one#0", "one#9999")
    assert "one#5000" in [one.name for one in shown]
    assert len(shown) == 301
    assert abridged(rows[:250]) == rows[:250]


def test_a_narrow_terminal_cuts_nothing_off_but_the_last_column() -> None:
    out = narrow()
    print_rows(
        out,
        ("run", "status", "age", ""),
        [[styled(ID), styled("completed"), styled("5 s"), styled("x" * 90)]],
        right=frozenset({"age"}),
    )
    assert f"{ID}  completed  5 s  xxxxxxxxx…\n" in printed(out)

    out, table = narrow(), Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("", no_wrap=True)
    add_fitted(table, [[styled(ID), styled("x" * 90)]], out.width)
    out.print(table, crop=False)
    assert f"{ID}  xxxxxxxxx…" in printed(out)


def test_twenty_thousand_rows_are_printed_in_their_order() -> None:
    out = narrow()
    rows = [[styled(str(number)), styled("step")] for number in range(20_000)]
    print_rows(out, ("seq", ""), rows, right=frozenset({"seq"}))
    lines = printed(out).splitlines()
    assert len(lines) == 20_001
    assert (lines[1], lines[-1]) == ("    0  step", "19999  step")


def test_top_says_when_there_are_more_runs_than_it_shows() -> None:
    running = [RunningView(ID, "order", "charge#12", "", 40, 0)] * 2
    lists: dict[str, Any] = {"workers": [], "running": running, "queues": [], "holds": []}
    out = Console(file=io.StringIO(), width=50)
    out.print(_drawn(StoreView(store="s", at=10**6, runs={"running": 5}, open_holds=0, **lists)))
    assert "running (the newest 2 of 5)" in printed(out)
