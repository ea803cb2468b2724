"""Golden histories: what a run did, against which later code is replayed. No step runs in such a replay."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import Misuse, UnknownRun
from everstep.testing import GoldenDiffers, replay_golden, save_history
from tests import forked
from tests.house.sources import ROOT

RAN: list[str] = []
FAKES: dict[str, Any] = {"look_up": lambda word: [word, "found"], "buy": ValueError("sold out"), "golden_child": 3}


@step(effect="read")
async def look_up(word: str) -> list[str]:
    RAN.append(word)
    return [word, "found"]


@step
async def buy(what: str) -> str:
    RAN.append(what)
    raise ValueError("sold out")


@workflow(name="golden_child")
async def child(count: int) -> int:
    return count


async def shop(first: str, second: str, name: str = "go") -> str:
    found = await asyncio.gather(look_up(first), look_up(second))
    approved = await everstep.receive(name, bool)
    await asyncio.sleep(0.01)
    number = await child(3)
    try:
        await buy(f"{found[0][0]} {everstep.uuid()} {everstep.now().isoformat()}")
    except ValueError as error:
        return f"{error} {approved} {number}"
    return "bought"


@workflow(name="golden_shop")
async def golden_shop(topic: str) -> str:
    return await shop(topic, "why")


def changed(code: Callable[..., Any]) -> Any:
    """Declare the workflow anew, as an edited file would."""
    return workflow(name="golden_shop")(code)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A whole history and a bare one of the same run."""
    changed(golden_shop.function)  # type: ignore[attr-defined]
    whole, bare = tmp_path / "folder" / "whole.json", tmp_path / "bare.json"
    with everstep.open("memory:") as app:
        run = app.start(golden_shop, "tides-secret-word", id="shop-1")
        run.signal("go", True)
        assert run.result() == "sold out True 3"
        save_history(app, "shop-1", whole, payloads=True)
        save_history(app, "shop-1", bare)
        with pytest.raises(UnknownRun):
            save_history(app, "shop-2", bare)
    RAN.clear()
    return whole, bare


def replay_bare(bare: Path, code: Any, topic: str = "tides-secret-word", **more: Any) -> None:
    replay_golden(bare, code, topic, **{"outcomes": FAKES, "signals": {"go": True}, **more})


def test_the_same_code_replays_and_runs_no_step(files: tuple[Path, Path]) -> None:
    whole, bare = files
    replay_golden(whole, golden_shop)
    replay_bare(bare, golden_shop)
    assert RAN == []


async def test_it_can_be_replayed_inside_an_event_loop(files: tuple[Path, Path]) -> None:
    replay_golden(files[0], golden_shop)


def test_a_bare_history_has_no_payload(files: tuple[Path, Path]) -> None:
    whole, bare = (path.read_text() for path in files)
    for text in ("tides-secret-word", "sold out", '"found"'):
        assert text in whole
        assert text not in bare
    assert len(bare.splitlines()) == len(whole.splitlines()) > 10, "a line for each event"


@workflow(name="golden_another_argument")
async def another_argument(topic: str) -> str:
    return await shop(topic, "when")


@workflow(name="golden_another_order")
async def another_order(topic: str) -> str:
    return await shop("why", topic)


@workflow(name="golden_another_signal")
async def another_signal(topic: str) -> str:
    return await shop(topic, "why", "yes")


@workflow(name="golden_another_result")
async def another_result(topic: str) -> str:
    return await shop(topic, "why") + "!"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (another_argument, ["event 3 (arguments)", "step look_up#2", '[["when"]]']),
        (another_order, ["event 2 (arguments)"]),
        (another_signal, ["recorded: receive 'go' as bool", "now:      receive 'yes' as bool"]),
        (another_result, ["(result)", "recorded: return"]),
    ],
)
def test_other_code_is_told_in_words_where_it_differs(files: tuple[Path, Path], code: Any, words: list[str]) -> None:
    whole, bare = files
    edited = changed(code.function)
    for replay in (lambda: replay_golden(whole, edited), lambda: replay_bare(bare, edited)):
        with pytest.raises(GoldenDiffers) as raised:
            replay()
        for text in words:
            assert text in str(raised.value)
        assert raised.value.differences
    assert RAN == []


def test_other_outcomes_than_the_recorded_ones_are_named(files: tuple[Path, Path]) -> None:
    with pytest.raises(GoldenDiffers, match="given other outcomes than those recorded") as raised:
        replay_bare(files[1], golden_shop, outcomes=FAKES | {"look_up": ["other"]})
    assert str(raised.value).splitlines()[-1] == "    look_up"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"topic": "salt"}, "started with other arguments"),
        ({"outcomes": {}}, "Say what look_up gave"),
        ({"signals": {}}, "Say what was sent"),
        ({"outcomes": FAKES | {"buy": "bought"}}, "buy is recorded as failed"),
        ({"outcomes": FAKES | {"look_up": KeyError}}, "look_up is recorded as completed"),
    ],
)
def test_what_a_bare_history_lacks_is_asked_for(files: tuple[Path, Path], more: dict[str, Any], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        replay_bare(files[1], golden_shop, **more)


def test_the_wrong_workflow_and_the_wrong_file_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(GoldenDiffers, match="is the history of a run of golden_shop"):
        replay_golden(files[0], child)
    with pytest.raises(Misuse, match="no arguments, outcomes or signals are needed"):
        replay_golden(files[0], golden_shop, "tides")
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(Misuse, match="is not a file of"):
        replay_golden(other, golden_shop)


def test_an_unfinished_run_replays_as_far_as_it_came(tmp_path: Path) -> None:
    changed(golden_shop.function)  # type: ignore[attr-defined]
    with everstep.open("memory:") as app:
        run = app.start(golden_shop, "salt", id="shop-2")
        while run.status() != "waiting":
            pass
        save_history(app, "shop-2", tmp_path / "open.json", payloads=True)
    replay_golden(tmp_path / "open.json", golden_shop)


def test_a_history_with_a_secret_step_is_saved_without_payloads_only(tmp_path: Path) -> None:
    @step(effect="read", secret=True)
    async def read_token() -> str:
        return "token-17"

    @workflow
    async def with_secret() -> int:
        return len(await read_token())

    with everstep.open("memory:") as app:
        run = app.start(with_secret, id="secret-1")
        assert run.result() == 8
        with pytest.raises(Misuse, match="secret step"):
            save_history(app, "secret-1", tmp_path / "x.json", payloads=True)
        saved = save_history(app, "secret-1", tmp_path / "x.json")
    assert "token-17" not in saved.read_text()
    read_token_name = "test_a_history_with_a_secret_step_is_saved_without_payloads_only.<locals>.read_token"
    replay_golden(saved, with_secret, outcomes={read_token_name: "token-17"})


def test_a_large_payload_is_in_a_whole_file_too(tmp_path: Path) -> None:
    @step(effect="read")
    async def large() -> str:
        return "x" * 200_000

    @workflow
    async def reads_large() -> int:
        return len(await large())

    with everstep.open("memory:") as app:
        app.run(reads_large, id="large-1")
        saved = save_history(app, "large-1", tmp_path / "x.json", payloads=True)
        bare = save_history(app, "large-1", tmp_path / "y.json")
    replay_golden(saved, reads_large)
    assert bare.stat().st_size < 3000


REPLAY = """\
import everstep, trip
from everstep.testing import replay_golden, save_history

with everstep.open() as app:
    saved = save_history(app, "trip-Venice", "golden.json", payloads=True)
replay_golden(saved, trip.trip)
print("the same")
"""


@pytest.mark.parametrize("at", ["body.after:1", "body.before:4", "body.after:5"])
def test_the_history_of_a_run_that_was_killed_and_undone_replays(tmp_path: Path, at: str) -> None:
    (tmp_path / "trip.py").write_text((ROOT / "examples" / "trip.py").read_text())
    (tmp_path / "replay.py").write_text(REPLAY)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}

    def python(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return forked.run(command, cwd=tmp_path, env={**kept, **settings}, capture_output=True, text=True, timeout=60)

    assert python("trip.py", "Venice", EVERSTEP_CRASH_AT=at).returncode == -9
    assert "Compensated: book_room, book_flight" in python("trip.py", "Venice").stdout
    done = python("replay.py")
    assert done.stdout == "the same\n", done.stderr
