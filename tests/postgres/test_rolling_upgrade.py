"""Two releases on one store: the newer one migrates; the older one goes on, and leaves what it cannot read."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from everstep.codec import ANY, Codec
from everstep.errors import StoreUnusable
from everstep.stores.postgres import PostgresStore, opening
from everstep.stores.postgres.opening import script, stored_version
from everstep.stores.protocol import Post, RunFilter
from everstep.stores.sql.migrations import COMPATIBLE, is_compatible, works_with
from tests.postgres import next_release, payments
from tests.postgres.server import Server
from tests.waiting import wait_until

PRESENT, NEXT = str(Path(payments.__file__)), str(Path(next_release.__file__))


class Releases:
    """A store, and workers of both releases."""

    def __init__(self, path: Path, url: str) -> None:
        self.url = url
        self.path = path
        (path / "notes").touch()
        source = str(Path(everstep.__file__).parents[1])
        self.environment = {**os.environ, "PYTHONPATH": source, "NOTES": str(path / "notes"), "EVERSTEP_URL": url}
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, name: str, program: str, *words: str) -> "subprocess.Popen[bytes]":
        with (self.path / name).open("ab") as stream:
            line = [sys.executable, program, self.url, *words]
            process = subprocess.Popen(line, env=self.environment, stdout=stream, stderr=stream)
        self.processes.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.path / name).read_text()

    def order(self, *names: str) -> None:
        code = (
            f"import sys; sys.path.insert(0, {str(Path(PRESENT).parent)!r})\n"
            "import everstep, payments\n"
            "with everstep.open(queues=['none']) as app:\n"
            f"    for name in {names!r}: app.start(payments.order, name, id=name)\n"
        )
        subprocess.run([sys.executable, "-c", code], env=self.environment, check=True)

    def everstep(self, *words: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "everstep", *words]
        return subprocess.run(line, env=self.environment, capture_output=True, text=True, check=False)


@pytest.fixture
def releases(tmp_path: Path, url: str) -> Iterator[Releases]:
    made = Releases(tmp_path, url)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def go(store: PostgresStore, *runs: str) -> None:
    value = Codec().encode(0.0, ANY, "a signal")
    store.commit([Post(run, "signal", "go", value=value) for run in runs])


def kinds(store: PostgresStore, run: str) -> set[str]:
    return {event.kind for event in store.events(run, 1)}


def statuses(store: PostgresStore) -> dict[str, str]:
    return {row.id: row.status for row in store.runs(RunFilter())}


def test_a_rolling_upgrade_goes_on_with_every_run_and_holds_none(releases: Releases) -> None:
    releases.order("a", "b", "c")
    old = releases.begin("old", PRESENT)
    store = PostgresStore(releases.url)
    wait_until(lambda: "driving" in releases.said("old"))
    go(store, "a", "b")
    wait_until(lambda: releases.said("notes").count(" 1\n") == 2)

    new = releases.begin("new", NEXT)
    wait_until(lambda: "driving" in releases.said("new"))
    assert stored_version(releases.url) == len(opening.migrations("x")) + 1
    go(store, "a")  # the older one has it, and goes on with the newer schema
    wait_until(lambda: "a 2\n" in releases.said("notes"))
    assert "flavour_noted" not in kinds(store, "a")
    another = PostgresStore(releases.url)  # a process of the older release may also begin now
    assert another.run("a") is not None
    another.close()
    assert "newer" in releases.everstep("doctor").stdout

    # The older worker leaves; the newer one writes what only it knows; another older one leaves those runs alone.
    old.terminate()
    old.wait(20)
    go(store, "a", "b", "c")
    wait_until(lambda: statuses(store)["a"] == "completed" and "c 1\n" in releases.said("notes"))
    assert all("flavour_noted" in kinds(store, run) for run in "abc")
    new.terminate()
    new.wait(20)
    releases.begin("old again", PRESENT)
    wait_until(lambda: "driving" in releases.said("old again"))
    go(store, "b", "c")
    wait_until(lambda: releases.said("old again").count("is left for a worker that can read it") == 2)
    time.sleep(1.0)
    assert store.holds(open_only=False) == []
    assert releases.said("old again").count("is left for") == 2, "once for each run"
    releases.order("d")
    go(store, "d")
    wait_until(lambda: "d 1\n" in releases.said("notes"))
    assert "flavour_noted" not in kinds(store, "d")

    releases.begin("new again", NEXT)
    wait_until(lambda: {"b 3\n", "c 2\n"} <= {line + "\n" for line in releases.said("notes").splitlines()})
    wait_until(lambda: statuses(store)["b"] == "completed")
    lines = releases.said("notes").splitlines()
    assert len(lines) == len(set(lines)) == 9, lines
    assert store.holds(open_only=False) == []
    assert "does not know (flavour_noted)" in releases.everstep("verify", "b").stdout
    store.close()


def test_a_migration_that_older_releases_cannot_live_with_waits_until_they_are_gone(releases: Releases) -> None:
    releases.order("a")
    old = releases.begin("old", PRESENT)
    wait_until(lambda: "driving" in releases.said("old"))
    refused = releases.begin("new", NEXT, "breaking")
    assert refused.wait(20) != 0
    assert f"process {old.pid} on " in releases.said("new")
    assert "Stop them first. Nothing was changed." in releases.said("new")
    assert stored_version(releases.url) == len(opening.migrations("x"))
    old.kill()
    old.wait(20)
    releases.begin("new again", NEXT, "breaking")
    wait_until(lambda: "driving" in releases.said("new again"))
    with pytest.raises(
        StoreUnusable, match=f"version {len(opening.migrations('x')) + 1} of the schema, made by a newer release"
    ):
        PostgresStore(releases.url)


def test_a_release_lives_with_one_version_more_than_it_knows_if_that_says_so(
    url: str, server: Server, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opening.migrations(schema)[0]
    added = f'{COMPATIBLE}\nCREATE TABLE "{schema}".more (id text);'

    def release(*migrations: str) -> None:
        monkeypatch.setattr(opening, "migrations", lambda _: list(migrations))

    release(first, added)
    PostgresStore(url).close()
    release(first)
    PostgresStore(url).close()
    assert stored_version(url) == 2
    release(first, added, added.replace("more", "most"))
    PostgresStore(url).close()
    release(first)
    with pytest.raises(StoreUnusable, match="version 3"):
        PostgresStore(url)
    release(first, added)
    PostgresStore(url).close()
    server.drop(schema)
    release(first, added)
    server.ask(script(schema))
    release(first)
    PostgresStore(url).close()


def test_what_a_release_must_know_is_the_newest_version_that_is_not_compatible() -> None:
    plain, more = "CREATE TABLE a (b int);", f"-- Adds a table.\n{COMPATIBLE}\nCREATE TABLE c (d int);"
    assert (is_compatible(plain), is_compatible(more)) == (False, True)
    assert [works_with([plain, more, plain, more, more], version) for version in range(1, 6)] == [1, 1, 3, 3, 3]
