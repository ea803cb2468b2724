"""Real signals to real processes, wherever their code is: no run gets an outcome from them, no effect is doubled."""

import signal
import time
from pathlib import Path

import pytest

from tests.engine.resume_helpers import Machine, Program

CODE = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where `nohup` has it ignored
PLACE, WAY = sys.argv[2], sys.argv[3]

def write_down(text):
    with open(os.path.join(os.path.dirname(sys.argv[1]), "ledger"), "a") as ledger:
        ledger.write(text + "\\n")

def is_free():
    return os.path.exists(os.path.join(os.path.dirname(sys.argv[1]), "free"))

def compute():
    sys.__stdout__.write("here\\n"); sys.__stdout__.flush()
    while not is_free():
        sum(range(1000))

@step
async def first() -> None:
    write_down("first " + everstep.key())

@step
def on_thread() -> None:
    sys.__stdout__.write("here\\n"); sys.__stdout__.flush()
    while not is_free():
        time.sleep(0.005)

@step
async def on_loop() -> None:
    compute()

@step
async def awaiting() -> None:
    sys.__stdout__.write("here\\n"); sys.__stdout__.flush()
    while not is_free():
        await asyncio.sleep(0.005)

@step(effect="read")
async def look() -> bool:
    sys.__stdout__.write("here\\n"); sys.__stdout__.flush()
    return is_free()

@step(effect="once")
async def charge() -> None:
    write_down("charge")

@workflow
async def flow() -> str:
    await first()
    if PLACE == "code":
        compute()
    elif PLACE == "thread":
        await asyncio.to_thread(on_thread)
    elif PLACE == "loop":
        await on_loop()
    elif PLACE == "awaiting":
        await awaiting()
    else:
        while not await look():
            await asyncio.sleep(0.05)
    await charge()
    return "done"

async def main():
    if WAY == "handler":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
        signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))
    async with everstep.open(URL, recover=True) as app:
        print("result", await app.run(flow, id="r"))

if WAY == "script":
    print("result", everstep.run(flow, id="r", url=URL))
elif WAY == "loop":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
else:
    asyncio.run(main())
"""
PLACES = ("code", "thread", "loop", "awaiting", "waiting")
BUSY = ("code", "loop")
"""Where the loop of the process gets no turn before the code has ended."""
WAYS = ("script", "app", "handler", "loop")
PATIENCE_SECONDS = 60.0


def ledger(folder: Path) -> list[str]:
    return (folder / "ledger").read_text().splitlines()


def is_over(program: Program, seconds: float) -> bool:
    """Wait for the end of a process for a while."""
    deadline = time.monotonic() + seconds
    while program.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return program.process.poll() is not None


@pytest.mark.parametrize(
    ("way", "place", "signals"),
    [
        *((way, place, signals) for way in WAYS for place in PLACES for signals in ("TERM TERM", "INT INT")),
        *((way, place, signals) for way in ("script", "handler") for place in PLACES for signals in ("TERM", "INT")),
        *(("app", place, "INT TERM") for place in PLACES),
        *(("script", place, "HUP") for place in ("code", "awaiting")),
    ],
)
def test_signals_leave_a_run_unfinished_and_the_next_process_finishes_it(
    tmp_path: Path, way: str, place: str, signals: str
) -> None:
    program = Program(tmp_path, CODE, place, way)
    assert program.line() == "here"
    for name in signals.split():
        time.sleep(0.05)
        if program.process.poll() is None:
            program.signal(signal.Signals[f"SIG{name}"])
    if not is_over(program, 1.0 if place in BUSY or place == "thread" else PATIENCE_SECONDS):
        (tmp_path / "free").touch()  # it waits until the code lets it stop
    status, out, err = program.end(PATIENCE_SECONDS)
    machine = Machine(tmp_path)
    try:
        assert "result" in out or status != 0, err
        assert machine.status("r") in ("queued", "running", "waiting", "completed"), err
        assert not {"run_failed", "run_cancelled", "step_failed", "attempt_failed"} & set(machine.kinds("r"))
        (tmp_path / "free").touch()
        status, out, err = Program(tmp_path, CODE, place, way).end(PATIENCE_SECONDS)
        assert "result done" in out, err
        first, *others = dict.fromkeys(ledger(tmp_path))  # a `repeat` may come again, with the same key
        assert first.startswith("first ")
        assert others == ["charge"]
        assert ledger(tmp_path).count("charge") == 1
        assert machine.status("r") == "completed"
    finally:
        machine.store.close()


RAISES = """
@step
async def on_loop() -> None:
    raise KeyboardInterrupt

@step
def on_thread() -> None:
    raise KeyboardInterrupt

@step
def interrupts_the_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

@workflow
async def flow() -> None:
    if sys.argv[2] == "loop":
        await on_loop()
    elif sys.argv[2] == "thread":
        await asyncio.to_thread(on_thread)
    else:
        await asyncio.to_thread(interrupts_the_process)

async def main():
    async with everstep.open(URL) as app:
        await app.run(flow, id="r")

asyncio.run(main())
"""


@pytest.mark.parametrize(("place", "lives"), [("loop", 4), ("thread", 1)])
def test_a_body_that_raises_keyboard_interrupt_in_every_life_is_held(tmp_path: Path, place: str, lives: int) -> None:
    """On a thread it stops nothing. On the loop it cannot be told from Ctrl-C, and so ends the process, three times."""
    said = [Program(tmp_path, RAISES, place).end(PATIENCE_SECONDS) for _ in range(lives)]
    assert ["RunHeld" in err for _, _, err in said] == [False] * (lives - 1) + [True], said
    machine = Machine(tmp_path)
    try:
        assert machine.hold("r").reason == "poisoned"
        assert not {"run_failed", "step_failed", "attempt_failed"} & set(machine.kinds("r"))
    finally:
        machine.store.close()


def test_a_body_that_sends_its_process_a_signal_stops_it_in_good_order(tmp_path: Path) -> None:
    status, _, err = Program(tmp_path, RAISES, "signal").end(PATIENCE_SECONDS)
    assert status != 0, err
    machine = Machine(tmp_path)
    try:
        assert machine.status("r") in ("queued", "running", "completed")
        assert not {"run_failed", "step_failed", "attempt_failed"} & set(machine.kinds("r"))
    finally:
        machine.store.close()
