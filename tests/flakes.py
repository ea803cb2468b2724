"""The whole suite again and again, to find tests that fail now and then: `make flakes`.

python tests/flakes.py [--count=10] [--burn] [pytest's arguments]

Each run has its log in build/flakes; what failed is summed up at the end. With --burn two programs that compute and one
that writes to the disk take part of the machine. They end by themselves when this program is gone.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "flakes"
RUN_SECONDS_MAX = 3600
COMPUTES = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(number * number for number in range(100_000))
"""
WRITES = """
import os, sys
parent, path = os.getppid(), sys.argv[1]
while os.getppid() == parent:
    with open(path, "wb", buffering=0) as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
os.unlink(path)
"""


def burners() -> list["subprocess.Popen[bytes]"]:
    """Start the programs that keep the machine busy."""
    programs = [[COMPUTES], [COMPUTES], [WRITES, str(LOGS / "burnt")]]
    return [subprocess.Popen([sys.executable, "-c", *program]) for program in programs]


def run_once(number: int, arguments: list[str]) -> tuple[list[str], float]:
    """Run the suite, and return what failed and how many seconds it took."""
    log = LOGS / f"run-{number}.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", *arguments]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            status = process.wait(RUN_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            status = stop(process)
        except BaseException:
            stop(process)
            raise
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    if status and not failed:
        failed = [f"exit status {status}"]
    return failed, time.monotonic() - began


def stop(process: "subprocess.Popen[bytes]") -> int:
    """Interrupt a run, which then says what had failed and ends its servers; and kill it if it does not."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(60) or 1
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="how many runs")
    parser.add_argument("--burn", action="store_true", help="beside programs that keep the machine busy")
    options, arguments = parser.parse_known_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in LOGS.glob("run-*.txt"):
        old.unlink()
    busy = burners() if options.burn else []
    failures: Counter[str] = Counter()
    slowest = 0.0
    try:
        for number in range(1, options.count + 1):
            failed, seconds = run_once(number, arguments)
            failures.update(failed)
            slowest = max(slowest, seconds)
            print(f"run {number} · {len(failed)} failed · {told(seconds)}", flush=True)
    finally:
        for burner in busy:
            burner.kill()
            burner.wait()
        (LOGS / "burnt").unlink(missing_ok=True)
    for test, count in failures.most_common():
        print(f"{count} of {options.count}: {test}")
    print(f"runs {options.count} · failures {failures.total()} · slowest {told(slowest)} · logs in {LOGS}")
    return int(failures.total() > 0)


def told(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
