-- The statements about queues of runs and named limits of steps.
--
-- Runs that wait in a queue are found by `runs_in_line` and `runs_delayed`, those that have a slot by `runs_begun`: all of
-- them are partial, so that runs of the queue `default`, and ended ones, cost nothing. The key of a run is its tag `key`,
-- as `tagged` has it.
--
-- Whoever counts slots or takes a token has the lock of the queue first: each statement sees what was committed before
-- it began, so nobody else can take the same slot.

-- name: lock_queues
-- A queue may have no row yet, so it is not a row that is locked. In a fixed order, after runs and keys. $2 is the schema.
SELECT pg_advisory_xact_lock(hash) FROM (
    SELECT DISTINCT hashtextextended($2::text || '/' || name, 1) AS hash FROM unnest($1::text[]) AS wanted (name) ORDER BY 1
) AS hashes;

-- name: queues_of_runs
-- Which queues are to be locked. The runs are locked already, so they stay where they are.
SELECT DISTINCT queue FROM everstep.runs WHERE id = ANY ($1::text[]) AND queue <> 'default';

-- name: queue
-- One queue or limit.
SELECT kind, name, concurrency, per_worker, per_key, rate, seconds, paused, full_at, changed_at
FROM everstep.queues WHERE kind = $1 AND name = $2;

-- name: queues
-- Few rows.
SELECT kind, name, concurrency, per_worker, per_key, rate, seconds, paused, full_at, changed_at
FROM everstep.queues ORDER BY kind, name;

-- name: keep_queue
-- As it is after a change.
INSERT INTO everstep.queues (
    kind, name, concurrency, per_worker, per_key, rate, seconds, paused, full_at, changed_at
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
ON CONFLICT (kind, name) DO UPDATE SET
    concurrency = excluded.concurrency, per_worker = excluded.per_worker, per_key = excluded.per_key,
    rate = excluded.rate, seconds = excluded.seconds, paused = excluded.paused, full_at = excluded.full_at,
    changed_at = excluded.changed_at;

-- name: take_token
-- With each claim of a run, and each slot, where there is a rate.
UPDATE everstep.queues SET full_at = $3 WHERE kind = $1 AND name = $2;

-- name: place_of_run
-- What decides whether a run may be claimed out of its queue.
SELECT status, queue, wake_at, (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1),
    EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = runs.owner), owner
FROM everstep.runs WHERE id = $1;

-- name: names_waiting
-- The queues in which runs wait. It hops from name to name in the indexes and never walks their runs.
WITH RECURSIVE names (name) AS (
    SELECT least(
        (SELECT min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL),
        (SELECT min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NOT NULL)
    )
    UNION ALL
    SELECT least(
        (SELECT min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL AND queue > names.name),
        (SELECT min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NOT NULL
                AND queue > names.name)
    ) FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL;

-- name: names_begun
-- The queues of which runs have begun, in the same way.
WITH RECURSIVE names (name) AS (
    SELECT min(queue) FROM everstep.runs
    WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    UNION ALL
    SELECT (SELECT min(queue) FROM everstep.runs
        WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
            AND queue > names.name)
    FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL;

-- name: front
-- Whether any run waits for a slot only, and when the next of those with a delay comes. One look into each index.
SELECT EXISTS (SELECT 1 FROM everstep.runs
        WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1 AND wake_at IS NULL),
    (SELECT min(wake_at) FROM everstep.runs
        WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1 AND wake_at IS NOT NULL);

-- name: begun
-- How many slots are taken. Whoever claimed a run and died before it began has none.
SELECT count(*) FROM everstep.runs
WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    AND queue = $1 AND (status <> 'queued' OR EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner));

-- name: begun_by
-- Those of one worker.
SELECT count(*) FROM everstep.runs
WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    AND queue = $1 AND owner = $2 AND EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = $2);

-- name: begun_with_key
-- How many slots each key has. $2: only of this key.
SELECT key, count(*) FROM (
    SELECT (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) AS key
    FROM everstep.runs
    WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
        AND queue = $1 AND (status <> 'queued' OR EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner))
) AS begun
WHERE key IS NOT NULL AND ($2::text IS NULL OR key = $2::text) GROUP BY key;

-- name: waiting
-- The first that wait for a slot only, in their order. $4: keys that have no room.
SELECT priority, created_at, id, (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1)
FROM everstep.runs
WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1 AND wake_at IS NULL
    AND workflow = ANY ($2::text[])
    AND (cardinality($4::text[]) = 0 OR coalesce(
        (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) <> ALL ($4::text[]), true))
ORDER BY priority DESC, created_at, id LIMIT $3;

-- name: come_due
-- Those whose delay is over, the longest due first.
SELECT priority, created_at, id, (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1)
FROM everstep.runs
WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1 AND wake_at IS NOT NULL AND wake_at <= $5
    AND workflow = ANY ($2::text[])
    AND (cardinality($4::text[]) = 0 OR coalesce(
        (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) <> ALL ($4::text[]), true))
ORDER BY wake_at, id LIMIT $3;

-- name: count_waiting
-- For people: how many wait.
SELECT count(*) - count(wake_at), count(wake_at), min(CASE WHEN wake_at IS NULL THEN created_at END)
FROM everstep.runs WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1;

-- name: forget_slots
-- Those whose workers are gone.
DELETE FROM everstep.slots
WHERE name = $1 AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = slots.worker);

-- name: count_slots
-- How many there are, and whether one of them is this attempt's.
SELECT count(*), coalesce(bool_or(run = $2 AND call = $3 AND worker = $4), false) FROM everstep.slots WHERE name = $1;

-- name: take_slot
-- Of a worker that was fenced, the row becomes that of the new one.
INSERT INTO everstep.slots (name, run, call, worker, since) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (name, run, call) DO UPDATE SET worker = excluded.worker, since = excluded.since;

-- name: free_slot
-- Only its own: another worker may have taken the run over.
DELETE FROM everstep.slots WHERE name = $1 AND run = $2 AND call = $3 AND worker = $4;

-- name: slots
-- Of workers that are there.
SELECT name, run, call, worker, since FROM everstep.slots
WHERE EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = slots.worker) ORDER BY name, since, run, call;
