"""Behind a pooler in transaction mode: it is noticed if nobody said so, and what is killed goes on all the same."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import StoreUnusable
from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import RunFilter, StartRun
from tests.postgres.pooler import TransactionPooler
from tests.postgres.server import Server
from tests.postgres.test_programs import PROGRAM, Folder
from tests.stores.kit import new_run
from tests.waiting import wait_until


def url_of(pooler: TransactionPooler, schema: str, more: str = "") -> str:
    return f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres?schema={schema}{more}"


@pytest.fixture
def pooler(server: Server) -> Iterator[TransactionPooler]:
    made = TransactionPooler(server.socket_path())
    yield made
    made.close()


def test_a_pooler_that_nobody_mentioned_is_noticed_before_anything_is_made(
    pooler: TransactionPooler, server: Server, schema: str
) -> None:
    with pytest.raises(StoreUnusable, match="pooler=on"):
        PostgresStore(url_of(pooler, schema))

    assert server.ask("SELECT 1 FROM pg_namespace WHERE nspname = %s", schema) == []


def test_a_pooler_that_refuses_the_settings_of_a_session_is_explained(server: Server, schema: str) -> None:
    strict = TransactionPooler(server.socket_path(), refuses_options=True)
    try:
        with pytest.raises(StoreUnusable, match="pooler=on"):
            PostgresStore(url_of(strict, schema))
        PostgresStore(url_of(strict, schema, "&pooler=on")).close()
    finally:
        strict.close()


def test_a_program_behind_a_pooler_is_killed_and_another_goes_on_in_sessions_that_others_had(
    pooler: TransactionPooler, schema: str, tmp_path: Path
) -> None:
    folder = Folder(tmp_path, url_of(pooler, schema, "&pooler=on"))
    first = folder.begin(PROGRAM, "walk", folder.url, "16", LEASE="2")
    wait_until(lambda: len(folder.lines()) >= 5)
    first.send_signal(signal.SIGKILL)
    first.communicate()

    second = folder.begin(PROGRAM, "walk", folder.url, "16", LEASE="2")
    assert second.communicate(timeout=60) == ("16\n", "")
    assert folder.everstep("verify", "--all")

    noted = Counter(line.split()[0] for line in folder.lines())
    assert set(noted) == {str(place) for place in range(16)}
    assert sum(noted.values()) <= 18, "only what was under way is done again"
    assert pooler.shared() >= 1


def test_a_lost_session_is_not_told_of_twice(server: Server, schema: str, caplog: pytest.LogCaptureFixture) -> None:
    """psycopg logs what fails at the end of a pipeline that has failed already: the same error, on stderr."""
    store = PostgresStore(server.url(schema, pooler="on"))
    try:
        for number in range(5):
            store.run("a")
            server.terminate(f"{store.name}%")
            store.run("a")
            server.terminate(f"{store.name}%")
            store.runs(RunFilter())
            server.terminate(f"{store.name}%")
            assert store.commit([StartRun(new_run(f"r{number}"))])
        assert len(store.runs(RunFilter())) == 5
    finally:
        store.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("psycopg")] == []
