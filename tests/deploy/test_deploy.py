"""The files of `deploy/`: valid for those who read them, in agreement with each other, and their commands work."""

import getpass
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from tests.docs.pages import ROOT
from tests.examples.kit import environment
from tests.postgres.server import server
from tests.waiting import wait_until

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
UNIT = (DEPLOY / "everstep-worker.service").read_text("utf-8")
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "worker.yaml").read_text("utf-8")))
POD = MANIFESTS[0]["spec"]["template"]["spec"]


def words_after(instruction: str) -> list[str]:
    """Return the words of an instruction of the Dockerfile that has a JSON list."""
    (found,) = re.findall(rf"^{instruction} (\[.*\])$", DOCKERFILE, flags=re.MULTILINE)
    return [str(word) for word in json.loads(found)]


COMMAND = words_after("ENTRYPOINT") + words_after("CMD")
HEALTH = words_after("HEALTHCHECK .* CMD")


# -- valid -------------------------------------------------------------------------------------------------------------
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_hadolint_finds_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp && pip install everstep\n")
    done = subprocess.run([BIN / "hadolint", tmp_path / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1


def test_the_compose_file_is_one() -> None:
    checker = pytest.importorskip("compose_spec", reason="no checker of compose files on this platform")
    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    assert checker.PyCompose.from_yaml(text).service_names() == ["database", "worker"]
    with pytest.raises(ValueError, match="restarts"):
        checker.PyCompose.from_yaml(text.replace("restart:", "restarts:", 1))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_has_the_schema_of_its_kind(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    wrong = {**manifest, "spec": {**manifest["spec"], "nonsense": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: NOT CHECKED")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "everstep-worker.service"

    def verify(text: str) -> subprocess.CompletedProcess[str]:
        unit.write_text(text)
        return subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)

    here = UNIT.replace("/srv/app/.venv/bin", str(BIN)).replace("User=everstep", f"User={getpass.getuser()}")
    done = verify(here)
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr
    assert "Nonsense" in verify(here.replace("NoNewPrivileges=", "Nonsense=")).stderr


# -- in agreement ------------------------------------------------------------------------------------------------------
def test_all_of_them_start_the_worker_in_the_same_way() -> None:
    (unit,) = re.findall(r"^ExecStart=\S*/(everstep .*)$", UNIT, flags=re.MULTILINE)
    same = ["worker", "app.py", "--concurrency", "100", "--drain", "60"]
    assert COMMAND[1:7] == same
    assert POD["containers"][0]["args"] == COMMAND[1:]
    assert unit.replace(" --processes 2", "").split()[1:7] == same
    assert "command" not in COMPOSE["services"]["worker"], "it is that of the image"


def test_all_of_them_wait_longer_than_a_worker_drains() -> None:
    drain = int(COMMAND[COMMAND.index("--drain") + 1])
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, flags=re.MULTILINE)
    compose = int(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s"))
    assert min(int(stop), compose, POD["terminationGracePeriodSeconds"]) > drain


def test_no_container_runs_as_root_or_writes_to_its_image() -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, flags=re.MULTILINE)
    assert int(user) == POD["securityContext"]["runAsUser"] > 0
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert COMPOSE["services"]["worker"]["read_only"]


def test_the_image_is_built_from_this_checkout_alone(tmp_path: Path) -> None:
    """What the Dockerfile copies is enough to build the package, and is not kept out by the ignore file."""
    assert (DEPLOY / COMPOSE["services"]["worker"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / COMPOSE["services"]["worker"]["build"]["dockerfile"]).is_file()
    allowed = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8"), flags=re.MULTILINE)
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE)]
    sources = [name for names in copied for name in names]
    assert sorted(sources) == sorted(allowed)
    for name in sources:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "dist").glob("everstep-*.whl"))) == 1


# -- at work -----------------------------------------------------------------------------------------------------------
class Worker:
    """The command of the image, without the container, with a store on PostgreSQL."""

    def __init__(self, folder: Path, url: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        shutil.copy(DEPLOY / "app.py", folder)
        self.folder, self.settings = folder, environment(EVERSTEP_URL=url)
        words = [word.replace("8080", str(self.port)) for word in COMMAND]
        self.process = subprocess.Popen([BIN / words[0], *words[1:]], cwd=folder, env=self.settings)

    def is_healthy(self) -> bool:
        words = [word.replace("8080", str(self.port)) for word in HEALTH]
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, timeout=60)
        return done.returncode == 0

    def is_ready(self) -> bool:
        path = POD["containers"][0]["readinessProbe"]["httpGet"]["path"]
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=30).status_code == 200


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    schema = server().fresh_schema()
    made = Worker(tmp_path, server().url(schema))
    yield made
    made.process.kill()
    made.process.wait(60)
    server().drop(schema)


def test_the_worker_of_the_image_gets_healthy_does_a_run_and_stops(worker: Worker) -> None:
    assert HEALTH[0] == "python"
    wait_until(worker.is_healthy, pause=0.2)
    wait_until(worker.is_ready)
    command = [BIN / "everstep", "run", "app.py:hello", '"ann"', "--id", "hello-1", "--json"]
    done = subprocess.run(command, cwd=worker.folder, env=worker.settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Hello ann" in done.stdout
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    assert not worker.is_healthy()
