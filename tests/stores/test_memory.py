"""What is particular to a store in memory. All else it does as the one in a file: the conformance suite shows it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from everstep.errors import Misuse
from everstep.stores.opening import open_store
from everstep.stores.protocol import Accepted, StartRun
from tests.stores.kit import new_run, python

FORKED = """
import os
from everstep.stores.opening import open_store
from everstep.stores.protocol import StartRun
from tests.stores.kit import new_run

store = open_store("memory:")
store.register_worker("parent", os.getpid(), "host", 10_000)
store.commit([StartRun(new_run("before"))])
child = os.fork()
store.commit([StartRun(new_run("parent" if child else "child"))])
runs = [id for id in ("before", "child", "parent") if store.run(id) is not None]
other = open_store("memory:")
assert other.run("before") is None
if child:
    assert os.waitpid(child, 0)[1] == 0
print(*runs, store.bury_dead(1), flush=True)
store.close()
os._exit(0)
"""


def test_each_store_in_memory_is_a_store_of_its_own() -> None:
    one, other = open_store("memory:"), open_store("memory:")
    assert one.commit([StartRun(new_run("a"))]) == [Accepted()]
    assert other.run("a") is None
    assert one.entropy != other.entropy, "keys of steps derive from it"
    assert one.life() != other.life()
    one.close()
    assert other.commit([StartRun(new_run("a"))]) == [Accepted()]
    other.close()


def test_a_store_in_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("memory:")
    store.register_worker("w", os.getpid(), "host", 10_000)
    assert store.commit([StartRun(new_run("a"))]) == [Accepted()]
    store.connect().execute("CREATE TABLE sales (item)")
    assert list(tmp_path.iterdir()) == []
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_its_name_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory:").touch()
    store = open_store("memory:")
    (tmp_path / "memory:").unlink()
    store.register_worker("w", os.getpid(), "host", 10_000)
    assert store.commit([StartRun(new_run("a"))]) == [Accepted()]
    store.close()


def test_a_closed_store_in_memory_frees_all_that_was_in_it() -> None:
    open_store("memory:").close()
    before = apsw.memory_used()
    stores = [open_store("memory:") for _ in range(20)]
    for store in stores:
        store.commit([StartRun(new_run("a", payloads=[("p", bytes(100_000))]))])
        store.connect().execute("CREATE TABLE sales (item)")
    assert apsw.memory_used() - before > 20 * 100_000
    for store in stores:
        store.close()
        with pytest.raises(Misuse, match="has been closed"):
            store.run("a")
    assert apsw.memory_used() - before < 100_000


def test_many_threads_open_and_use_stores_in_memory_at_once() -> None:
    shared = open_store("memory:")

    def use(number: int) -> int:
        own = open_store("memory:")
        for count in range(20):
            assert own.commit([StartRun(new_run(f"{count}"))]) == [Accepted()]
            assert shared.commit([StartRun(new_run(f"{number}-{count}"))]) == [Accepted()]
            assert shared.run(f"{number}-{count}") is not None
        runs = sum(own.counts().values())
        own.close()
        return runs

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(8))) == [20] * 8
    assert sum(shared.counts().values()) == 160
    shared.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked")
def test_a_forked_child_has_a_copy_of_its_own() -> None:
    child, parent = python(FORKED).splitlines()
    assert child == "before child []"
    assert parent == "before parent []"
