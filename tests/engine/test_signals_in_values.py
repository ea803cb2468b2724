"""Real signals while the engine asks a user's object or function: they end the process, and no run gets an outcome."""

import signal
from pathlib import Path

import pytest

from tests.engine.resume_helpers import Machine, Program

CODE = """
import signal, time
PLACE, WAY = sys.argv[2], sys.argv[3]

def is_free():
    return os.path.exists(os.path.join(os.path.dirname(sys.argv[1]), "free"))

HERE = []

def compute_at(place):
    if place == PLACE and not is_free() and not HERE:  # Python itself asks for texts when the process ends
        HERE.append(place)
        sys.__stdout__.write("here\\n"); sys.__stdout__.flush()
        until = time.monotonic() + 60
        while not is_free() and time.monotonic() < until:
            sum(range(1000))

class Kept:
    def __init__(self, place): self.place = place

def encode(kept):
    compute_at(kept.place)
    return kept.place

everstep.register(Kept, encode=encode, decode=Kept)

class Rude(Exception):
    def __str__(self):
        compute_at("text")
        return "rude"
    @property
    def retry_after(self):
        compute_at("retry_after")
        return 0.01

@everstep.register
class Carrying(Exception):
    pass

@step
async def takes(kept: Kept) -> None:
    pass

@step
async def returns() -> Kept:
    return Kept("outcome")

@step(cost=lambda: compute_at("cost") or {"usd": 0.1})
async def priced() -> None:
    pass

@step(retry=Retry(attempts=2, first=0.01))
async def fails() -> None:
    if not is_free():
        raise Rude

@step(retry=Retry(attempts=1))
async def carries() -> None:
    raise Carrying(Kept("carried"))

@workflow(budget=everstep.Budget(usd=1))
async def flow() -> Kept:
    if PLACE == "argument":
        try:
            await takes(Kept("argument"))
        except Exception:
            return "swallowed"
    elif PLACE == "outcome":
        await returns()
    elif PLACE == "cost":
        await priced()
    elif PLACE == "published":
        everstep.publish("kept", Kept("published"))
    elif PLACE == "carried":
        try:
            await carries()
        except Carrying:
            pass
    elif PLACE != "result":
        await fails()
    return Kept("result")

async def main():
    async with everstep.open(URL, recover=True) as app:
        print("result", (await app.run(flow, id="r")).place)

if WAY == "loop":
    asyncio.new_event_loop().run_until_complete(main())
else:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    asyncio.run(main())
"""
PLACES = ("argument", "outcome", "result", "published", "cost", "text", "retry_after", "carried")
SWALLOWED = ("text", "retry_after", "carried")
"""Places in which Ctrl-C by Python's own handler cannot be told from an error that raises `KeyboardInterrupt`."""
CASES = [(place, way) for place in PLACES for way in ("handler", "loop") if way == "handler" or place not in SWALLOWED]
PATIENCE_SECONDS = 60.0


@pytest.mark.parametrize(("place", "way"), CASES)
def test_a_signal_in_a_user_s_object_ends_the_process_and_is_no_outcome(tmp_path: Path, place: str, way: str) -> None:
    program = Program(tmp_path, CODE, place, way)
    assert program.line() == "here"
    program.signal(signal.SIGTERM if way == "handler" else signal.SIGINT)
    status, out, err = program.end(PATIENCE_SECONDS)
    machine = Machine(tmp_path)
    try:
        assert "result" not in out
        assert status == 143 if way == "handler" else status != 0, err
        assert machine.status("r") in ("queued", "running", "waiting"), err
        assert not {"run_failed", "step_failed", "attempt_failed"} & set(machine.kinds("r"))
        (tmp_path / "free").touch()
        status, out, err = Program(tmp_path, CODE, place, way).end(PATIENCE_SECONDS)
        assert "result result" in out, err
        assert machine.status("r") == "completed"
    finally:
        machine.store.close()
