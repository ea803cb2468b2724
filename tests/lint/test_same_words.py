"""What lint says about a mistake is what the engine says when the code runs into it."""

import textwrap
import zlib
from pathlib import Path

import pytest

import everstep
from everstep.errors import Error
from everstep.lint.linting import lint_file
from everstep.worker.loading import load_all

HEAD = """\
import asyncio, os, socket, subprocess, threading, time
from pathlib import Path
import everstep
from everstep import step, workflow

@step
def plain(x=None): ...

@step(effect="once")
async def pay(x): ...

@step
async def outer(x=None):
    {in_step}

@workflow(name="{name}")
{word} flow():
    {body}
"""


@pytest.mark.parametrize(
    ("word", "body"),
    [
        ("async def", "open('x')"),
        ("def", "Path('x').write_text('y')"),
        ("async def", "os.mkdir('x')"),
        ("async def", "os.environ['EVERSTEP_NEVER'] = 'x'"),
        ("async def", "subprocess.run(['true'])"),
        ("async def", "socket.socket()"),
        ("async def", "threading.Thread(target=print).start()"),
        ("def", "time.sleep(0)"),
        ("async def", "input()"),
        ("async def", "await asyncio.to_thread(os.listdir, '.')"),
        ("async def", "plain()"),
        ("def", "outer()"),
        ("async def", "await outer(lambda: 1)"),
        ("async def", "await outer(object())"),
        ("async def", "await outer()"),
    ],
)
def test_lint_and_the_running_engine_use_the_same_words(tmp_path: Path, word: str, body: str) -> None:
    in_step = "await pay(1)" if body == "await outer()" else "return 1"
    name = f"words_{zlib.crc32(f'{word} {body}'.encode())}"
    path = tmp_path / f"{name}.py"
    path.write_text(HEAD.format(word=word, body=body, in_step=in_step, name=name))
    (found,) = lint_file(str(path))
    load_all((str(path),))
    with everstep.open("memory:") as app, pytest.raises(Error) as raised:
        app.run(name)
    assert found.what in str(raised.value)
    assert found.remedy in str(raised.value)


def test_a_run_at_import_is_told_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "runs_at_import.py"
    path.write_text(
        "import everstep\n\n@everstep.workflow\nasync def runs_at_import(): ...\n\neverstep.run(runs_at_import)\n"
    )
    (found,) = lint_file(str(path))
    with pytest.raises(Error) as raised:
        load_all((str(path),))
    assert textwrap.dedent(found.what) in str(raised.value)
    assert "if __name__" in found.remedy
    assert 'if __name__ == "__main__"' in str(raised.value)
