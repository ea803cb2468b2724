"""`everstep export`, `import`, `gc`, `top` and `ls --search`, with real kills."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Folder, stop_between_transactions
from tests.forked import Program
from tests.waiting import open_sqlite

APP = """
import asyncio
from pathlib import Path
import everstep
from everstep import step, workflow

@step(effect="once")
async def pay(amount: int) -> str:
    with Path("paid.txt").open("a") as file:
        file.write(f"{amount} {everstep.key()}\\n")
    return "x" * 3000

@step(effect="read")
async def look(number: int) -> int:
    return number

@workflow
async def short(number: int) -> int:
    return await look(number)

@workflow
async def long(number: int) -> int:
    for one in range(number):
        await look(one)
    return number

@step(effect="repeat", key="report:{number}")
async def report(number: int) -> int:
    return number

@workflow
async def shared(number: int) -> int:
    return await report(number)

@everstep.transaction(everstep.STORE)
async def count(connection, name: str) -> int:
    connection.execute("CREATE TABLE IF NOT EXISTS counted (name TEXT)")
    connection.execute("INSERT INTO counted VALUES (?)", (name,))
    return len(connection.execute("SELECT name FROM counted").fetchall())

@workflow
async def counter(name: str) -> int:
    return await count(name)

@workflow
async def order(amount: int) -> str:
    await pay(amount)
    child = await short(amount)
    approved = await everstep.receive("approved", bool)
    await pay(amount + 1)
    return f"{child} {approved}"
"""


@pytest.fixture
def shop(folder: Folder) -> Folder:
    (folder.path / "app.py").write_text(APP)
    return folder


def leave_waiting(shop: Folder, run: str, *more: str) -> None:
    """Start an order, and kill its process when its child has ended and it waits for its signal."""
    process = shop.begin("run", "app.py:order", "5", *more, "--id", run)
    shop.wait_for(lambda: shop.run_row(f"{run}.2")[0] == "completed" and shop.run_row(run)[0] == "waiting")
    shop.kill(process)


def ids(folder: Folder, *words: str) -> list[str]:
    return [row["id"] for row in folder.json("ls", *words)]


def is_stopped(process: Program) -> bool:
    """Tell whether a process has stopped itself."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def counted(folder: Folder) -> list[str]:
    """Return what atomic steps have written to the store."""
    connection = open_sqlite(folder.path / "everstep.db")
    names = [name for (name,) in connection.execute("SELECT name FROM counted ORDER BY name")]
    connection.close()
    return names


def killed_at(folder: Folder, point: str, *words: str) -> bool:
    """Run a command in a process that is killed at a crash point; False if it came to its end before."""
    done = folder.finish(folder.begin(*words, env={"EVERSTEP_CRASH_AT": point}))
    assert done.status in (0, -signal.SIGKILL), done.err
    return done.status != 0


def is_sound(folder: Folder, url: str = "everstep.db") -> bool:
    return bool(folder.everstep("verify", "--all", "--url", url).status == 0)


# -- moving -------------------------------------------------------------------------------------------------------
def test_an_unfinished_run_goes_on_in_another_store_and_nothing_is_done_twice(shop: Folder) -> None:
    leave_waiting(shop, "o-1", "--tag", "team=blue")
    refused = shop.everstep("export", "o-1", "o.jsonl")
    assert refused.status == 2
    assert "--hold" in refused.err
    assert not (shop.path / "o.jsonl").exists()
    done = shop.everstep("export", "o-1", "o.jsonl", "--hold")
    assert (done.status, "HELD" in done.out) == (0, True), done.err
    assert shop.run_row("o-1") == ("held", None)
    assert shop.everstep("import", "o.jsonl", "--url", "two.db").status == 0
    assert ids(shop, "--url", "two.db", "--tag", "team=blue") == ["o-1"]
    assert is_sound(shop, "two.db")
    shop.everstep("signal", "o-1", "approved", "true", "--url", "two.db")
    ended = shop.everstep("run", "app.py:order", "5", "--id", "o-1", "--url", "two.db")
    assert "5 True" in ended.out, ended.err
    paid = (shop.path / "paid.txt").read_text().splitlines()
    assert [line.split()[0] for line in paid] == ["5", "6"]
    assert shop.run_row("o-1")[0] == "held"
    assert is_sound(shop)
    assert is_sound(shop, "two.db")


def test_what_was_left_to_go_on_is_only_taken_as_a_copy(shop: Folder) -> None:
    leave_waiting(shop, "o-1")
    done = shop.everstep("export", "--all", "o.jsonl", "--leave")
    assert "CONTINUE HERE" in done.out
    assert shop.run_row("o-1")[0] == "waiting"
    refused = shop.everstep("import", "o.jsonl", "--url", "two.db")
    assert (refused.status, "twice" in refused.err) == (2, True)
    assert ids(shop, "--url", "two.db") == []
    assert shop.everstep("import", "o.jsonl", "--url", "two.db", "--copies").status == 0
    assert set(ids(shop, "--url", "two.db")) == {"o-1", *ids(shop)}


def test_a_run_that_a_living_process_drives_is_not_exported(shop: Folder) -> None:
    process = shop.begin("run", "app.py:order", "5", "--id", "o-1")
    shop.wait_for(lambda: shop.run_row("o-1")[0] == "waiting")
    refused = shop.everstep("export", "o-1", "o.jsonl", "--hold")
    assert (refused.status, "alive" in refused.err) == (2, True), refused.err
    assert not (shop.path / "o.jsonl").exists()
    shop.kill(process)


def test_what_is_there_is_never_written_over(shop: Folder) -> None:
    shop.everstep("run", "app.py:short", "1", "--id", "a")
    assert shop.everstep("export", "a", "f.jsonl").status == 0
    before = (shop.path / "f.jsonl").read_bytes()
    assert shop.everstep("export", "a", "f.jsonl").status == 2
    assert (shop.path / "f.jsonl").read_bytes() == before
    refused = shop.everstep("import", "f.jsonl")
    assert (refused.status, "already" in refused.err) == (2, True)
    assert shop.json("import", "f.jsonl", "--skip-existing")["skipped"] == ["a"]


def test_a_file_with_any_byte_changed_is_refused_whole(shop: Folder) -> None:
    shop.everstep("run", "app.py:order", "1", "--id", "a", env={"EVERSTEP_CRASH_AT": "body.after:1"})
    shop.everstep("run", "app.py:short", "1", "--id", "b")
    assert shop.everstep("export", "--all", "f.jsonl", "--hold").status == 0
    whole = (shop.path / "f.jsonl").read_bytes()
    size = len(whole)
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(3, size, size // 25)]
    changed += [whole[: size // 2], whole[: whole.rindex(b"\n", 0, -1) + 1], b"", b"\n" * 5]
    for number, content in enumerate(changed):
        (shop.path / "bad.jsonl").write_bytes(content)
        done = shop.everstep("import", "bad.jsonl", "--url", f"t{number}.db")
        assert done.status != 0, number
        assert not (shop.path / f"t{number}.db").exists(), number  # not even an empty store


def test_a_history_that_was_changed_with_its_digest_is_refused(shop: Folder) -> None:
    """Whoever makes the file's own digest anew still does not get past the chain."""
    from hashlib import blake2b

    shop.everstep("run", "app.py:short", "1", "--id", "a")
    shop.everstep("export", "a", "f.jsonl")
    lines = (shop.path / "f.jsonl").read_bytes().splitlines(keepends=True)[:-1]
    place = next(n for n, line in enumerate(lines) if b'"run_completed"' in line)
    kind, (generation, event) = json.loads(lines[place])
    event[3] += 1
    lines[place] = json.dumps([kind, [generation, event]]).encode() + b"\n"
    digest = blake2b(b"".join(lines), digest_size=32, person=b"everstep/file").hexdigest()
    lines.append(json.dumps(["end", {"lines": len(lines), "digest": digest}]).encode() + b"\n")
    (shop.path / "bad.jsonl").write_bytes(b"".join(lines))
    refused = shop.everstep("import", "bad.jsonl", "--url", "two.db")
    assert refused.status != 0
    assert "digest" in refused.err
    assert ids(shop, "--url", "two.db") == []


@pytest.mark.parametrize("point", ["store.commit.before", "store.commit.written", "store.commit.after"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_import_killed_anywhere_is_finished_by_saying_it_again(shop: Folder, point: str, count: int) -> None:
    for run in ("a", "b", "c"):
        shop.everstep("run", "app.py:short", "1", "--id", run)
    shop.everstep("export", "--all", "f.jsonl")
    assert killed_at(shop, f"{point}:{count}", "import", "f.jsonl", "--url", "two.db")
    assert is_sound(shop, "two.db")
    assert shop.everstep("import", "f.jsonl", "--url", "two.db", "--skip-existing").status == 0
    assert ids(shop, "--url", "two.db") == ["c", "b", "a"]
    assert is_sound(shop, "two.db")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", ["store.commit.before", "store.commit.written", "store.commit.after"])
def test_an_export_killed_anywhere_leaves_no_file_of_a_run_that_goes_on(shop: Folder, point: str, count: int) -> None:
    leave_waiting(shop, "o-1")
    assert killed_at(shop, f"{point}:{count}", "export", "o-1", "o.jsonl", "--hold")
    assert not (shop.path / "o.jsonl").exists()
    assert is_sound(shop)
    if shop.run_row("o-1")[0] == "held":  # nothing is lost: it goes on here if a person says so
        (hold,) = shop.json("holds")
        assert shop.everstep("resolve", "o-1", "--retry", "--hold", hold["id"]).status == 0
    assert shop.everstep("export", "o-1", "o.jsonl", "--hold").status == 0
    assert shop.run_row("o-1")[0] == "held"


def test_a_stopped_worker_of_the_old_store_does_nothing_more_about_a_run_that_was_moved(shop: Folder) -> None:
    """It comes back to life, gets the signal that it waited for, and is fenced."""
    shop.everstep("run", "app.py:order", "5", "--id", "o-1", env={"EVERSTEP_CRASH_AT": "body.after:1"})
    old = shop.begin("worker", "app.py", "--lease", "1")
    shop.wait_for(lambda: shop.run_row("o-1")[0] == "held")
    assert shop.everstep("resolve", "o-1", "--done", '"x"').status == 0
    shop.wait_for(lambda: shop.run_row("o-1")[0] == "waiting")
    stop_between_transactions(shop, old)
    try:
        shop.wait_for(lambda: shop.everstep("export", "o-1", "o.jsonl", "--hold").status == 0)  # when its lease is over
        assert shop.everstep("import", "o.jsonl", "--url", "two.db").status == 0
        new = shop.begin("worker", "app.py", "--url", "two.db")
        shop.everstep("signal", "o-1", "approved", "true")
        shop.everstep("signal", "o-1", "approved", "true", "--url", "two.db")
    finally:
        old.send_signal(signal.SIGCONT)
    shop.wait_for(lambda: shop.json("show", "o-1", "--url", "two.db")["status"] == "completed")
    again = shop.begin("worker", "app.py")  # nor does a new one
    time.sleep(1.5)
    for process in (old, new, again):
        process.send_signal(signal.SIGTERM)
        assert shop.finish(process).status == 0
    assert [line.split()[0] for line in (shop.path / "paid.txt").read_text().splitlines()] == ["5", "6"]
    assert shop.run_row("o-1")[0] == "held"
    assert is_sound(shop)
    assert is_sound(shop, "two.db")


def test_a_moved_run_goes_on_in_the_old_store_only_if_its_hold_is_named(shop: Folder) -> None:
    for run in ("o-1", "o-2"):
        leave_waiting(shop, run)
    assert shop.everstep("export", "o-1", "o.jsonl", "--hold").status == 0
    assert shop.everstep("hold", "o-2").status == 0
    refused = shop.everstep("resolve", "o-1", "--retry")
    assert (refused.status, "o.jsonl" in refused.err) == (2, True), refused.err
    for words in (("rollback", "o-1", "--allow-uncompensated"), ("resolve", "o-1", "--rollback")):
        assert shop.everstep(*words).status == 2
    many = shop.json("resolve", "--reason", "asked", "--retry", "--yes")
    assert (many["resolved"], [one["run"] for one in many["refused"]]) == (["o-2"], ["o-1"])
    assert [shop.run_row(run)[0] for run in ("o-1", "o-2")] == ["held", "queued"]
    (hold,) = shop.json("holds")
    assert shop.everstep("resolve", "o-1", "--retry", "--hold", hold["id"]).status == 0
    assert shop.run_row("o-1")[0] != "held"


def test_a_run_with_a_shared_key_under_way_is_not_exported_and_not_held(shop: Folder) -> None:
    shop.everstep("run", "app.py:shared", "5", "--id", "k-1", env={"EVERSTEP_CRASH_AT": "body.after:1"})
    refused = shop.everstep("export", "k-1", "k.jsonl", "--hold")
    assert (refused.status, "under way" in refused.err) == (2, True), refused.err
    assert not (shop.path / "k.jsonl").exists()
    assert shop.run_row("k-1")[0] != "held"
    assert shop.everstep("run", "app.py:shared", "5", "--id", "k-1").status == 0


# -- deleting -----------------------------------------------------------------------------------------------------
def test_gc_takes_families_that_have_ended_and_nothing_else(shop: Folder) -> None:
    leave_waiting(shop, "o-1")
    for run in ("a", "b"):
        shop.everstep("run", "app.py:short", "1", "--id", run)
    before = set(ids(shop))
    assert shop.json("gc", "--older-than", "1h")["deleted"] == []
    assert set(shop.json("gc", "--older-than", "0s", "--dry-run")["deleted"]) == {"a", "b"}
    assert set(ids(shop)) == before
    assert shop.json("gc", "--older-than", "0s", "--keep", "1")["deleted"] == ["a"]
    assert shop.json("gc", "--older-than", "0s")["deleted"] == ["b"]
    assert shop.everstep("gc").status == 2
    assert set(ids(shop)) == before - {"a", "b"}  # the child of a run that waits has ended, and stays
    assert len(ids(shop)) == 2
    assert is_sound(shop)


@pytest.mark.parametrize("point", ["store.commit.before", "store.commit.written", "store.commit.after"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_deletion_killed_anywhere_is_ended_by_the_next(shop: Folder, point: str, count: int) -> None:
    shop.everstep("run", "app.py:long", "250", "--id", "l-1")
    shop.everstep("run", "app.py:short", "1", "--id", "s-1")
    assert killed_at(shop, f"{point}:{count}", "gc", "--older-than", "0s")
    assert is_sound(shop)  # also with a run of which a part is gone
    assert shop.everstep("gc", "--older-than", "0s").status == 0
    assert ids(shop) == []
    connection = open_sqlite(shop.path / "everstep.db")
    for table in ("runs", "events", "payloads", "deletions", "signals", "holds"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
    connection.close()


def test_the_marker_that_tells_an_unfinished_run_what_happened_stays(shop: Folder) -> None:
    """Its step is committed, and only the marker knows."""
    assert shop.everstep("run", "app.py:counter", '"ann"', "--id", "old").status == 0
    crash = {"EVERSTEP_CRASH_AT": "transaction.after:1"}
    killed = shop.everstep("run", "app.py:counter", '"bob"', "--id", "new", env=crash)
    assert killed.status == -signal.SIGKILL
    assert shop.json("gc", "--older-than", "0s")["deleted"] == ["old"]
    ended = shop.everstep("run", "app.py:counter", '"bob"', "--id", "new")
    assert ended.status == 0, ended.err
    assert counted(shop) == ["ann", "bob"]


def test_a_run_that_was_taken_over_stays_while_who_lost_it_may_wake_up(shop: Folder) -> None:
    """It may be in the middle of an atomic step, and only the run's marker tells it that it comes too late."""
    late = shop.begin(
        "run", "app.py:counter", '"ann"', "--id", "c-1", env={"EVERSTEP_CRASH_AT": "transaction.before:1:stop"}
    )
    shop.wait_for(lambda: is_stopped(late))
    shop.change("UPDATE workers SET lease_until = 0")
    worker = shop.begin("worker", "app.py")
    shop.wait_for(lambda: shop.run_row("c-1")[0] == "completed")
    done = shop.json("gc", "--older-than", "0s")
    assert (done["deleted"], done["left"]) == ([], 1)
    late.send_signal(signal.SIGCONT)
    shop.finish(late)
    assert counted(shop) == ["ann"]
    assert shop.json("gc", "--older-than", "0s")["deleted"] == ["c-1"]
    worker.send_signal(signal.SIGTERM)
    assert shop.finish(worker).status == 0


@pytest.mark.parametrize("count", [2, 4, 6])
def test_a_worker_keeps_to_its_retention_and_one_killed_meanwhile_leaves_the_rest_to_the_next(
    shop: Folder, count: int
) -> None:
    leave_waiting(shop, "o-1")
    for run in ("l-1", "l-2"):
        shop.everstep("run", "app.py:long", "250", "--id", run)
    before = set(ids(shop))
    words = ("worker", "app.py", "--retention", "0s")
    killed = shop.begin(*words, env={"EVERSTEP_CRASH_AT": f"store.commit.written:{count}"})
    assert shop.finish(killed).status == -signal.SIGKILL
    assert is_sound(shop)
    process = shop.begin(*words)
    shop.wait_for(lambda: len(ids(shop)) == 2)
    process.send_signal(signal.SIGTERM)
    assert shop.finish(process).status == 0
    assert set(ids(shop)) == before - {"l-1", "l-2"}
    assert is_sound(shop)


# -- looking ------------------------------------------------------------------------------------------------------
def test_top_and_ls_show_what_is_there(shop: Folder, tmp_path: Path) -> None:
    leave_waiting(shop, "o-1", "--tag", "team=blue")
    shop.everstep("hold", "o-1")
    facts: Any = shop.json("top")
    assert facts["runs"]["completed"] == 1
    assert facts["workers"] == [] or all(one["pid"] for one in facts["workers"])
    assert [one["run"] for one in facts["holds"]] == ["o-1"]
    shown = shop.everstep("top", "--once").out
    assert "o-1" in shown
    assert "held" in shown
    assert ids(shop, "--search", "TEAM=blue") == ["o-1"]
    assert ids(shop, "--tag", "team=red") == []
    assert ids(shop, "--after", ids(shop)[0]) == ids(shop)[1:]
