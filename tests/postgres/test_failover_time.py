"""A run whose worker was killed is driven by another one in about a second."""

import json
import subprocess
import sys
from pathlib import Path

import everstep
from everstep.stores.postgres import PostgresStore
from tests.house.sources import ROOT

TRIALS = 5


def test_another_worker_goes_on_in_about_a_second(url: str) -> None:
    PostgresStore(url).close()
    source = str(Path(everstep.__file__).parents[1])
    words = [sys.executable, str(ROOT / "benchmarks" / "failover.py"), url, str(TRIALS)]
    done = subprocess.run(words, env={"PYTHONPATH": source}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["trials"] == TRIALS
    assert figures["median"] < 1.5, figures
