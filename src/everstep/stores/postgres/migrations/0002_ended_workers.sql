-- Compatible with the version before.

-- Workers that provably cannot act any more: the kernel said that their process is gone, or they left after everything
-- that they had begun was seen to end. A worker without a row in `workers` is not for that reason one of them.
CREATE TABLE everstep.ended_workers (
    id text COLLATE "C" PRIMARY KEY,
    at bigint NOT NULL
);

CREATE INDEX ended_workers_at ON everstep.ended_workers (at);
