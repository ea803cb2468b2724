-- Compatible with the version before.

-- Workers and hosts that a person has declared gone for good: who said so, when and why. `name` is the
-- id of a worker (kind `worker`), or of a host (`host`), on which everything that had begun before that time has ended.
CREATE TABLE gone_workers (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    at INTEGER NOT NULL,
    by TEXT NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (kind, name, at)
) STRICT, WITHOUT ROWID;
