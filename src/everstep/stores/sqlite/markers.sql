-- The statements about markers, in the store and in any other SQLite file. Every name is qualified by `main`: a temporary table
-- of the same name must not be used instead.

-- name: create_markers
-- In the transaction that needs the table first. Not STRICT: SQLite libraries before 3.37 read this file, too.
CREATE TABLE IF NOT EXISTS main.everstep_markers (
    key TEXT NOT NULL PRIMARY KEY,
    run TEXT NOT NULL,
    step TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    outcome BLOB,
    at INTEGER NOT NULL
);

-- name: read_marker
SELECT key, run, step, attempt, outcome, at FROM main.everstep_markers WHERE key = ?;

-- name: write_marker
-- A void marker is replaced; one with an outcome never is, and then no row is changed.
INSERT INTO main.everstep_markers (key, run, step, attempt, outcome, at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET attempt = excluded.attempt, outcome = excluded.outcome, at = excluded.at
WHERE outcome IS NULL;

-- name: marked_runs
-- The runs whose markers are all from before a time.
SELECT run FROM main.everstep_markers GROUP BY run HAVING max(at) < ?;

-- name: forget_markers
DELETE FROM main.everstep_markers WHERE run = ? AND at < ?;
