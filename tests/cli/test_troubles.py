"""What fails in a worker's background is shown by `doctor` and by `worker ls`."""

import os
import socket

from everstep.engine.process.worker_row import About, Trouble
from everstep.stores.opening import open_store
from everstep.stores.protocol import StartRun
from everstep.stores.sqlite import SqliteStore
from tests.cli.conftest import Folder
from tests.stores.kit import new_run


def test_doctor_and_worker_ls_name_what_fails_and_what_that_leads_to(folder: Folder) -> None:
    import msgspec

    store = open_store(f"sqlite:///{folder.path / 'everstep.db'}")
    assert isinstance(store, SqliteStore)
    now = store.now()
    about = About(recovers=True, concurrency=10, not_claiming="no success for 60 s or more: retention (KeyError)")
    about.troubles = {"retention": Trouble(7, "KeyError", now - 90_000_000), "pump": Trouble(2, "TypeError")}
    store.register_worker("w", os.getpid(), socket.gethostname(), now + 60_000_000, (), msgspec.json.encode(about))
    try:
        told = [one["text"] for one in folder.json("doctor")["findings"] if one["name"] == "background"]
        assert any("retention failed 7 times (KeyError), for" in text for text in told)
        assert any("pump failed 2 times (TypeError), and works again" in text for text in told)
        assert any("claims no more runs of others" in text for text in told)
        (listed,) = folder.json("worker", "ls")
        assert listed["not_claiming"].endswith("retention (KeyError)")
        assert listed["troubles"]["retention"]["failures"] == 7
        assert "not claiming: retention" in folder.everstep("worker", "ls").out
    finally:
        store.leave("w")
        store.close()


def test_a_host_that_was_never_seen_is_refused_with_those_that_are_known_unless_one_insists(folder: Folder) -> None:
    store = open_store(f"sqlite:///{folder.path / 'everstep.db'}")
    assert isinstance(store, SqliteStore)
    store.register_worker("web-7-311-7fd6b96ed4-4d5c4.d33ef94d", 311, "web-7", -1)
    store.commit([StartRun(new_run("a", status="running", owner="rack-2-12-7fd6b96ed4-4d5c4.00000000"))])
    try:
        refused = folder.everstep("worker", "gone", "--host", "wbe-7", "--note", "deleted")
        assert refused.status != 0
        assert "has never seen a host 'wbe-7'. Known: rack-2, web-7. Nothing was noted." in refused.err
        assert store.gone() == []
        assert folder.everstep("worker", "gone", "--host", "wbe-7", "--note", "deleted", "--never-seen").status == 0
        assert [row.name for row in store.gone("host")] == ["wbe-7"]
        for _ in range(2):  # twice does no harm
            assert folder.everstep("worker", "gone", "--host", "rack-2", "--note", "deleted").status == 0
        assert store.owners() == []
        wrong = folder.everstep("worker", "gone", "w", "--note", "deleted", "--never-seen")
        assert wrong.status != 0
        assert "--never-seen goes with --host" in wrong.err
    finally:
        store.close()
