"""A run whose worker was killed is driven by another one long before its lease lapses. How long it takes is measured by
`make bench`."""

import os
import sys
from pathlib import Path

import pytest

import everstep
from everstep.stores.postgres import PostgresStore
from tests.house.sources import ROOT

TRIALS = 5


def test_another_worker_goes_on_and_does_not_wait_for_the_lease(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import failover  # type: ignore[import-not-found]

    monkeypatch.setattr(failover, "SECONDS_MAX", 25.0)  # a lease lasts thirty

    PostgresStore(url).close()
    path = os.pathsep.join([str(Path(everstep.__file__).parents[1]), *sys.path])
    took = list(failover.failovers(tmp_path, TRIALS, PYTHONPATH=path, BENCH_POSTGRES=url))
    assert len(took) == TRIALS
