"""The server is restarted, backends are ended, replies are lost: work goes on, and nothing is done twice or lost."""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.errors import StoreError
from everstep.stores.brief import Busy
from everstep.stores.postgres import PostgresStore, commits
from everstep.stores.protocol import (
    Accepted,
    Append,
    Claim,
    Claimed,
    Existing,
    Operation,
    Post,
    Posted,
    Refused,
    StartRun,
)
from tests.postgres.proxy import CuttingProxy
from tests.postgres.server import Server
from tests.stores.kit import PostgresHarness, append_to, new_run
from tests.waiting import DEADLINE_SECONDS, wait_until


@pytest.fixture
def proxy(server: Server) -> Iterator[CuttingProxy]:
    made = CuttingProxy(server.socket_path())
    yield made
    made.close()


@pytest.fixture(params=["off", "on"])
def behind(
    request: pytest.FixtureRequest, proxy: CuttingProxy, server: Server, postgres: PostgresHarness
) -> Iterator[PostgresStore]:
    """A second store object, whose connections go through the proxy; also as if that were a pooler."""
    options = f"schema={postgres.schema}&pooler={request.param}"
    made = PostgresStore(f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?{options}")
    yield made
    made.close()


def test_a_commit_after_all_backends_were_ended_is_made_on_a_new_connection(
    postgres: PostgresHarness, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    row = postgres.start("a", status="running")
    caplog.set_level(logging.WARNING, "everstep.store")
    assert server.terminate() >= 2
    assert postgres.one(append_to(row)) == Accepted()
    assert len(postgres.store.events("a", 1)) == 2
    assert "was lost" in caplog.text
    assert "reached again" in caplog.text


def test_a_read_after_all_backends_were_ended_is_made_on_a_new_connection(
    postgres: PostgresHarness, server: Server
) -> None:
    postgres.start("a")
    server.terminate()
    assert postgres.row("a").id == "a"


def test_a_commit_waits_out_a_server_that_is_down(postgres: PostgresHarness, server: Server) -> None:
    row = postgres.start("a", status="running")
    server.stop()
    verdicts: list[Any] = []
    waiting = threading.Thread(target=lambda: verdicts.append(postgres.one(append_to(row))))
    waiting.start()
    try:
        time.sleep(0.7)
        assert not verdicts
        with pytest.raises(StoreError, match="cannot be reached"):
            postgres.store.run("a")
        with pytest.raises(Busy):
            postgres.store.commit([Post("a", "signal")], patient=False)
        with pytest.raises(StoreError, match="cannot be reached"):
            postgres.store.renew("me", 1)
        assert waiting.is_alive(), "readers, and what prolongs a lease, have given up long before a commit does"
    finally:
        server.start()
    waiting.join(DEADLINE_SECONDS)
    assert verdicts == [Accepted()]
    assert len(postgres.store.events("a", 1)) == 2


def test_what_an_impatient_caller_left_is_finished_when_it_comes_again(
    postgres: PostgresHarness, server: Server
) -> None:
    row = postgres.start("a", status="running")
    append = append_to(row)
    server.terminate()
    with pytest.raises(Busy):
        postgres.store.commit([append], patient=False)
    assert postgres.store.commit([append]) == [Accepted()]
    assert postgres.one(append) == Refused("head")


def _operations(harness: PostgresHarness) -> dict[str, Operation]:
    for id in ("one", "two", "end", "posted", "claimed"):
        harness.start(id, status="running")
    return {
        "an append": append_to(harness.row("one"), 2),
        "an append with a payload": append_to(harness.row("two"), payloads=[("p", b"1")]),
        "an end": append_to(harness.row("end"), status="completed"),
        "a start": StartRun(new_run("new", tags={"t": "1"})),
        "a post": Post("posted", "signal", "n"),
        "a claim": Claim("claimed", "me", 1, ["running"]),
        "a claim in its turn": Claim("claimed", "just-this-worker", 1, ["running"], queued=True),
    }


KINDS = ["an append", "an append with a payload", "an end", "a start", "a post", "a claim", "a claim in its turn"]


@pytest.mark.parametrize("moment", ["request", "reply"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_whose_reply_is_lost_is_done_once(
    postgres: PostgresHarness, behind: PostgresStore, proxy: CuttingProxy, kind: str, moment: Any
) -> None:
    operation = _operations(postgres)[kind]
    behind.commit([StartRun(new_run("warm", status="running"))])  # its statements are prepared
    proxy.cut_once(moment, _sent_with(operation))
    (verdict,) = behind.commit([operation])
    assert proxy.cuts == 1
    assert isinstance(verdict, Accepted | Posted | Claimed), verdict
    assert len(postgres.store.events("one", 1)) == (3 if kind == "an append" else 1)
    assert len(postgres.store.signals("posted")) == (kind == "a post")
    # What is done in one round trip is claimed once more, by the same worker: that changes nothing but the epoch.
    assert postgres.row("claimed").epoch in {"a claim": (1,), "a claim in its turn": (1, 2)}.get(kind, (0,))
    assert (postgres.store.payload("two", "p") is not None) == (kind == "an append with a payload")
    assert (postgres.store.run("new") is not None) == (kind == "a start")


def _sent_with(operation: Operation) -> bytes:
    """Return bytes that are sent when an operation is to be durable: the COMMIT, or what is one round trip with it."""
    match operation:
        case Append():
            return operation.events[-1].digest
        case StartRun():
            return operation.new.event.digest
        case Claim() if operation.queued:
            return operation.worker.encode()
    return b"COMMIT"


@pytest.mark.parametrize("moment", ["request", "reply"])
def test_a_batch_whose_reply_is_lost_has_the_verdicts_that_it_would_have_had(
    postgres: PostgresHarness, behind: PostgresStore, proxy: CuttingProxy, moment: Any
) -> None:
    rows = [postgres.start(f"r{number}", status="running") for number in range(6)]
    postgres.one(append_to(rows[5]))
    postgres.start("there", owner="you")
    batch = [*map(append_to, rows), StartRun(new_run("new")), StartRun(new_run("there", owner="me"))]
    proxy.cut_once(moment, _sent_with(batch[0]))
    verdicts = behind.commit(batch)
    assert proxy.cuts == 1
    assert verdicts[:5] == [Accepted()] * 5
    # What it would have written is there already, to the byte, so after an unknown commit it counts as written.
    assert verdicts[5] in (Refused("head"), Accepted())
    assert verdicts[6] == Accepted()
    assert isinstance(verdicts[7], Existing)
    assert [len(postgres.store.events(f"r{number}", 1)) for number in range(6)] == [2] * 6


def test_restarts_in_the_middle_of_commits_lose_and_double_nothing(postgres: PostgresHarness, server: Server) -> None:
    store = postgres.another()
    heads = {f"r{number}": postgres.start(f"r{number}", status="running") for number in range(8)}
    posted: list[int] = []
    stop = threading.Event()
    problems: list[Any] = []

    def work() -> None:
        try:
            while not stop.is_set():
                appends = [append_to(row) for row in heads.values()]
                verdicts = store.commit([*appends, Post("r0", "signal")])
                assert verdicts[:-1] == [Accepted()] * 8, verdicts
                posted.append(verdicts[-1].number)  # type: ignore[union-attr]
                for append in appends:
                    heads[append.run].head_seq = append.events[-1].seq
                    heads[append.run].head_digest = append.events[-1].digest
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    for mode in ("immediate", "fast", "immediate", "immediate", ""):
        wanted = len(posted) + 5
        wait_until(lambda wanted=wanted: problems or len(posted) >= wanted)  # type: ignore[misc]
        if mode:
            server.restart(mode)
    stop.set()
    worker.join(30)
    store.close()
    assert not problems, problems
    assert len(posted) > 20
    for id, row in heads.items():
        events = postgres.store.events(id, 1)
        assert [event.seq for event in events] == list(range(1, row.head_seq + 1))
        assert events[-1].digest == row.head_digest
    assert [delivery.number for delivery in postgres.store.inbox("r0")] == posted


def test_a_store_that_is_closed_during_an_outage_does_not_wait_for_ever(
    postgres: PostgresHarness, server: Server
) -> None:
    store = postgres.another()
    row = postgres.start("a", status="running")
    server.stop()
    problems: list[BaseException] = []

    def work() -> None:
        try:
            store.commit([append_to(row)])
        except StoreError as error:
            problems.append(error)

    waiting = threading.Thread(target=work)
    waiting.start()
    try:
        time.sleep(0.2)
        store.close()
        waiting.join(10)
        assert not waiting.is_alive()
    finally:
        server.start()
    assert "store was closed" in str(problems[0])


def test_an_append_whose_reply_came_after_another_worker_took_over_is_not_acted_upon(
    postgres: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "SLOW_SECONDS", 0.0)
    postgres.enter("you")
    rows = {id: postgres.start(id, status="running") for id in ("kept", "taken", "ended")}
    another = postgres.another()
    note = postgres.postgres._writer.heads.note

    def late(*arguments: Any) -> Any:
        assert isinstance(another.commit([Claim("taken", "you", 1, ["running"])])[0], Claimed)
        assert isinstance(another.commit([Claim("ended", "you", 1, ["completed"])])[0], Claimed)
        return note(*arguments)

    monkeypatch.setattr(postgres.postgres._writer.heads, "note", late)
    batch = [append_to(rows["kept"]), append_to(rows["taken"]), append_to(rows["ended"], status="completed")]
    assert postgres.do(*batch) == [Accepted(), Refused("fenced"), Accepted()]
    assert len(postgres.store.events("taken", 1)) == 2, "it is in the history all the same"
    another.close()
