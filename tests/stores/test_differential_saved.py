"""Random changes of threads and items give equal verdicts and equal reads on every store, and on a model."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.stores.protocol import Store
from everstep.stores.rows.saved import (
    ChangeItems,
    ChangeThread,
    FreeThread,
    SavedItem,
    SavedPart,
    SavedState,
    SavedWrite,
    TakeThread,
)
from tests.stores.kit import HARNESSES, Harness, ModelHarness

THREADS, NAMESPACES, IDS, WORKERS = ["t", "u"], ["", "n"], ["1", "2", "3"], ["w0", "w1"]
threads, namespaces, ids = st.sampled_from(THREADS), st.sampled_from(NAMESPACES), st.sampled_from(IDS)
workers, times, numbers = st.sampled_from(["", *WORKERS]), st.integers(0, 40), st.integers(0, 2)
values = st.sampled_from([b"", b"1", b"\0\xff"])
texts = st.sampled_from(["", "a", "b\0c", "ü"])

states = st.builds(SavedState, namespaces, ids, ids, texts, values, values, times)
parts = st.builds(SavedPart, namespaces, texts, ids, numbers, values, values)
writes = st.builds(SavedWrite, namespaces, ids, texts, st.integers(-2, 2), texts, texts, values, values)
items = st.builds(SavedItem, texts, texts, values, times, times, st.none() | times, st.none() | st.just(1.5))
changes = st.builds(
    ChangeThread,
    threads,
    times,
    workers,
    numbers,
    states=st.lists(states, max_size=3, unique_by=lambda one: one[:2]),
    parts=st.lists(parts, max_size=3, unique_by=lambda one: one[:4]),
    writes=st.lists(writes, max_size=3),
    rewrites=st.lists(writes, max_size=2),
    forgotten=st.lists(st.tuples(namespaces, ids), max_size=1),
    unneeded=st.lists(st.tuples(namespaces, texts, ids), max_size=1),
    everything=st.sampled_from([False, False, False, True]),
    unchanged_since=st.none() | times,
)
operations = st.one_of(
    changes,
    changes,
    st.builds(TakeThread, threads, st.sampled_from(WORKERS), times),
    st.builds(FreeThread, threads, st.sampled_from(WORKERS), numbers),
    st.builds(
        ChangeItems,
        st.lists(items, max_size=2),
        st.lists(st.tuples(texts, texts), max_size=1),
        st.lists(st.tuples(texts, texts, times), max_size=1),
        st.lists(st.tuples(texts, texts, times), max_size=2),
    ),
)


def everything(store: Store) -> list[Any]:
    """Return all that can be read."""
    saved, found = store.saved, []
    for thread in THREADS:
        found += [saved.states(thread), saved.states(thread, None, ("2", "n"), 2), sorted(saved.series(thread))]
        found.append(saved.owner(thread))
        for namespace in NAMESPACES:
            found += [saved.states(thread, namespace, ("3", ""), 1), saved.writes(thread, namespace, ["1", "3"])]
            found += [saved.lineage(thread, namespace, "3", 5), saved.state(thread, namespace, "2")]
        found += [saved.parts(thread, *place, 1) for place in sorted(saved.series(thread))]
    for prefix in ("", "a", "b"):
        found += [saved.items(prefix, 20), saved.items(prefix, 5, ("a", ""), 2), saved.item(prefix, "a", 10)]
    found += [saved.threads(), saved.threads("t"), saved.threads(before=20), saved.of_origins(["a", ""])]
    return [*found, saved.namespaces(10), sorted(saved.dead_items(30))]


def same_on(store: str, batches: list[list[Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        reference, other = ModelHarness(Path(folder)), HARNESSES[store](Path(folder))
        try:
            compare(reference, other, batches)
        finally:
            other.close()
            reference.close()


def compare(reference: Harness, other: Harness, batches: list[list[Any]]) -> None:
    for harness in (reference, other):
        for number, worker in enumerate(WORKERS):
            harness.store.register_worker(worker, 1, "host", 10 + 30 * number)
    for batch in batches:
        assert other.do(*batch) == reference.do(*batch)
        assert everything(other.store) == everything(reference.store)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(operations, min_size=1, max_size=4), max_size=6))
def test_sqlite_does_as_the_model_does(batches: list[list[Any]]) -> None:
    same_on("sqlite", batches)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(operations, min_size=1, max_size=4), max_size=5))
def test_postgresql_does_as_the_model_does(batches: list[list[Any]]) -> None:
    pytest.importorskip("psycopg")
    same_on("postgres", batches)
