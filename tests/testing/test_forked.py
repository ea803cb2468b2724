"""A program that is forked from a parent does what one does that is started: hundreds of tests rely on it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.forked import PIPE, STDOUT, Program

PROGRAMS = {
    "an end": "print('said')",
    "a status": "import sys; print('said'); sys.exit(3)",
    "a status that is too large": "import sys; sys.exit(259)",
    "a text": "import sys; sys.exit('the reason')",
    "nothing": "import sys; sys.exit()",
    "at its end": "import atexit; atexit.register(print, 'at the end'); print('before')",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('it'))).start()",
    "its words": "import sys; print(sys.argv[1:], __name__)",
    "its path": "import sys; print(sys.path[:2])",
    "its module": "import sys; x = 5; print(sys.modules['__main__'].x, __file__)",
    "its folder": "import os; print(os.getcwd())",
    "its environment": "import os; print(sorted(name for name in os.environ if name != 'LC_CTYPE'))",
    "its input": "import sys; print(repr(sys.stdin.read()))",
    "both outputs": "import sys; print('one'); print('two', file=sys.stderr)",
    "a kill": "import os; print('said', flush=True); os.kill(os.getpid(), 9)",
    "a kill before its output": "import os; print('said'); os.kill(os.getpid(), 9)",
    "an interruption": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
    "a crash point": "from everstep.engine.code import execution; from everstep.model.crash_points import crash_point\n"
    "crash_point('run.claimed'); print('passed'); crash_point('run.claimed'); print('never')",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_forked_program_does_what_a_started_one_does(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, str(tmp_path / "program.py"), "a word", "--flag"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"env": {**kept, "EVERSTEP_CRASH_AT": "run.claimed:2"}, "cwd": tmp_path / "elsewhere"}
    started = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    done = forked.run(command, capture_output=True, text=True, **options)
    assert (done.returncode, done.stdout) == (started.returncode, started.stdout)
    if name != "an interruption":  # what it says of that names other lines
        assert done.stderr == started.stderr


def test_what_it_raises_is_told_and_its_status_is_1(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise LookupError('no car')")
    done = forked.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("LookupError: no car\n")


def test_programs_in_a_row_have_different_hashes_and_a_seed_that_is_asked_for_is_had() -> None:
    command = [sys.executable, "-c", "print(hash('a'))"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    hashes = [forked.run(command, capture_output=True, text=True, env=kept).stdout for _ in range(2)]
    assert len(set(hashes)) == 2
    seeded = {**kept, "PYTHONHASHSEED": "1"}
    assert forked.run(command, capture_output=True, text=True, env=seeded).stdout == (
        subprocess.run(command, capture_output=True, text=True, env=seeded).stdout
    )


def test_it_is_stopped_woken_and_killed_and_its_number_is_its_own() -> None:
    code = (
        "import os, signal, time; print(os.getpid(), flush=True); signal.raise_signal(signal.SIGSTOP); time.sleep(60)"
    )
    with Program([sys.executable, "-c", code], stdout=PIPE, stderr=STDOUT, text=True) as program:
        assert int(program.stdout.readline()) == program.pid
        program.wait_until_stopped()
        with pytest.raises(subprocess.TimeoutExpired):
            program.communicate(timeout=0.05)
        program.send_signal(signal.SIGCONT)
        assert program.poll() is None
        program.kill()
        assert program.wait(10) == -signal.SIGKILL
        assert program.communicate(timeout=10) == ("", None)


def test_what_was_imported_ahead_has_started_no_thread_and_opened_no_file() -> None:
    code = "import os, threading; print(threading.active_count(), sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1 [0, 1, 2]\n"
