"""File effects: old or new content at any moment, each done once, and nothing of ours is left lying about."""

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import blocking, files, workflow
from everstep.errors import FileChanged, Misuse
from tests.engine.resume_helpers import PRELUDE, run_program

KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_URL", f"sqlite:///{tmp_path / 'runs.db'}")


@workflow
async def doing(what: str, args: list[Any], options: dict[str, Any]) -> str:
    await getattr(files, what)(*args, **options)
    return "done"


def do(what: str, *args: Any, **options: Any) -> None:
    assert everstep.run(doing, what, list(args), options) == "done"


def inode(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def leftovers() -> list[Path]:
    return [path for path in Path().rglob("*") if path.name.endswith(".everstep")]


# -- what each does ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", ["größe\n", b"\x00\xff", ""])
def test_text_and_bytes_are_written_and_appended(content: str | bytes) -> None:
    stored = content.encode() if isinstance(content, str) else content
    do("write", "a", content)
    assert Path("a").read_bytes() == stored
    do("append", "a", content)
    assert Path("a").read_bytes() == stored * 2
    do("append", "new", content)
    assert Path("new").read_bytes() == stored
    assert not leftovers()


def test_what_is_right_already_is_not_touched() -> None:
    do("write", "a", "x")
    before = inode("a")
    do("write", "a", "x")
    do("write", "a", "x", expected="something else: it is as it should be")
    assert inode("a") == before


def test_expected_refuses_a_stranger_s_edit() -> None:
    Path("a").write_text("a stranger's")
    for expected in ("mine", b"mine", None):
        with pytest.raises(FileChanged) as caught:
            do("write", "a", "new", expected=expected)
        assert caught.value.path == "a"
        assert Path("a").read_text() == "a stranger's"
    do("write", "a", "new", expected="a stranger's")
    assert Path("a").read_text() == "new"
    do("write", "b", b"new", expected=None)
    assert Path("b").read_text() == "new"
    with pytest.raises(FileChanged):
        do("write", "c", "new", expected="old")
    assert not Path("c").exists()
    assert not leftovers()


@pytest.mark.parametrize("mode", [0o600, 0o755, 0o666, 0o444, 0o640])
def test_modes_are_kept(mode: int) -> None:
    Path("a").write_text("old")
    os.chmod("a", mode)
    do("write", "a", "new")
    do("append", "a", "!")
    do("move", "a", "b")
    assert Path("b").read_text() == "new!"
    assert stat.S_IMODE(os.stat("b").st_mode) == mode


def test_a_new_file_has_the_mode_of_the_umask() -> None:
    before = os.umask(0o027)
    try:
        do("write", "a", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("a").st_mode) == 0o640


def test_a_link_keeps_pointing_at_the_file_that_is_written() -> None:
    Path("real").write_text("old")
    os.symlink("real", "link")
    do("write", "link", "new")
    do("append", "link", "!")
    assert os.readlink("link") == "real"
    assert Path("real").read_text() == "new!"


def test_move_refuses_to_overwrite_unless_told_to() -> None:
    Path("a").write_text("a")
    Path("b").write_text("b")
    with pytest.raises(FileChanged):
        do("move", "a", "b")
    assert (Path("a").read_text(), Path("b").read_text()) == ("a", "b")
    do("move", "a", "b", overwrite=True)
    assert Path("b").read_text() == "a"
    assert not Path("a").exists()
    os.mkdir("d")
    do("move", "b", "d/c")
    assert Path("d/c").read_text() == "a"


def test_a_file_that_was_never_there_is_not_moved() -> None:
    Path("b").write_text("b")
    with pytest.raises(FileNotFoundError):
        do("move", "a", "b")
    with pytest.raises(FileNotFoundError):
        do("move", "a", "c")
    assert Path("b").read_text() == "b"


def test_delete_and_make_folder_may_find_it_done() -> None:
    Path("a").write_text("a")
    do("delete", "a")
    do("delete", "a")
    do("delete", "no/such/folder/a")
    assert not Path("a").exists()
    do("make_folder", "x/y/z")
    do("make_folder", "x/y/z")
    assert Path("x/y/z").is_dir()


def test_a_path_may_be_an_object() -> None:
    @workflow(name="with_paths")
    async def with_paths() -> None:
        await files.make_folder(Path("d"))
        await files.write(Path("d") / "a", "x")
        await files.append(Path("d") / "a", "y")
        await files.move(Path("d") / "a", Path("d") / "b")
        await files.delete(Path("d") / "none")

    everstep.run(with_paths)
    assert Path("d/b").read_text() == "xy"


def test_a_full_disk_leaves_the_old_content_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    Path("a").write_text("old")
    monkeypatch.setattr("everstep.effects.files.os.replace", full)
    for what in ("write", "append"):
        with pytest.raises(OSError, match="No space"):
            do(what, "a", "new")
    assert Path("a").read_text() == "old"
    assert not leftovers()


# -- def workflows, and misuse -----------------------------------------------------------------------------------------
@workflow
def plainly() -> None:
    blocking.files.make_folder("d")
    blocking.files.write("d/a", "x", expected=None)
    blocking.files.append("d/a", b"y")
    blocking.files.move("d/a", "d/b")
    blocking.files.write("d/c", "c", witness=False)
    blocking.files.delete("d/c")
    assert blocking.expect(everstep.witness.file("d/b"))["text"] == "xy"


def test_def_workflows_have_the_same_functions() -> None:
    everstep.run(plainly)
    assert {path.name: path.read_text() for path in Path("d").iterdir()} == {"b": "xy"}
    assert set(files.__all__) == {name for name in vars(blocking.files) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("what", "args"),
    [("write", ("a", "x")), ("append", ("a", "x")), ("move", ("a", "b")), ("delete", ("a",)), ("make_folder", ("a",))],
)
def test_outside_of_a_workflow_it_says_so(what: str, args: tuple[str, ...]) -> None:
    with pytest.raises(Misuse, match=rf"everstep\.files\.{what}\(\) is for workflow code"):
        asyncio.run(getattr(files, what)(*args))
    with pytest.raises(Misuse, match=rf"everstep\.blocking\.files\.{what}\(\) is for `def` workflows"):
        getattr(blocking.files, what)(*args)
    assert not Path("a").exists()


# -- several at once ---------------------------------------------------------------------------------------------------
APPENDING = """
    @workflow
    async def appending(name):
        for _ in range(20):
            await everstep.files.append("log.txt", "the same line\\n", witness=False)

    everstep.run(appending, sys.argv[2], id=sys.argv[2], url=f"{URL}-{sys.argv[2]}")
"""


def test_runs_that_append_the_same_at_once_lose_nothing(tmp_path: Path) -> None:
    @workflow(name="appending_here")
    async def appending_here(name: str) -> None:
        for _ in range(10):
            await files.append("log.txt", "the same line\n", witness=False)

    async def main() -> None:
        async with everstep.open() as app:
            runs = [await app.start(appending_here, name) for name in "abc"]
            await asyncio.gather(*(run.result(timeout=60) for run in runs))

    with ThreadPoolExecutor() as pool:
        other = pool.submit(run_program, tmp_path, APPENDING, "other")
        asyncio.run(main())
        assert other.result()[0] == 0
    assert Path("log.txt").read_text() == "the same line\n" * 50
    assert not leftovers()


def test_an_append_that_was_cut_off_is_not_taken_for_another_s(tmp_path: Path) -> None:
    """It was begun and has not happened; meanwhile somebody appends just that."""
    code = """
    @workflow
    async def one():
        await everstep.files.append("log.txt", "x\\n", witness=False)

    everstep.run(one, id="one", url=URL)
    """
    assert run_program(tmp_path, code, environment={"EVERSTEP_CRASH_AT": "body.before:1"})[0] == KILLED
    Path("log.txt").write_text("x\n")
    assert run_program(tmp_path, code)[0] == 0
    assert Path("log.txt").read_text() == "x\nx\n"


# -- killed at every system call ---------------------------------------------------------------------------------------
CALLS = "write,fsync,rename,renameat,renameat2,openat,unlink,unlinkat,mkdir,mkdirat,flock,fchmod"
PATHS = ("", "a", "b", "x", "x/y", ".beside.everstep", ".mark.everstep")
PROGRAM = """
    import json
    from pathlib import Path
    from everstep.effects import files as bodies

    def beside(target, of):  # under names that strace can be told
        return target.with_name(".mark.everstep" if of.startswith("mark") else ".beside.everstep")

    bodies._beside = beside

    @workflow(name="doing")
    async def doing(what, args, options):
        await getattr(everstep.files, what)(*args, **options)
        return "done"

    everstep.run(doing, sys.argv[2], json.loads(sys.argv[3]), {}, id="one", url=URL)
"""
Contents = dict[str, str]
EFFECTS: dict[str, tuple[list[str], Contents, Contents, int]] = {
    # name: (arguments, the folder before, the folder after, so many kills at least)
    "write": (["a", "new"], {"a": "old"}, {"a": "new"}, 8),
    "append": (["a", "+"], {"a": "old"}, {"a": "old+"}, 9),
    "move": (["a", "b"], {"a": "old"}, {"b": "old"}, 8),
    "delete": (["a"], {"a": "old", "b": "b"}, {"b": "b"}, 4),
    "make_folder": (["x/y"], {}, {}, 4),
}


@pytest.fixture(scope="module")
def strace() -> None:
    if shutil.which("strace") is not None:
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "inject=getppid:signal=SIGKILL:when=1"]
        program = [sys.executable, "-c", "import os; os.getppid(); os.getppid()"]
        if subprocess.run([*command, *program], capture_output=True).returncode in (KILLED, 128 - KILLED):
            return
    pytest.skip("strace is not installed or may not trace here, so no process is killed at its system calls")


def content_of(folder: Path) -> Contents:
    found = [one for one in folder.iterdir() if one.is_file() and not one.name.endswith(".everstep")]
    return {one.name: one.read_text() for one in found}


def arguments(out: Path, effect: str) -> list[str]:
    names = EFFECTS[effect][0]
    return [str(out / names[0]), *(str(out / name) if effect == "move" else name for name in names[1:])]


def kill_at(folder: Path, effect: str, call: str, number: int) -> int:
    """Let a process do the effect, and kill it at the n-th such system call that is about its folder; 0: at none."""
    before = EFFECTS[effect][1]
    folder.mkdir()
    out = folder / "out"
    out.mkdir()
    for name, text in before.items():
        (out / name).write_text(text)
    args = arguments(out, effect)
    (folder / "program.py").write_text(PRELUDE + textwrap.dedent(PROGRAM))
    paths = [part for name in PATHS for part in ("-P", str(out / name) if name else str(out))]
    tracing = ["strace", "-f", "-qq", "-o", str(folder / "trace"), *paths, "-e", f"trace={CALLS}"]
    injected = ["-e", f"inject={call}:signal=SIGKILL:when={number}"] if number else []
    program = [sys.executable, str(folder / "program.py"), str(folder / "runs.db"), effect, json.dumps(args)]
    done = subprocess.run([*tracing, *injected, *program], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, KILLED, 128 - KILLED), done.stderr
    return done.returncode


def resume(folder: Path, effect: str, seen: list[Contents]) -> None:
    _, before, after, _ = EFFECTS[effect]
    out = folder / "out"
    seen.append(content_of(out))
    assert seen[-1] in (before, after)
    everstep.run(doing, effect, arguments(out, effect), {}, id="one", url=str(folder / "runs.db"))
    assert content_of(out) == after
    assert effect != "make_folder" or (out / "x/y").is_dir()


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("effect", EFFECTS)
def test_killed_at_any_system_call_it_is_old_or_new_and_then_done_once(
    tmp_path: Path, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(target: Path, of: str) -> Path:
        return target.with_name(".mark.everstep" if of.startswith("mark") else ".beside.everstep")

    monkeypatch.setattr("everstep.effects.files._beside", named)
    undisturbed = tmp_path / "undisturbed"
    assert kill_at(undisturbed, effect, "", 0) == 0
    made = [line.split()[1].partition("(")[0] for line in (undisturbed / "trace").read_text().splitlines()]
    places = [(call, number) for call in sorted(set(made)) for number in range(1, made.count(call) + 1)]
    assert len(places) >= EFFECTS[effect][3], places
    folders = [tmp_path / f"{call}-{number}" for call, number in places]
    seen: list[Contents] = []
    kills = 0
    with ThreadPoolExecutor(2) as pool:
        statuses = pool.map(lambda folder, place: kill_at(folder, effect, *place), folders, places)
        for folder, status in zip(folders, statuses, strict=True):
            kills += status != 0
            resume(folder, effect, seen)
    assert kills == len(places)
    assert EFFECTS[effect][1] in seen
    assert EFFECTS[effect][2] in seen
    assert not leftovers()


@pytest.mark.parametrize("point", ["body.before:2", "body.after:2", "body.after:1"])
def test_an_append_is_done_once_wherever_its_mark_is_taken_away(tmp_path: Path, point: str) -> None:
    code = """
    @workflow
    async def one():
        await everstep.files.append("log.txt", "x")

    everstep.run(one, id="one", url=URL)
    """
    assert run_program(tmp_path, code, environment={"EVERSTEP_CRASH_AT": point})[0] == KILLED
    assert run_program(tmp_path, code)[0] == 0
    assert Path("log.txt").read_text() == "x"
    assert not leftovers()


@pytest.mark.parametrize("changed", ["mine", "new", None])
def test_what_a_cut_off_attempt_left_is_cleaned_up_also_when_nothing_is_to_be_done(
    tmp_path: Path, changed: str | None
) -> None:
    code = """
    from everstep.effects import files as bodies

    def die(*_, **__):
        os.kill(os.getpid(), 9)

    @workflow
    async def one():
        try:
            await everstep.files.write("a", "new", expected="old")
        except everstep.errors.FileChanged:
            print("changed")

    if len(sys.argv) > 2:
        os.replace = die
    everstep.run(one, id="one", url=URL)
    """
    Path("a").write_text("old")
    assert run_program(tmp_path, code, "die")[0] == KILLED
    assert len(leftovers()) == 1
    if changed is not None:
        Path("a").write_text(changed)
    assert run_program(tmp_path, code) == (0, "changed\n" if changed == "mine" else "")
    assert Path("a").read_text() == (changed or "new")
    assert not leftovers()
