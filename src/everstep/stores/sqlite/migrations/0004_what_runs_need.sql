-- Compatible with the version before.

-- The runs that have received a run's end: before that run is deleted, its worker checks whether one of them may still need it.
CREATE INDEX signals_child ON signals (name, run) WHERE kind = 'child';

-- Keys that a fork or a retried run depends on, because it goes back over what was done under them: they are not forgotten
-- while that run may continue.
CREATE TABLE relied (
    key TEXT NOT NULL,
    run TEXT NOT NULL,
    PRIMARY KEY (key, run)
) STRICT, WITHOUT ROWID;

CREATE INDEX relied_run ON relied (run);
