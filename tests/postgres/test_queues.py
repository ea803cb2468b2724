"""Queues and named limits on PostgreSQL, where many claim at the same moment: a limit holds, whoever dies."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from everstep.stores.postgres import PostgresStore, opening
from everstep.stores.postgres.connections import PLANS_OF_WRITER
from everstep.stores.postgres.queries import statements
from everstep.stores.protocol import Accepted, Claim, Claimed, Operation
from everstep.stores.rows.queues import ChangeQueue, NoSlot, QueueRoom, TakeSlot
from tests.postgres.test_programs import Folder
from tests.postgres.test_races import ROUNDS, at_once
from tests.stores.kit import PostgresHarness
from tests.waiting import wait_until

APP = Path(__file__).parents[1] / "cli" / "queued_app.py"
RUNS = 30
WORKERS = ("w0", "w1", "w2")


@pytest.fixture
def three(postgres: PostgresHarness) -> Iterator[list[PostgresStore]]:
    """Store objects, each with connections of its own, and a worker for each."""
    for worker in WORKERS:
        postgres.enter(worker)
    made = [postgres.another() for _ in WORKERS]
    yield made
    for store in made:
        store.close()


# -- at the same moment -----------------------------------------------------------------------------------------------
def test_of_many_who_claim_runs_of_a_queue_at_once_no_more_get_one_than_there_are_slots(
    postgres: PostgresHarness, three: list[PostgresStore]
) -> None:
    for number in range(ROUNDS):
        queue = f"q{number}"
        postgres.one(ChangeQueue("queue", queue, {"concurrency": 2}, 1))
        runs = [postgres.start(f"r{number}-{part}", queue=queue).id for part in range(6)]
        batches: list[list[Operation]] = [
            [Claim(run, worker, 1, ["queued"], queued=True) for run in runs[place::3]]
            for place, worker in enumerate(WORKERS)
        ]
        verdicts = [verdict for batch in at_once(three, batches) for verdict in batch]
        assert sum(isinstance(verdict, Claimed) for verdict in verdicts) == 2
        assert [count.begun for count in postgres.store.queue_counts() if count.name == queue] == [2]


def test_of_many_who_claim_runs_of_one_key_at_once_one_gets_it(
    postgres: PostgresHarness, three: list[PostgresStore]
) -> None:
    postgres.one(ChangeQueue("queue", "mail", {"per_key": 1}, 1))
    for number in range(ROUNDS):
        tags = {"key": f"k{number}"}
        runs = [postgres.start(f"r{number}-{worker}", queue="mail", tags=tags).id for worker in WORKERS]
        claims: list[list[Operation]] = [
            [Claim(run, worker, 1, ["queued"], queued=True)] for run, worker in zip(runs, WORKERS, strict=True)
        ]
        verdicts = at_once(three, claims)
        assert sum(isinstance(verdict, Claimed) for (verdict,) in verdicts) == 1


def test_of_many_who_take_a_token_or_a_slot_at_once_no_more_get_one_than_there_are(
    postgres: PostgresHarness, three: list[PostgresStore]
) -> None:
    for number in range(ROUNDS):
        changes = {"rate": 2, "seconds": 1000.0} if number % 2 else {"concurrency": 2}
        postgres.one(ChangeQueue("limit", f"l{number}", changes, 1))
        takes: list[list[Operation]] = [
            [TakeSlot(f"l{number}", f"r{call}", call, worker, 1) for call in (place, 3 + place)]
            for place, worker in enumerate(WORKERS)
        ]
        verdicts = [verdict for batch in at_once(three, takes) for verdict in batch]
        assert sum(isinstance(verdict, Accepted) for verdict in verdicts) == 2
        assert sum(isinstance(verdict, NoSlot) for verdict in verdicts) == 4


def test_of_two_changes_of_a_new_queue_at_once_neither_is_lost(
    postgres: PostgresHarness, three: list[PostgresStore]
) -> None:
    for number in range(ROUNDS):
        changes = [{"concurrency": 5}, {"per_key": 2}, {"paused": True}]
        at_once(three, [[ChangeQueue("queue", f"q{number}", change, 1)] for change in changes])
        (row,) = [row for row in postgres.store.queues() if row.name == f"q{number}"]
        assert (row.concurrency, row.per_key, row.paused) == (5, 2, True)


def test_a_key_may_be_any_text(postgres: PostgresHarness) -> None:
    postgres.enter("w0")
    postgres.one(ChangeQueue("queue", "mail", {"per_key": 1}, 1))
    for number, key in enumerate(["a\0b", "a\0b", 'x"\\', "\x1a"]):
        postgres.start(f"r{number}", queue="mail", tags={"key": key}, created_at=number)
    assert postgres.store.queued("mail", at=1, workflows=["order"], limit=9) == ["r0", "r2", "r3"]
    assert isinstance(postgres.one(Claim("r0", "w0", 1, ["queued"], queued=True)), Claimed)
    assert not isinstance(postgres.one(Claim("r1", "w0", 1, ["queued"], queued=True)), Claimed)
    assert postgres.store.queued("mail", at=1, workflows=["order"], limit=9) == ["r2", "r3"]


# -- two releases -----------------------------------------------------------------------------------------------------
OLD_CLAIM = "UPDATE \"{schema}\".runs SET epoch = epoch + 1, owner = 'old' WHERE id = %s"
"""What a worker of the release before does when it begins a run: it knows nothing of `taken`."""


def test_a_limit_counts_what_a_worker_of_the_release_before_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_migrations = opening.migrations
    monkeypatch.setattr(opening, "migrations", lambda schema: all_migrations(schema)[:2])
    harness = PostgresHarness(tmp_path)
    old_claim = OLD_CLAIM.format(schema=harness.schema)
    harness.enter("old")
    harness.one(ChangeQueue("queue", "mail", {"concurrency": 3}, 1))
    for number in range(6):
        harness.start(f"r{number}", queue="mail", created_at=number)
    harness.server.ask(old_claim, "r0")  # before the migration
    monkeypatch.setattr(opening, "migrations", all_migrations)
    newer = harness.another()
    newer.register_worker("new", 2, "host", 10_000)
    harness.server.ask(old_claim, "r1")  # and after it

    assert newer.queue_room(at=9, worker="new") == [QueueRoom("mail", 1)]
    verdicts = newer.commit([Claim(f"r{number}", "new", 9, ["queued"], queued=True) for number in (2, 3)])
    assert [isinstance(verdict, Claimed) for verdict in verdicts] == [True, False]
    harness.server.ask(f"UPDATE \"{harness.schema}\".runs SET status = 'completed', owner = NULL WHERE id = 'r0'")
    assert isinstance(newer.commit([Claim("r4", "new", 9, ["queued"], queued=True)])[0], Claimed)
    assert newer.queue_room(at=9, worker="new") == [QueueRoom("mail", 0)]
    newer.close()
    harness.close()


# -- what it costs ----------------------------------------------------------------------------------------------------
INDEXES = {
    "names_waiting": {"runs_in_line", "runs_delayed"},
    "names_begun": {"runs_begun"},
    "fronts": {"runs_in_line", "runs_delayed"},
    "begun": {"runs_pkey"},
    "begun_by": {"runs_pkey"},
    "begun_with_key": {"runs_pkey", "tagged_run"},
    "waiting": {"runs_in_line", "tagged_run"},
    "come_due": {"runs_delayed", "tagged_run"},
}
MANY = """
    INSERT INTO "{schema}".runs SELECT 'r' || n, 'order', '', 1, 'queued', 1, 1, '\\x00', 1, NULL, NULL, 'mail', 0,
        '{{}}', NULL, '', '', 0, n, n, NULL, '', NULL, NULL, NULL FROM generate_series(1, 20000) AS n
"""


@pytest.mark.parametrize("name", INDEXES)
def test_runs_in_queues_are_found_by_their_own_indexes(postgres: PostgresHarness, name: str) -> None:
    text = statements(postgres.schema)[name]
    with psycopg.connect(
        postgres.server.uri, autocommit=True, options=f"{PLANS_OF_WRITER} -c plan_cache_mode=force_generic_plan"
    ) as connection:
        connection.execute(f"PREPARE asked AS {text}")
        count = max([int(number) for number in re.findall(r"\$(\d+)", text)], default=0)
        nothing = f"({', '.join(['NULL'] * count)})" if count else ""
        plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN EXECUTE asked{nothing}").fetchall())
    used = set(re.findall(r"(?:using|Bitmap Index Scan on) (runs_\w+|tagged_\w+)", plan))
    assert used == INDEXES[name], plan
    assert "Seq Scan on runs" not in plan


def test_whoever_looks_at_a_long_queue_reads_only_its_front(postgres: PostgresHarness) -> None:
    postgres.server.ask(MANY.format(schema=postgres.schema))
    text = statements(postgres.schema)["waiting"]
    with psycopg.connect(
        postgres.server.uri, autocommit=True, options=f"{PLANS_OF_WRITER} -c plan_cache_mode=force_generic_plan"
    ) as connection:
        connection.execute(f"PREPARE asked AS {text}")
        places = "'{0}', '{-1}', '{\"\"}', '{100,0}', '{0,-100}'"
        asked = f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) EXECUTE asked ('mail', '{{order}}', 3, '{{}}', {places})"
        plan = "\n".join(line for (line,) in connection.execute(asked).fetchall())
    found = re.findall(r"using runs_in_line on runs(?: \w+)? \(actual rows=(\d+)", plan)
    assert list(map(int, found)) == [3, 0], plan
    assert all(int(rows) <= 3 for rows in re.findall(r"Sort \(actual rows=(\d+)", plan)), plan
    assert postgres.store.queue_room(at=1, worker="w0") == [QueueRoom("mail", 1_000_000)]


# -- real processes ---------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, url: str) -> Iterator[Folder]:
    made = Folder(tmp_path, url)
    shutil.copy(APP, made.path / "queued_app.py")
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def effects(folder: Folder) -> list[str]:
    path = folder.path / "effects.txt"
    return sorted(path.read_text().splitlines(), key=lambda line: int(line.split()[3])) if path.exists() else []


def most_at_once(folder: Folder) -> int:
    """Return how many were at work at once at most. One that was cut off is, until it goes on."""
    at_work: set[str] = set()
    most = 0
    for line in effects(folder):
        sign, name, *_ = line.split()
        at_work = at_work | {name} if sign == "+" else at_work - {name}
        most = max(most, len(at_work))
    return most


def fill(folder: Folder, code: str) -> None:
    """Say something about queues and start runs, from a process that drives none of them."""
    whole = f"import everstep, queued_app\nwith everstep.open(queues=['none']) as app:\n{code}"
    folder.do("-c", whole)


def wait_until_completed(folder: Folder, count: int) -> None:
    store = PostgresStore(folder.url)
    wait_until(lambda: store.counts().get("completed", 0) == count)
    store.close()


def test_a_limit_of_a_queue_holds_over_workers_that_are_killed(folder: Folder) -> None:
    fill(
        folder,
        f"""
    app.queue("mail", concurrency=3, per_worker=2)
    for number in range({RUNS}):
        app.start(queued_app.letter, str(number), id=f"l-{{number}}")
""",
    )
    assert effects(folder) == [], "whoever started them drives none of them"
    words = ("-m", "everstep", "worker", "queued_app.py")
    workers = [folder.begin(*words, BODY_SECONDS="0.2") for _ in range(3)]
    killed: set[str] = set()
    while len(killed) < 2:  # a run whose worker dies three times in a row would be held
        wait_until(lambda: len(effects(folder)) > 12 * (len(killed) + 1))
        busy = next(pid for sign, _, pid, _ in map(str.split, reversed(effects(folder))) if sign == "+")
        next(one for one in workers if str(one.pid) == busy).kill()
        killed.add(busy)
        workers.append(folder.begin(*words, BODY_SECONDS="0.2"))
    wait_until_completed(folder, RUNS)
    assert most_at_once(folder) == 3
    begun, ended = ([line for line in effects(folder) if line.startswith(sign)] for sign in "+-")
    assert len(begun) > len(ended) >= RUNS, "bodies were cut off"


def test_a_named_limit_of_steps_holds_over_workers(folder: Folder) -> None:
    fill(
        folder,
        """
    app.limit("api", concurrency=2)
    app.queue("ask", concurrency=9)
    for number in range(6):
        app.start(queued_app.questions, f"n{number}", 4, id=f"a-{number}", queue="ask")
""",
    )
    words = ("-m", "everstep", "worker", "queued_app.py", "--concurrency", "2")
    for _ in range(3):
        folder.begin(*words, BODY_SECONDS="0.1")
    wait_until_completed(folder, 6)
    assert most_at_once(folder) == 2
    begun = [line.split()[1] for line in effects(folder) if line.startswith("+")]
    assert len(begun) == len({*begun}) == 24, "each step once"
