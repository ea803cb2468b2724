"""A run whose worker was killed is driven by another one in about a second."""

import os
import statistics
import sys
from pathlib import Path

import pytest

import everstep
from everstep.stores.postgres import PostgresStore
from tests.house.sources import ROOT

TRIALS = 5


def test_another_worker_goes_on_in_about_a_second(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from failover import failovers  # type: ignore[import-not-found]

    PostgresStore(url).close()
    path = os.pathsep.join([str(Path(everstep.__file__).parents[1]), *sys.path])
    took = list(failovers(tmp_path, TRIALS, PYTHONPATH=path, BENCH_POSTGRES=url))
    assert len(took) == TRIALS
    assert statistics.median(took) < 1.5, took
