"""Graphs in real processes, killed at the point that other frameworks get wrong, and at the boundaries around it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from tests.crash.figures import FIGURES
from tests.graphs import kit
from tests.graphs.kit import KILLED, Expected, Trial

POINTS = {
    "skipping": ("c", ["c"], "a resume at C runs only C"),
    "skipped": ("c", ["c"], "the same, when B is skipped"),
    "joining": ("r", ["r", "j"], "slow R is killed: R, then the join once with both"),
    "queued": ("l", ["l", "r", "j"], "R is only queued: it is not forgotten"),
    "counting": ("two", ["two", "three"], "usage and budgets go on"),
    "routing": ("left", ["left", "slow", "end"], "the recorded decision counts"),
    "failing": ("after", ["after"], "a failure that was overcome stays in the history"),
    "renaming": ("draft", ["draft", "check"], "goes on with the same definition"),
    "looping": ("lap#2", ["lap#2", "check#2", "lap#3", "check#3"], "lap 2 goes on in lap 2"),
    "nesting": ("second", ["second", "after"], "inner progress is kept"),
    "approving": ("act", [], "what a person approved is done once"),
    "fanning": ("look#3", ["look#3", "look#4", "sum"], "items that are done stay done"),
}
"""For each case: where it is killed, what runs after that, and what it shows."""
BESIDE = {"fanning": ("look#2",)}
"""What may have been under way beside it, and is done again then: two items at a time."""
AT_EACH_PUSH = ("joining", "looping", "nesting", "approving")
"""The cases that are killed at other boundaries too; the others only in the long tests."""
TABLE: dict[str, list[str]] = {}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Expected]]:
    """What undisturbed runs do, by case; each is made when it is first asked for."""
    place = tmp_path_factory.mktemp("undisturbed")

    class Found(dict[str, Expected]):
        def __missing__(self, case: str) -> Expected:
            self[case] = kit.undisturbed(case, place / case)
            return self[case]

    yield Found()
    if TABLE:
        FIGURES.lines.append("graphs, killed" + " " * 46 + "at its point   at boundaries   done again")
        for case, (_, _, shows) in POINTS.items():
            if case in TABLE:
                FIGURES.lines.append(f"{shows:<58}  " + "".join(f"{cell:<16}" for cell in TABLE[case]))


@pytest.mark.parametrize("case", POINTS)
def test_a_graph_killed_at_its_point_goes_on_there(case: str, expected: dict[str, Expected], tmp_path: Path) -> None:
    visit, rest, _ = POINTS[case]
    trial = Trial(case, tmp_path)
    problems = kit.killed_and_resumed(trial, expected[case], KILL_IN=visit)
    assert not problems, problems
    begun = trial.visits()
    place = begun.index(visit)
    done_before = begun[:place]
    after = begun[place + 1 :]
    again = [visit for visit in BESIDE.get(case, ()) if visit in after]
    assert sorted(after) == sorted([*rest, *again]), after
    assert not set(done_before) & set(rest)
    TABLE.setdefault(case, ["–", "–", "0"])[0] = "as undisturbed"


@pytest.mark.parametrize("case", AT_EACH_PUSH)
def test_a_graph_killed_at_other_boundaries_ends_as_if_undisturbed(
    case: str, expected: dict[str, Expected], tmp_path: Path
) -> None:
    kills, problems = kit.kill_at_boundaries(case, tmp_path, expected[case], most=1)
    assert not problems, "\n".join(problems)
    TABLE.setdefault(case, ["–", "–", "0"])[1] = f"{kills}/{kills}"


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", POINTS)
def test_a_graph_killed_at_every_boundary_ends_as_if_undisturbed(
    case: str, expected: dict[str, Expected], tmp_path: Path
) -> None:
    kills, problems = kit.kill_at_boundaries(case, tmp_path, expected[case], most=1000)
    assert not problems, "\n".join(problems)
    TABLE.setdefault(case, ["–", "–", "0"])[1] = f"{kills}/{kills}"


def test_routing_after_a_crash_takes_the_recorded_way_although_its_condition_says_another(
    expected: dict[str, Expected], tmp_path: Path
) -> None:
    trial = Trial("routing", tmp_path)
    assert trial.live(KILL_IN="left") == KILLED
    trial.settings["WAY"] = "right"
    assert trial.live() == 0, trial.output
    assert sorted(trial.visits()) == ["a", "end", "left", "left", "slow"]
    assert "checkpoint_taken" not in [event.kind for event in trial.histories()["g"]][5:-6]  # only the moves tell it
    assert trial.result() == expected["routing"].result


@pytest.mark.parametrize("case", ["reading", "counting"])
def test_no_node_begins_before_the_move_that_leads_there_is_durable_not_even_a_read(case: str, tmp_path: Path) -> None:
    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        trial = Trial(case, folder)
        assert trial.live(EVERSTEP_CRASH_AT=f"body.before:{count}") == KILLED
        _, let_begin = trial.told()
        assert len(let_begin) >= count


def test_what_was_used_before_a_crash_counts_and_time_goes_on(expected: dict[str, Expected], tmp_path: Path) -> None:
    trial = Trial("counting", tmp_path)
    assert trial.live(KILL_IN="two") == KILLED
    assert trial.live() == 0, trial.output
    with everstep.open(str(tmp_path / "everstep.db")) as app:
        (row,) = app.list()
        used = json.loads(row.budget or b"{}")["used"]
    # Three answers of 0.25 each, and the estimate (0.5) of the attempt that was cut off: a crash refunds nothing.
    assert used == {"microdollars": 1_250_000, "tokens": 220, "steps": 4}
    assert trial.visits() == ["one", "two", "two", "three"]


def test_a_failure_that_was_overcome_is_still_in_the_history_of_the_completed_run(tmp_path: Path) -> None:
    trial = Trial("failing", tmp_path)
    assert trial.live(KILL_IN="after") == KILLED
    assert trial.live() == 0, trial.output
    kinds = [event.kind for event in trial.histories()["g"]]
    assert kinds.count("attempt_failed") == 1
    assert kinds[-1] == "run_completed"
    assert trial.visits() == ["shaky", "shaky", "after", "after"]


def test_approved_work_that_was_cut_off_is_done_once_and_nobody_is_asked_again(tmp_path: Path) -> None:
    trial = Trial("approving", tmp_path)
    assert trial.live(KILL_IN="act") == KILLED
    assert trial.live() == 0, trial.output
    assert len((tmp_path / "done.txt").read_text().splitlines()) == 1
    kinds = [event.kind for event in trial.histories()["g"]]
    assert kinds.count("approval_asked") == 1
    assert kinds.count("signal_received") == 1


def test_a_completed_run_that_is_called_again_by_another_process_does_no_work(
    expected: dict[str, Expected], tmp_path: Path
) -> None:
    trial = Trial("skipping", tmp_path)
    assert trial.live(EVERSTEP_CRASH_AT="run.ended:1") == KILLED
    before = trial.visits()
    for _ in range(2):
        assert trial.live() == 0, trial.output
        assert trial.result() == expected["skipping"].result
    assert trial.visits() == before == ["a", "b", "c"]


def test_a_renamed_node_holds_the_run_clearly_and_a_migration_lets_it_go_on(tmp_path: Path) -> None:
    trial = Trial("renaming", tmp_path)
    assert trial.live(KILL_IN="draft") == KILLED
    assert trial.live(SECOND="write") != 0
    assert trial.visits() == ["load", "draft"]  # nothing was done, and nothing is completed
    with everstep.open(str(tmp_path / "everstep.db")) as app:
        assert app.get("g").status() == "held"
        (hold,) = app.holds()
        assert hold.reason == "diverged"
        said = json.dumps(json.loads(hold.report), ensure_ascii=False).replace("\\", "")
        assert "draft is gone; write is new" in said
        assert 'graph.migrate("a name for it", {"draft": "write"})' in said
    assert trial.live(SECOND="write", MIGRATED="1") == 0, trial.output
    assert trial.visits() == ["load", "draft", "draft", "check"]
    assert trial.result()["words"] == ["load", "write", "check"]


def test_a_renamed_node_of_a_run_that_was_not_told_goes_on_when_the_old_code_is_back(tmp_path: Path) -> None:
    trial = Trial("renaming", tmp_path)
    assert trial.live(KILL_IN="draft") == KILLED
    assert trial.live(SECOND="write") != 0
    assert trial.live() == 0, trial.output
    assert trial.visits() == ["load", "draft", "draft", "check"]
