"""Full disks, failing disks, unknown commits and locked files."""

import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from everstep.errors import StoreBusy, StoreError, StoreFailed, StoreFull, StoreReadOnly, StoreUnusable
from everstep.stores.brief import Busy
from everstep.stores.protocol import (
    Accepted,
    Append,
    Claim,
    Claimed,
    Existing,
    Failed,
    HoldRow,
    NewRun,
    NotPosted,
    Operation,
    Post,
    Posted,
    Refused,
    Release,
    RestartRun,
    StartRun,
)
from everstep.stores.rows.keys import ForgetKeys, KeyChanges, KeyClaim, KeyEnd, KeyWait, SettleKey
from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow
from everstep.stores.sqlite import SqliteStore, connections
from tests.stores.kit import SqliteHarness, append_to, claimed, new_run
from tests.waiting import open_raw

# -- unknown commits ------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """Something that nobody expects."""


def at_ends_of_commits(
    sqlite: SqliteHarness, patch: pytest.MonkeyPatch, act: Callable[[Callable[[], None]], None]
) -> None:
    """Do something else where a commit is made."""
    end = sqlite.sqlite._writer._end
    patch.setattr(sqlite.sqlite._writer, "_end", lambda: act(end))


def break_commit(sqlite: SqliteHarness, patch: pytest.MonkeyPatch, *, after: bool, times: int = 1) -> None:
    """Let the next commits fail: before they are done, or after, so that only the answer is lost."""
    left = times

    def fail(end: Callable[[], None]) -> None:
        nonlocal left
        if left == 0:
            end()
            return
        left -= 1
        if after:
            end()
        raise Trouble

    at_ends_of_commits(sqlite, patch, fail)


def prepared(sqlite: SqliteHarness) -> dict[str, Operation]:
    """Return one operation of each kind that will be accepted."""
    for id in ("append", "end", "empty", "post", "claim", "release", "restart", "extra", "keyed", "ended"):
        sqlite.start(id, status="running", owner="me" if id == "release" else None)
    sqlite.end("restart")
    sqlite.one(Post("extra", "signal"))
    claims = [KeyClaim(key, n, 2, "pay", "d", "once") for n, key in enumerate(["k", "l", "m"])]
    sqlite.one(append_to(sqlite.row("ended"), keys=KeyChanges(claims)))
    sqlite.one(append_to(sqlite.row("ended"), keys=KeyChanges(ends=[KeyEnd(claims[2], b"1", "h")])))
    sqlite.one(append_to(sqlite.row("post"), keys=KeyChanges(waits=[KeyWait("k", 1)])))
    sqlite.end("ended", "cancelled")
    taken = KeyChanges([KeyClaim("n", 1, 2, "pay", "d", "once")], waits=[KeyWait("l", 2), KeyWait("m", 3)])
    starts = [new_run("child", follower="extra", follower_call=1)]
    sqlite.start("held", status="running")
    note = NotificationRow(id="n", hold="h", run="held", target="t")
    sqlite.one(append_to(sqlite.row("held"), hold=HoldRow(id="h", run="held", reason="asked"), notifications=[note]))
    sqlite.start("hold", status="running")
    told = msgspec.structs.replace(note, id="m", hold="i", run="hold")
    hold = HoldRow(id="i", run="hold", reason="asked")
    return {
        "append": append_to(sqlite.row("append"), 2),
        "end": append_to(sqlite.row("end"), status="completed"),
        "empty": append_to(sqlite.row("empty"), 0, status="waiting"),
        "extra": append_to(sqlite.row("extra"), 2, consumed=[1], posts=[Post("post", "cancel")], starts=starts),
        "start": StartRun(new_run("start")),
        "post": Post("post", "signal", "n", "", b"\x00"),
        "claim": Claim("claim", "me", 1, ["running"]),
        "release": Release("release", 0, "queued"),
        "restart": RestartRun(0, new_run("restart", generation=2)),
        "keyed": append_to(sqlite.row("keyed"), keys=taken),
        "settle": SettleKey("k", 70, b"1", "h", "ann"),
        "free": SettleKey("l", 71, by="ann"),
        "hold": append_to(sqlite.row("hold"), status="held", hold=hold, notifications=[told]),
        "take": TakeNotification("n", 1, "me", 10, 50),
        "schedule": ChangeSchedule("s", 0, ScheduleRow(name="s", workflow="order", revision=7), [new_run("tick")]),
    }


def tables(sqlite: SqliteHarness) -> dict[str, list[Any]]:
    names = ["runs", "events", "payloads", "signals", "followers", "holds", "effects", "waiters", "notifications"]
    names += ["schedules"]
    connection = sqlite.sqlite._reader._connection
    return {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2, 3").fetchall() for name in names}


KINDS = ["append", "end", "empty", "extra", "start", "post", "claim", "release", "restart", "keyed", "settle", "free"]
KINDS += ["hold", "take", "schedule"]


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("kinds", [*[[kind] for kind in KINDS], KINDS], ids=[*KINDS, "all"])
def test_an_unknown_commit_is_read_back_and_never_done_twice(
    sqlite: SqliteHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str], after: bool
) -> None:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    undisturbed = SqliteHarness(folder)
    operations = prepared(undisturbed)
    wanted = undisturbed.do(*[operations[kind] for kind in kinds])
    operations = prepared(sqlite)
    break_commit(sqlite, monkeypatch, after=after)
    assert sqlite.do(*[operations[kind] for kind in kinds]) == wanted
    assert tables(sqlite) == tables(undisturbed)
    undisturbed.close()


def test_forgetting_again_after_an_unknown_commit_forgets_nothing_more(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(sqlite)
    break_commit(sqlite, monkeypatch, after=True)
    sqlite.one(ForgetKeys(99))
    assert [row[0] for row in tables(sqlite)["effects"]] == ["k", "l"], "what is under way stays"


def test_what_was_so_before_does_not_tell_that_a_commit_was_done(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = sqlite.start("a", status="running")
    sqlite.start("b", status="queued")
    break_commit(sqlite, monkeypatch, after=False)
    sqlite.do(append_to(row, 2), Release("b", 0, "queued"))
    assert sqlite.row("a").head_seq == row.head_seq + 2


def test_a_notification_that_was_settled_by_an_unknown_commit_stays_settled(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite.one(prepared(sqlite)["take"])
    break_commit(sqlite, monkeypatch, after=True)
    sqlite.one(SettleNotification("n", 1, "pending", 70, "HTTP 500"))
    (note,) = [row for row in sqlite.store.notifications() if row.id == "n"]
    assert (note.state, note.attempts, note.next_at, note.last_error) == ("pending", 1, 70, "HTTP 500")


def test_what_keeps_failing_has_a_verdict_and_changes_nothing(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = prepared(sqlite)
    before = tables(sqlite)
    with monkeypatch.context() as patch:
        break_commit(sqlite, patch, after=False, times=99)
        verdicts = sqlite.do(*operations.values())
    assert [type(verdict) for verdict in verdicts] == [Failed] * len(operations)
    assert tables(sqlite) == before
    assert not any(isinstance(verdict, Failed) for verdict in sqlite.do(*operations.values()))


def test_refusals_stand_whatever_happened_to_the_commit(sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    row = sqlite.start("a", status="running")
    there = sqlite.start("b")
    row.epoch = 9
    break_commit(sqlite, monkeypatch, after=True)
    verdicts = sqlite.do(append_to(row), StartRun(new_run("b")), Post("none", "cancel"))
    assert verdicts == [Refused("fenced"), Existing(there), NotPosted(None)]


def surrogate(append: Append) -> None:
    append.row.current_step = "\ud800"


def wrong_type(append: Append) -> None:
    append.events = [append.events[0]._replace(body="text")]  # type: ignore[arg-type]


def too_big(append: Append) -> None:
    append.row.wake_at = 1 << 70


def bad_child(append: Append) -> None:
    append.starts = [new_run("fine"), NewRun(new_run("x").row, new_run("y").event), new_run("z", workflow="\udfff")]


@pytest.mark.parametrize("spoil", [surrogate, wrong_type, too_big, bad_child])
def test_a_payload_that_cannot_be_stored_fails_its_unit_only(
    sqlite: SqliteHarness, spoil: Callable[[Append], None]
) -> None:
    rows = [sqlite.start(f"r{n}", status="running") for n in range(7)]
    appends = [append_to(row, posts=[Post(row.id, "signal")] if row.id == "r5" else []) for row in rows]
    spoil(appends[3])
    verdicts = sqlite.do(*appends, StartRun(new_run("new")))
    assert isinstance(verdicts[3], Failed)
    assert verdicts[:3] + verdicts[4:] == [Accepted()] * 7
    assert sqlite.row("r3") == rows[3]
    assert len(sqlite.store.events("r3", 1)) == 1
    assert sqlite.store.run("fine") is None


def test_an_interrupted_commit_leaves_no_transaction_open(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = sqlite.start("a", status="running")

    def interrupted(end: Callable[[], None]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_ends_of_commits(sqlite, patch, interrupted)
        with pytest.raises(KeyboardInterrupt):
            sqlite.one(append_to(row))
    assert sqlite.row("a") == row
    assert sqlite.one(append_to(row)) == Accepted()


# -- no room --------------------------------------------------------------------------------------------------------


def test_a_full_disk_changes_nothing_and_work_goes_on_when_there_is_room(sqlite: SqliteHarness) -> None:
    row = sqlite.start("a", status="running")
    connection = sqlite.sqlite._writer.connection
    connection.pragma("max_page_count", connection.pragma("page_count"))
    batch: list[Operation] = [append_to(row, body=b"x" * 50_000), StartRun(new_run("b"))]
    for _ in range(3):
        with pytest.raises(StoreFull, match="no room"):
            sqlite.do(*batch)
    assert sqlite.row("a") == row
    assert sqlite.store.run("b") is None
    connection.pragma("max_page_count", 1 << 30)
    assert sqlite.do(*batch) == [Accepted()] * 2
    assert sqlite.store.events("a", 1)[1].body == b"x" * 50_000


def test_a_limit_on_the_size_of_files_is_a_full_disk(sqlite: SqliteHarness) -> None:
    row = sqlite.start("a", status="running")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    append = append_to(row, body=b"x" * 3_000_000)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
        with pytest.raises(StoreFull):
            sqlite.one(append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sqlite.row("a") == row
    assert sqlite.one(append) == Accepted()


def test_a_disk_that_fills_up_between_single_attempts_is_told_of_those_only(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [sqlite.start(f"r{n}", status="running") for n in range(3)]
    appends = [append_to(row) for row in rows]
    surrogate(appends[0])
    ends = 0

    def fill_up(end: Callable[[], None]) -> None:
        nonlocal ends
        ends += 1
        if ends == 2:  # the one that cannot be stored does not come to its end
            raise apsw.FullError
        end()

    at_ends_of_commits(sqlite, monkeypatch, fill_up)
    first, second, third = sqlite.do(*appends)
    assert isinstance(first, Failed)
    assert second == Accepted()
    assert isinstance(third, Failed)
    assert isinstance(third.error, StoreFull)
    assert [sqlite.row(f"r{n}").head_seq for n in range(3)] == [1, 2, 1]


# -- failing disks --------------------------------------------------------------------------------------------------


class FaultyFile(apsw.VFSFile):
    """A file whose writes and syncs can be made to fail."""

    fail: set[str] = set()

    def xSync(self, flags: int) -> None:
        if "sync" in FaultyFile.fail:
            raise apsw.IOError
        super().xSync(flags)

    def xWrite(self, data: Any, offset: int) -> None:
        if "write" in FaultyFile.fail:
            raise apsw.IOError
        super().xWrite(data, offset)

    def xRead(self, amount: int, offset: int) -> bytes:
        if "read" in FaultyFile.fail:
            raise apsw.IOError
        return super().xRead(amount, offset)


class FaultyFiles(apsw.VFS):
    """A file system of faulty files."""

    def __init__(self) -> None:
        self.base = ""
        super().__init__("faulty", self.base)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return FaultyFile(self.base, name, flags)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[SqliteStore]:
    vfs = FaultyFiles()
    FaultyFile.fail = set()
    store = SqliteStore(tmp_path / "faulty.db", vfs="faulty")
    yield store
    FaultyFile.fail = set()
    store.close()
    vfs.unregister()


def test_a_file_whose_very_first_write_was_cut_off_becomes_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off = tmp_path / "cut off"
    cut_off.mkdir()

    def keep(vfs: apsw.VFS, name: str, sync: bool) -> None:
        """Keep the files as they are before the journal goes, which is when the write counts."""
        for file in tmp_path.glob("faulty.db*") if name.endswith("-journal") else ():
            shutil.copy(file, cut_off / file.name)
        apsw.VFS.xDelete(vfs, name, sync)

    vfs = FaultyFiles()
    monkeypatch.setattr(FaultyFiles, "xDelete", keep, raising=False)
    SqliteStore(tmp_path / "faulty.db", vfs="faulty").close()
    vfs.unregister()
    assert {file.name for file in cut_off.iterdir()} >= {"faulty.db", "faulty.db-journal"}
    store = SqliteStore(cut_off / "faulty.db")
    assert store.is_new
    assert store.commit([StartRun(new_run("a"))]) == [Accepted()]
    store.close()


@pytest.mark.parametrize("fault", ["sync", "write"])
def test_after_a_failed_write_this_process_writes_nothing_more(faulty: SqliteStore, fault: str) -> None:
    faulty.commit([StartRun(new_run("a", status="running"))])
    row = faulty.run("a")
    assert row is not None
    FaultyFile.fail = {fault}
    with pytest.raises(StoreFailed):
        faulty.commit([append_to(row)])
    FaultyFile.fail = set()
    uses: list[Callable[[], object]] = [
        lambda: faulty.commit([append_to(row)]),
        lambda: faulty.commit([StartRun(new_run("b"))], patient=False),
        lambda: faulty.register_worker("me", 1, "host", 1),
        lambda: faulty.renew("me", 1),
        lambda: faulty.leave("me"),
    ]
    for use in uses:
        with pytest.raises(StoreFailed):
            use()
    assert faulty.run("b") is None


def test_after_a_failed_sync_even_what_can_be_read_back_is_not_believed(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = sqlite.start("a", status="running")

    def fail(end: Callable[[], None]) -> None:
        end()
        raise apsw.IOError

    at_ends_of_commits(sqlite, monkeypatch, fail)
    with pytest.raises(StoreFailed):
        sqlite.one(append_to(row))
    with pytest.raises(StoreFailed):
        sqlite.one(append_to(row))


def test_a_failed_write_of_a_worker_stops_commits_as_well(faulty: SqliteStore) -> None:
    FaultyFile.fail = {"sync"}
    with pytest.raises(StoreFailed):
        faulty.register_worker("me", 1, "host", 1)
    FaultyFile.fail = set()
    with pytest.raises(StoreFailed):
        faulty.commit([StartRun(new_run("a"))])


def test_another_process_finds_the_store_in_order_after_a_failure(faulty: SqliteStore) -> None:
    faulty.commit([StartRun(new_run("a", status="running"))])
    row = faulty.run("a")
    assert row is not None
    append = append_to(row)
    FaultyFile.fail = {"sync"}
    with pytest.raises(StoreFailed):
        faulty.commit([append])
    FaultyFile.fail = set()
    other = SqliteStore(faulty.path)
    found = other.run("a")
    assert found is not None
    assert found.head_seq == len(other.events("a", 1))
    assert other.commit([append_to(found)]) == [Accepted()]
    other.close()


# -- every result code ----------------------------------------------------------------------------------------------
CODES = {
    name: code
    for name, code in {**apsw.mapping_result_codes, **apsw.mapping_extended_result_codes}.items()
    if isinstance(name, str) and isinstance(code, int) and code & 0xFF not in (0, 27, 28, 100, 101)
}
"""All errors that SQLite has; not success, notices, warnings, rows."""
ABOUT_A_VALUE = (apsw.SQLITE_TOOBIG, apsw.SQLITE_CONSTRAINT, apsw.SQLITE_MISMATCH, apsw.SQLITE_RANGE, apsw.SQLITE_ERROR)
ENDS_ALL = (apsw.SQLITE_IOERR, apsw.SQLITE_CORRUPT, apsw.SQLITE_NOTADB)


@pytest.mark.parametrize("name", CODES)
def test_an_error_of_sqlite_that_comes_once_is_blamed_on_no_run(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rows = [sqlite.start(id, status="running") for id in "ab"]
    batch = [append_to(row) for row in rows]
    left = 1

    def fail(end: Callable[[], None]) -> None:
        nonlocal left
        if left:
            left -= 1
            raise apsw.exception_for(CODES[name])
        end()

    at_ends_of_commits(sqlite, monkeypatch, fail)
    code = CODES[name]
    if code & 0xFF not in ABOUT_A_VALUE:
        is_end = code & 0xFF in ENDS_ALL and code != apsw.SQLITE_IOERR_NOMEM
        is_end = is_end or code == apsw.SQLITE_READONLY_DBMOVED
        with pytest.raises(StoreError) as raised:
            sqlite.do(*batch)
        assert isinstance(raised.value, StoreFailed) == is_end
        assert raised.value.pauses != is_end
        if is_end:
            return
    assert sqlite.do(*batch) == [Accepted(), Accepted()]
    assert [sqlite.row(id).head_seq for id in "ab"] == [2, 2]


@pytest.mark.parametrize("error", [MemoryError(), apsw.InterruptError(), apsw.NoMemError(), apsw.ProtocolError()])
def test_an_error_that_lasts_is_told_of_those_only_that_it_hits(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """One of a batch has a value that cannot be stored, so all are tried by themselves; then something else fails."""
    appends = [append_to(sqlite.start(f"r{n}", status="running")) for n in range(3)]
    surrogate(appends[0])
    ends = 0

    def fail(end: Callable[[], None]) -> None:
        nonlocal ends
        ends += 1
        if ends == 2:  # the one with that value does not come to its end
            raise error
        end()

    at_ends_of_commits(sqlite, monkeypatch, fail)
    first, second, third = sqlite.do(*appends)
    assert isinstance(first, Failed)
    assert not isinstance(first.error, StoreError)
    assert second == Accepted()
    assert isinstance(third, Failed)
    assert isinstance(third.error, StoreBusy), "it is tried again, and its run is not held"


# -- read-only, damaged, locked -------------------------------------------------------------------------------------


def test_a_store_that_turns_read_only_says_so(sqlite: SqliteHarness) -> None:
    connection = sqlite.sqlite._writer.connection
    connection.pragma("query_only", 1)
    with pytest.raises(StoreReadOnly):
        sqlite.one(StartRun(new_run("a")))
    connection.pragma("query_only", 0)
    assert sqlite.one(StartRun(new_run("a"))) == Accepted()


def test_a_damaged_page_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    store.commit([StartRun(new_run(f"r{n}")) for n in range(500)])
    store.close()
    content = bytearray((tmp_path / "a.db").read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    (tmp_path / "a.db").write_bytes(content)
    with pytest.raises(StoreUnusable):
        SqliteStore(tmp_path / "a.db").run("r1")


def test_a_damaged_text_in_a_history_is_left_to_the_chain_of_digests(sqlite: SqliteHarness) -> None:
    row = sqlite.start("a", status="running")
    sqlite.one(append_to(row, 2))
    before = sqlite.store.events("a", 1)
    sqlite.sqlite._writer.connection.execute("UPDATE events SET kind = CAST(x'73ff74' AS TEXT) WHERE seq = 2")
    after = sqlite.store.events("a", 1)
    assert after[1].kind == "s\ufffdt"
    assert (after[0], after[2]) == (before[0], before[2])


def test_an_impatient_commit_does_not_wait_for_another_process(sqlite: SqliteHarness) -> None:
    row = sqlite.start("a", status="running")
    other = open_raw(sqlite.path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy):
        sqlite.store.commit([append_to(row)], patient=False)
    other.execute("ROLLBACK")
    assert sqlite.store.commit([append_to(row)], patient=False) == [Accepted()]
    other.close()


def test_an_impatient_commit_does_not_wait_for_another_thread(sqlite: SqliteHarness) -> None:
    row = sqlite.start("a", status="running")
    with sqlite.sqlite._writer.transaction("renew"), pytest.raises(Busy):
        sqlite.store.commit([append_to(row)], patient=False)
    assert sqlite.one(append_to(row)) == Accepted()


def test_patience_has_an_end_that_explains_itself(sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE_SECONDS", 0.05)
    other = open_raw(sqlite.path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked") as caught:
        sqlite.one(StartRun(new_run("a")))
    assert type(caught.value) is StoreBusy
    other.execute("ROLLBACK")
    assert sqlite.one(StartRun(new_run("a"))) == Accepted()
    other.close()


def test_a_change_by_another_store_object_is_seen_once(sqlite: SqliteHarness) -> None:
    other = SqliteStore(sqlite.path)
    sqlite.store.changed()
    sqlite.start("a")
    assert not sqlite.store.changed()
    assert other.changed()
    other.commit([StartRun(new_run("b"))])
    sqlite.start("c")
    assert sqlite.store.changed()
    assert not sqlite.store.changed()
    other.close()


def test_claims_and_posts_of_one_run_in_one_batch_keep_their_order(sqlite: SqliteHarness) -> None:
    sqlite.start("a")
    verdicts = sqlite.do(Claim("a", "x", 0, ["queued"]), Post("a", "signal"), Claim("a", "y", 0, ["queued"]))
    assert [type(verdict) for verdict in verdicts] == [Claimed, Posted, Claimed]
    assert claimed(verdicts[2]).epoch == 2
