"""The packages as users get them: built from a clean checkout, installed elsewhere, and used there."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from everstep import __version__
from everstep.cli.group import MODULES
from tests.docs.pages import ROOT, script

README = script((ROOT / "README.md").read_text("utf-8"))
EVERY_HELP = """
from everstep.cli import main
from everstep.cli.group import MODULES
for name in MODULES:
    try:
        main([name, "--help"])
    except SystemExit as exited:
        assert not exited.code, name
"""


class Packages(NamedTuple):
    wheel: Path
    sdist: Path


def run(*command: str | Path, folder: Path | None = None, **settings: str) -> str:
    """Run a command without this environment's settings, and return what it printed."""
    ours = ("EVERSTEP_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(command, cwd=folder, env={**kept, **settings}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Build both from the files that a clone has: the sdist, and from this the wheel."""
    clone, made = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("made")
    for name in run("git", "-C", ROOT, "ls-files", "-z").split("\0"):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, clone)
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    return Packages(wheel, sdist)


class Environment:
    """An environment in which nothing was installed, until a package is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder)

    def install(self, *what: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.folder / "bin" / "python", "install", "--quiet", *what)

    def borrow_dependencies(self) -> None:
        """See what is installed for these tests. Its own `.pth` files, such as that of our sources, are not read."""
        (packages,) = (self.folder / "lib").glob("python*/site-packages")
        (packages / "borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")

    def command(self, *words: str | Path, folder: Path) -> str:
        executable, *arguments = words
        return run(self.folder / "bin" / executable, *arguments, folder=folder)


def use(environment: Environment, folder: Path) -> None:
    """Run the README's program twice, look at it, and ask every command for its help."""
    (folder / "report.py").write_text(README)
    where = environment.command("python", "-c", "import everstep; print(everstep.__file__)", folder=folder)
    assert where.startswith(str(environment.folder)), "the package is tested, and not these sources"
    first = environment.command("python", "report.py", folder=folder)
    assert first.startswith("report-")
    assert environment.command("python", "report.py", folder=folder) == first
    assert "report-1" in environment.command("everstep", "ls", folder=folder)
    helps = environment.command("python", "-c", EVERY_HELP, folder=folder)
    assert helps.count("Usage: ") == len(MODULES)


def test_the_packages_contain_what_they_should(packages: Packages) -> None:
    names = set(zipfile.ZipFile(packages.wheel).namelist())
    ours = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} <= names
    assert not [name for name in names if not name.startswith(("everstep/", f"everstep-{__version__}.dist-info/"))]
    with tarfile.open(packages.sdist) as sdist:
        top = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert {"src", "tests", "docs", "examples", "deploy", "Makefile", "constraints.txt", "LICENSE"} <= top
    metadata = zipfile.ZipFile(packages.wheel).read(f"everstep-{__version__}.dist-info/METADATA").decode()
    assert "Operating System :: POSIX :: Linux" in metadata
    assert "OS Independent" not in metadata


def test_the_wheel_works_where_it_is_installed(packages: Packages, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.install("--no-deps", packages.wheel)
    environment.borrow_dependencies()
    use(environment, tmp_path)


# -- with what PyPI has, in an environment without anything of ours ----------------------------------------------------
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_package_brings_all_it_needs_along(packages: Packages, tmp_path: Path, kind: str) -> None:
    environment = Environment(tmp_path / "environment")
    environment.install(getattr(packages, kind))
    use(environment, tmp_path)
    for name in MODULES:
        assert "Usage: everstep" in environment.command("everstep", name, "--help", folder=tmp_path)
    environment.command("everstep", "demo", "--folder", tmp_path / "demo", folder=tmp_path)


def indexes_for_uv() -> dict[str, str]:
    """Return where pip is configured to look for packages, as settings of uv, which has the same names for them."""
    listed = (line.partition("=") for line in run(sys.executable, "-m", "pip", "config", "list").splitlines())
    settings = {name.rpartition(".")[2]: value.strip("'") for name, _, value in listed}
    where = {name: value for name, value in settings.items() if name.endswith(("url", "links"))}
    return {f"UV_{name.replace('-', '_').upper()}": value for name, value in where.items()}


@pytest.mark.soak
def test_pipx_and_uvx_run_the_wheel(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(README)
    tools = Path(sys.executable).parent
    word = ["everstep", "run", "report.py:report", '"tides"', "--id", "report-1"]
    home = {"PIPX_HOME": str(tmp_path / "pipx"), "UV_CACHE_DIR": str(tmp_path / "uv"), **indexes_for_uv()}
    pipx = run(tools / "pipx", "run", "--spec", packages.wheel, *word, folder=tmp_path, **home)
    uvx = run(tools / "uvx", "--python", sys.executable, "--from", packages.wheel, *word, folder=tmp_path, **home)
    assert "report-" in pipx
    assert "report-" in uvx
