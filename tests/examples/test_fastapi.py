"""The shop behind FastAPI: a real server on loopback, killed in the middle and started again, and a real client."""

import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import STDOUT, Popen

import httpx
import pytest

from tests.examples.kit import ROOT, environment
from tests.postgres.server import server
from tests.waiting import open_sqlite, wait_until

ORDER = {"customer": "ann", "items": {"lamp": 2, "chair": 1}}
ADDRESS = {"street": "Main Street 1", "city": "Oslo"}
TOLD = ["paid 3600 cents", "on its way to Oslo", "packed 2 × lamp", "packed 1 × chair"]


class Shop:
    """The service, on a port of its own, that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self.server: Popen[bytes] | None = None
        self.store: dict[str, str] = {}

    def start(self, **settings: str) -> None:
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(ROOT / "examples" / "fastapi_app"), "shop:api"]
        command += ["--port", str(self.port), "--log-level", "warning", "--timeout-graceful-shutdown", "10"]
        log = (self.folder / "log").open("a")
        self.server = Popen(
            command, cwd=self.folder, env=environment(**self.store, **settings), stdout=log, stderr=STDOUT
        )
        wait_until(lambda: self.answers() or self.has_died())

    def answers(self) -> bool:
        try:
            return self.http.get("/openapi.json").status_code == 200
        except httpx.TransportError:
            return False

    def has_died(self) -> bool:
        return self.server is None or self.server.poll() is not None

    def kill(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait(60)

    def stop(self) -> int:
        assert self.server is not None
        self.server.send_signal(signal.SIGTERM)
        return int(self.server.wait(60))

    def insist(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Send a request until it is answered, and start the server again each time that it has died."""
        while True:
            try:
                return self.http.request(method, path, json=body)
            except httpx.TransportError:
                if self.has_died():
                    self.start()

    def progress(self, order: str, after: int = 0, most: int = 100) -> tuple[list[str], int]:
        """Read server-sent events until the stream ends, the server dies, or `most` have come."""
        told: list[str] = []
        try:
            headers = {"Last-Event-ID": str(after)}
            with self.http.stream("GET", f"/orders/{order}/progress", headers=headers) as events:
                for line in events.iter_lines():
                    if line.startswith("id: "):
                        after = int(line[4:])
                    elif line.startswith("event: end"):
                        return told, -1
                    elif line.startswith("data: "):
                        told.append(json.loads(line[6:]))
                        if len(told) == most:
                            return told, after
        except httpx.TransportError:
            pass
        return told, after

    def charges(self) -> int:
        database = open_sqlite(self.folder / "shop.db")
        ((count,),) = database.execute("select count(*) from charges")
        database.close()
        return int(count)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.http.close()
    if made.server is not None and made.server.poll() is None:
        made.kill()


def has_completed(shop: Shop, order: str) -> bool:
    return bool(shop.insist("GET", f"/orders/{order}").json()["status"] == "completed")


def test_an_order_is_paid_told_of_and_delivered(shop: Shop) -> None:
    shop.start()
    assert shop.http.put("/orders/7", json=ORDER).status_code == 202
    told, position = shop.progress("7", most=1)
    assert told == TOLD[:1]
    assert shop.http.put("/orders/7/address", json=ADDRESS).json() == {"new": True}
    assert shop.http.put("/orders/7/address", json=ADDRESS).json() == {"new": False}
    assert shop.progress("7", position) == (TOLD[1:], -1)
    answer = shop.http.get("/orders/7").json()
    assert answer["receipt"]["payment"] == "payment-1"
    assert shop.stop() in (0, -signal.SIGTERM)


def test_what_the_sender_can_mend_is_a_4xx_that_says_how(shop: Shop) -> None:
    shop.start()
    assert shop.http.put("/orders/7", json=ORDER).status_code == 202
    assert shop.http.put("/orders/7", json={**ORDER, "gift": False}).status_code == 202, "equal values are equal"

    other = shop.http.put("/orders/7", json={**ORDER, "gift": True})
    assert (other.status_code, other.json()["code"]) == (409, "everstep.run.id_conflict")
    wrong = shop.http.put("/orders/8", json={**ORDER, "items": {"lamp": 0}})
    assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["body", "items", "lamp"])
    assert shop.http.put("/orders/7/address", json={"city": "Oslo"}).status_code == 422
    assert shop.http.get("/orders/9").status_code == 404
    assert shop.http.get("/orders/9/progress").status_code == 404

    assert shop.http.put("/orders/7/address", json=ADDRESS).status_code == 202
    assert shop.http.put("/orders/7/address", json={**ADDRESS, "city": "Rome"}).status_code == 409
    wait_until(lambda: has_completed(shop, "7"))
    assert shop.http.put("/orders/7/address", json={**ADDRESS, "city": "Rome"}).status_code in (409, 422)


def order_to_the_end(shop: Shop) -> None:
    """Order, say where it goes, and read all events, whatever dies in between."""
    assert shop.insist("PUT", "/orders/7", ORDER).status_code == 202
    assert shop.insist("PUT", "/orders/7/address", ADDRESS).status_code in (202, 422)
    told: list[str] = []
    after = 0
    while after >= 0:
        if shop.has_died():
            shop.start()
        more, after = shop.progress("7", after)
        told += more
    assert [line for line in told if not line.startswith("packed")] == TOLD[:2]
    assert told[-2:] == TOLD[2:], "an attempt at packing that was cut off may have told of it before"
    answer = shop.insist("GET", "/orders/7").json()
    assert answer["status"] == "completed"
    assert shop.charges() == 1


@pytest.mark.parametrize("at", ["body.after:1", "body.after:2", "body.after:3"])
def test_a_server_that_is_killed_and_started_again_continues_its_orders(shop: Shop, at: str) -> None:
    shop.start(EVERSTEP_CRASH_AT=at)
    first = shop.server
    order_to_the_end(shop)
    assert first is not None
    assert first.wait(60) == -signal.SIGKILL


def test_a_server_on_postgresql_that_is_killed_continues_its_orders(shop: Shop) -> None:
    schema = server().fresh_schema()
    shop.store = {"EVERSTEP_URL": server().url(schema)}
    shop.start(EVERSTEP_CRASH_AT="body.after:2")
    order_to_the_end(shop)
    shop.kill()
    server().drop(schema)


@contextmanager
def killed_after(shop: Shop, seconds: float) -> Iterator[None]:
    """Let the first server live only for a random time."""
    shop.start()
    assert shop.server is not None
    killer = threading.Timer(seconds, shop.server.kill)
    killer.start()
    yield
    killer.join()


@pytest.mark.parametrize("trial", [1, 2, *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 60))])
def test_a_server_that_is_killed_at_a_random_instant_continues_its_orders(shop: Shop, trial: int) -> None:
    seed = trial if trial <= 2 else time.time_ns()
    print(f"seed {seed}")
    with killed_after(shop, random.Random(seed).uniform(0, 0.8)):
        order_to_the_end(shop)
