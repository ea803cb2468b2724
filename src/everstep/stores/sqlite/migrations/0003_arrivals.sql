-- Compatible with the version before.

-- Runs that were imported, with the last event that they brought along. What is written up to there about restored
-- backups is about other stores. Doubted: where the run came from, a backup may lack what it did.
CREATE TABLE arrivals (
    run TEXT NOT NULL PRIMARY KEY,
    generation INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    doubted INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
