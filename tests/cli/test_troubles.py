"""What fails in a worker's background is shown by `doctor` and by `worker ls`."""

import os
import socket

from everstep.engine.process.worker_row import About, Trouble
from everstep.stores.opening import open_store
from everstep.stores.sqlite import SqliteStore
from tests.cli.conftest import Folder


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
