"""A parent whose children are agents: it has imported their framework once, and each child is a fork of it.

Run as a program it reads lines of JSON, what to start and whom to wait for, and answers each. A child is a real
process, killed like any other.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from typing import Any

AHEAD = (
    "langgraph.graph",
    "langgraph.prebuilt",
    "everstep.integrations.langgraph",
    "tests.integrations.shop",
    "tests.integrations.example",
    *(f"langchain_core.tracers.{name}" for name in ("context", "run_collector", "stdout")),
)
AHEAD_FOR_STRANDS = ("strands.multiagent", "everstep.integrations.strands", "tests.integrations.strands_office")
AHEAD_TOO = (
    *("everstep.engine.app.opening", "everstep.engine.app.blocking", "everstep.engine.app.ground"),
    *("everstep.stores.sqlite", "everstep.stores.postgres", "tests.forked", "encodings.ascii", "encodings.idna"),
)


class Nursery:
    """Starts agents and waits for them."""

    def __init__(self, *ahead: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.nursery", *(ahead or AHEAD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, module: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run `module.main(*arguments)` in a child, and return how it ended and what it printed."""
        return self.wait(self.start(module, *arguments, **environment))

    def start(self, module: str, *arguments: str, **environment: str) -> int:
        """Begin to do so, and return the child's number."""
        answer = self._ask(["start", environment, module, arguments])
        assert isinstance(answer, int)
        return answer

    def wait(self, child: int) -> tuple[int, str]:
        """Wait for a child."""
        status, output = self._ask(["wait", child])
        return status, output

    def _ask(self, asked: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the parent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


def begin(environment: dict[str, str], module: str, arguments: list[str], output: int) -> int:
    """Fork a child, and return its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        import_module("tests.forked").arm_crash_points()
        import_module(module).main(*arguments)
        status = 0
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is told
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        sys.stdout.flush()
        os._exit(status)


def serve() -> None:
    """Do what is asked until nobody asks any more."""
    for name in (*sys.argv[1:], *AHEAD_TOO):
        import_module(name)
    import_module("tests.forked").find_crash_points()
    gc.collect()
    gc.freeze()  # else a child's collector would copy all that its parent has
    outputs: dict[int, Any] = {}
    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "start":
            output = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the child has ended
            child = begin(*rest, output.fileno())
            outputs[child] = output
            print(json.dumps(child), flush=True)
        else:
            _, status = os.waitpid(rest[0], 0)
            with outputs.pop(rest[0]) as output:
                output.seek(0)
                said = output.read().decode()
            print(json.dumps([os.waitstatus_to_exitcode(status), said]), flush=True)


if __name__ == "__main__":
    serve()
