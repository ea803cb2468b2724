"""Whatever a crash leaves of a history, the code gives the recorded commands again."""

from pathlib import Path

from everstep.codec import Codec
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.verify import load_verified
from everstep.engine.run.resume import replay
from everstep.stores.protocol import RunFilter
from everstep.stores.sqlite import SqliteStore
from everstep.testing.ledger import Ledger
from tests.crash import workload
from tests.crash.test_crash_points import kill_at
from tests.crash.trial import Trial


def test_every_prefix_of_a_history_replays_as_it_was_recorded(place: Path, ledger: Ledger) -> None:
    trial = Trial.new(place, ledger)
    assert kill_at(trial, "store.commit.written", 8)
    trial.run_to_the_end()
    assert not trial.problems
    assert "reference_order" in workload.reference_order.__name__  # importing it has declared its workflows here
    store = SqliteStore(trial.folder / "store.db")
    lengths = []
    for row in store.runs(RunFilter()):
        history = load_verified(store, row)
        lengths.append(len(history))
        for length in range(1, len(history) + 1):
            replayed = replay(store, Codec(), row, DECLARED.named(row.workflow), history[:length], quiet=True)
            replayed.execution.evict()
            assert not replayed.differences, f"{row.id} up to event {length}: {replayed.differences}"
    store.close()
    assert sum(lengths) > 30
