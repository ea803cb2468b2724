-- Compatible with the version before.

-- Runs that were imported, with the last event that they brought along. What is written up to there about restored
-- backups is about other stores. Doubted: where the run came from, a backup may lack what it did.
CREATE TABLE everstep.arrivals (
    run text COLLATE "C" PRIMARY KEY,
    generation bigint NOT NULL,
    seq bigint NOT NULL,
    doubted bigint NOT NULL
);
