"""Files that Everstep writes where others may write, too: nothing of a stranger's is followed, kept or waited for."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import files, workflow
from everstep.engine.verbs import export_file
from everstep.errors import FileChanged, Misuse
from everstep.model import own_files
from everstep.testing import save_history
from everstep.testing.journals import ClientJournal
from everstep.testing.ledger_process import LedgerBook

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_URL", f"sqlite:///{tmp_path / 'runs.db'}")
    Path("victim").write_text("mine")


@workflow(name="planted_greeting")
async def greet(name: str) -> str:
    return f"Hello, {name}"


@workflow(name="planted_doing")
async def doing(what: str, args: list[Any]) -> str:
    await getattr(files, what)(*args)
    return "done"


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def a_link(path: str) -> None:
    os.symlink("victim", path)


def an_open_file(path: str) -> None:
    Path(path).write_text("")
    os.chmod(path, 0o666)


def a_pipe(path: str) -> None:
    os.mkfifo(path)


PLANTED: list[Callable[[str], None]] = [a_link, an_open_file, a_pipe, os.mkdir]


# -- exports -----------------------------------------------------------------------------------------------------------
def export(path: str = "runs.jsonl") -> None:
    async def main() -> None:
        async with everstep.open() as app:
            await app.run(greet, "Ann", id="g-1")
            await app.export(["g-1"], path)

    asyncio.run(main())


def part_names(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name that the next export is written under, as a stranger could guess it."""
    monkeypatch.setattr(own_files, "_numbers", iter(range(7, 99)))
    return f"runs.jsonl.{os.getpid()}-7.part"


@pytest.mark.parametrize("plant", PLANTED)
def test_an_export_is_a_new_private_file_whatever_lies_at_names_beside_it(plant: Callable[[str], None]) -> None:
    plant("runs.jsonl.part")
    before = os.umask(0)
    try:
        export()
    finally:
        os.umask(before)
    assert mode_of("runs.jsonl") == 0o600
    assert b"g-1" in Path("runs.jsonl").read_bytes()
    assert Path("victim").read_text() == "mine"


@pytest.mark.parametrize("plant", [a_link, a_pipe, os.mkdir])
def test_an_export_never_writes_into_what_is_there(
    plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(part_names(monkeypatch))
    with pytest.raises(Misuse, match="not a file of ours"):
        export()
    assert Path("victim").read_text() == "mine"
    assert not os.path.lexists("runs.jsonl")


def test_what_a_killed_export_left_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(part_names(monkeypatch)).write_text("half")
    export()
    assert b"half" not in Path("runs.jsonl").read_bytes()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_name_that_is_taken_at_the_last_moment_is_not_overwritten(
    plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = export_file.Writing.end

    def end_and_lose(writing: export_file.Writing) -> None:
        end(writing)
        plant("runs.jsonl")

    monkeypatch.setattr(export_file.Writing, "end", end_and_lose)
    part = part_names(monkeypatch)
    with pytest.raises(Misuse, match="The export is complete"):
        export()
    assert Path("victim").read_text() == "mine"
    assert b"g-1" in Path(part).read_bytes(), "it is not lost: the runs may be held"
    assert mode_of(part) == 0o600


# -- what else is written ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plant", [a_link, a_pipe, os.mkdir])
def test_pages_pictures_and_golden_histories_do_not_follow_and_do_not_wait(plant: Callable[[str], None]) -> None:
    plant("golden.json")
    asyncio.run(_run_greet())
    with pytest.raises(Misuse, match="Name an ordinary file"), everstep.open() as app:
        save_history(app, "g-1", "golden.json")
    assert Path("victim").read_text() == "mine"


async def _run_greet() -> None:
    async with everstep.open() as app:
        await app.run(greet, "Ann", id="g-1")


def test_a_file_that_is_written_anew_is_private_and_another_one() -> None:
    an_open_file("page.html")
    with open("page.html") as reader:
        own_files.replace("page.html", b"<p>")
        assert reader.read() == "", "whoever has the old one open does not see it"
    assert mode_of("page.html") == 0o600
    assert Path("page.html").read_text() == "<p>"
    assert not list(Path().glob("*.part"))


@pytest.mark.parametrize("plant", [a_link, a_pipe, os.mkdir])
def test_journals_and_ledgers_are_files_of_ones_own(plant: Callable[[str], None], tmp_path: Path) -> None:
    plant("journal.jsonl")
    with pytest.raises(Misuse):
        ClientJournal("journal.jsonl")
    os.mkdir("ledger")
    plant("ledger/ledger.jsonl")
    with pytest.raises(OSError):  # of several kinds
        LedgerBook(tmp_path / "ledger", {})
    assert Path("victim").read_text() == "mine"


# -- file effects ------------------------------------------------------------------------------------------------------
def do(what: str, *args: Any) -> None:
    assert everstep.run(doing, what, list(args)) == "done"


@needs_root
@pytest.mark.parametrize("what", ["write", "append"])
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o1775])
def test_a_file_of_a_stranger_in_a_shared_folder_is_not_written_over(what: str, mode: int, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    an_open_file("shared/report.md")
    os.chown("shared/report.md", STRANGER, STRANGER)
    shared.chmod(mode)
    with pytest.raises(Misuse, match=r"report.md belongs to another user.*Use a folder in which only you can write"):
        do(what, "shared/report.md", "confidential")
    assert Path("shared/report.md").read_text() == ""
    assert os.listdir("shared") == ["report.md"]
    do(what, "shared/new.md", "confidential")
    an_open_file("shared/own.md")
    do(what, "shared/own.md", "confidential")
    assert mode_of("shared/own.md") == 0o666, "that is one's own choice"
    shared.chmod(0o755)
    do(what, "shared/report.md", "confidential")


@pytest.mark.parametrize(
    ("what", "args"),
    [
        ("write", ["folder", "x"]),
        ("append", ["folder", "x"]),
        ("move", ["victim", "folder"]),
        ("move", ["folder", "elsewhere"]),
        ("delete", ["folder"]),
    ],
)
def test_a_folder_is_left_alone_and_named(what: str, args: list[Any]) -> None:
    os.mkdir("folder")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((FileChanged, IsADirectoryError), match="folder"):
        do(what, *args)
    assert os.path.isdir("folder")
    assert Path("victim").read_text() == "mine"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("what", ["write", "append"])
def test_content_is_never_readable_by_more_than_the_file_it_is_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    fsync = os.fsync

    def looking(descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size:
            modes.append(stat.S_IMODE(found.st_mode))
        fsync(descriptor)

    opened: list[int] = []
    open_ = os.open

    def opening(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if str(path).endswith(".everstep"):
            opened.append(mode)
            assert flags & os.O_EXCL
        return open_(path, flags, mode, **options)

    Path("private").write_text("old")
    os.chmod("private", 0o640)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", looking)
        patched.setattr(os, "open", opening)
        do(what, "private", "new")
        do(what, "public", "new")
    assert mode_of("private") == 0o640
    assert mode_of("public") == 0o644
    assert opened[0] == 0o600, "somebody who opened it before its mode was set could read it later"
    assert {0o640, 0o644} <= set(modes)


@pytest.mark.parametrize("what", ["write", "append"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(what: str) -> None:
    os.mkfifo("out")
    with pytest.raises(FileChanged, match="not an ordinary file"):
        do(what, "out", "new")


@needs_root
@pytest.mark.parametrize("what", ["write", "append"])
def test_a_link_of_a_stranger_in_a_shared_folder_is_not_followed(what: str) -> None:
    os.mkdir("shared")
    os.chmod("shared", 0o1777)
    os.symlink("../victim", "shared/out")
    do(what, "shared/out", "!")
    followed = Path("victim").read_text()
    assert followed == ("!" if what == "write" else "mine!"), "one's own link is"
    os.lchown("shared/out", STRANGER, STRANGER)
    with pytest.raises(Misuse, match="every user can write"):
        do(what, "shared/out", "again")
    assert Path("victim").read_text() == followed
