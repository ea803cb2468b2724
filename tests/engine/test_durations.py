"""A duration is said as seconds, as a text with units, or as a `timedelta`: everywhere the same."""

from datetime import timedelta
from typing import Any

import pytest
from click import BadParameter

import everstep
from everstep import Budget, Retention, Retry, step, workflow
from everstep.cli.durations import AGE, Time
from everstep.errors import Misuse
from everstep.model.durations import seconds_in
from everstep.model.options import checked_seconds
from tests.engine.resume_helpers import Machine

SAID: list[tuple[Any, float]] = [
    (2, 2),
    (0.5, 0.5),
    ("2s", 2),
    ("250ms", 0.25),
    ("1.5m", 90),
    ("1h30m", 5400),
    ("2d", 172800),
    ("1w", 604800),
    ("-30m", -1800),
    (timedelta(minutes=2), 120),
    (timedelta(milliseconds=5), 0.005),
]
NO_DURATIONS: list[Any] = [
    "",
    "2",
    "s",
    "2 s",
    "2S",
    "2s ",
    "1e3s",
    "٢s",
    "2s-1s",
    "--2s",
    "h2",
    "9" * 200 + "s",
    None,
    True,
    [2],
    b"2s",
]


@pytest.mark.parametrize(("said", "seconds"), SAID)
def test_each_way_to_say_a_duration_is_seconds(said: Any, seconds: float) -> None:
    assert seconds_in(said) == seconds


@pytest.mark.parametrize("said", NO_DURATIONS)
def test_anything_else_is_refused_and_the_error_shows_the_ways(said: Any) -> None:
    assert seconds_in(said) is None
    with pytest.raises(Misuse, match=r'such as timeout=5, or a duration such as "5s", "1h30m" or a timedelta'):
        checked_seconds("timeout", said)


def test_declarations_take_all_of_them() -> None:
    for said in (90, "90s", "1m30s", timedelta(seconds=90)):

        @step(effect="once", timeout=said, probe_for=said, settle=said, retry=Retry(first=said, most=said))
        async def pay() -> None: ...

        @workflow(timeout=said)
        async def flow() -> None: ...

        declared: Any = pay
        assert (declared.timeout, declared.probe_for, declared.settle) == (90, 90, 90)
        assert (declared.retry.first, declared.retry.most) == (90, 90)
        assert flow.timeout == 90  # type: ignore[attr-defined]
        assert Retention(runs=said, every=said).seconds_of_runs == 90
        assert Budget(seconds=said) is not None


@workflow
async def waits() -> str:
    await everstep.sleep("30d")
    await everstep.sleep(timedelta(hours=2))
    try:
        return await everstep.receive("word", str, timeout="1h")
    except TimeoutError:
        return "none"


async def test_timers_and_timeouts_take_all_of_them(machine: Machine) -> None:
    app = await machine.boot()
    run = await app.start(waits, delay="1w")
    for said in ("1w", timedelta(days=30), "2h", 3600):
        await machine.clock.rest(app)
        assert await run.status() == "waiting"
        machine.clock.advance(said)
    assert await run.result(timeout="1m") == "none"
    other = await app.start(waits)
    with pytest.raises(TimeoutError):
        await other.result(timeout="10ms")
    await other.cancel(grace="2s")


@pytest.mark.parametrize(
    ("kind", "text", "seconds"),
    [(Time(bare=True), "90", 90), (Time(bare=True), "1.5", 1.5), (AGE, "1h30m", 5400), (Time(bare=True), "2s", 2)],
)
def test_the_command_line_takes_units_and_seconds_where_these_are_usual(kind: Time, text: str, seconds: float) -> None:
    assert kind.convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (AGE, "30"),
        (AGE, "30x"),
        (Time(bare=True), "nan"),
        (Time(least=1), "0.5s"),
        (Time(most=60), "61s"),
        (AGE, "-2s"),
    ],
)
def test_the_command_line_refuses_others(kind: Time, text: str) -> None:
    with pytest.raises(BadParameter, match=r"such as|has to be"):
        kind.convert(text, None, None)
