-- Compatible with the version before.

-- Workers that provably cannot act any more: the kernel said that their process is gone, or they left after everything
-- that they had begun was seen to end. A worker without a row in `workers` is not for that reason one of them.
CREATE TABLE ended_workers (
    id TEXT NOT NULL PRIMARY KEY,
    at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX ended_workers_at ON ended_workers (at);

-- The file on which the worker's liveness lock is held. A free lock on another file proves nothing.
ALTER TABLE workers ADD COLUMN lock_file TEXT NOT NULL DEFAULT '';
