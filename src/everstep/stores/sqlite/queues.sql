-- The statements about queues of runs and named limits of steps.
--
-- Runs that wait in a queue are found by `runs_queued`, those that have a slot by `runs_begun`: both are partial, so that
-- runs of the queue `default`, and ended ones, cost nothing.

-- name: queue
-- One queue or limit.
SELECT kind, name, concurrency, per_worker, per_key, rate, seconds, paused, full_at, changed_at
FROM queues WHERE kind = ?1 AND name = ?2;

-- name: queues
-- Few rows.
SELECT kind, name, concurrency, per_worker, per_key, rate, seconds, paused, full_at, changed_at
FROM queues ORDER BY kind, name;

-- name: keep_queue
-- The settings after a change.
INSERT INTO queues (kind, name, concurrency, per_worker, per_key, rate, seconds, paused, full_at, changed_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (kind, name) DO UPDATE SET
    concurrency = ?3, per_worker = ?4, per_key = ?5, rate = ?6, seconds = ?7, paused = ?8, full_at = ?9, changed_at = ?10;

-- name: take_token
-- With each claim of a run, and each slot, where there is a rate.
UPDATE queues SET full_at = ?3 WHERE kind = ?1 AND name = ?2;

-- name: place_of_run
-- The columns that decide whether a run may be claimed from its queue.
SELECT CAST(status AS BLOB), CAST(queue AS BLOB), wake_at,
    CAST(CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END AS BLOB),
    EXISTS (SELECT 1 FROM workers WHERE workers.id = runs.owner), CAST(owner AS BLOB)
FROM runs WHERE id = ?1;

-- name: names_waiting
-- The queues in which runs wait. It hops from name to name in the index and never walks their runs.
WITH RECURSIVE names (name) AS (
    SELECT min(queue) FROM runs INDEXED BY runs_queued
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default'
    UNION ALL
    SELECT (SELECT min(queue) FROM runs INDEXED BY runs_queued
        WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue > names.name)
    FROM names WHERE names.name IS NOT NULL
)
SELECT CAST(name AS BLOB) FROM names WHERE name IS NOT NULL;

-- name: names_begun
-- The queues that have begun runs, in the same way.
WITH RECURSIVE names (name) AS (
    SELECT min(queue) FROM runs INDEXED BY runs_begun
    WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    UNION ALL
    SELECT (SELECT min(queue) FROM runs INDEXED BY runs_begun
        WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
            AND queue > names.name)
    FROM names WHERE names.name IS NOT NULL
)
SELECT CAST(name AS BLOB) FROM names WHERE name IS NOT NULL;

-- name: front
-- Whether any run waits only for a slot, and when the next delay is over. Two index lookups.
SELECT EXISTS (SELECT 1 FROM runs INDEXED BY runs_queued
        WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = ?1 AND wake_at IS NULL),
    (SELECT min(wake_at) FROM runs INDEXED BY runs_queued
        WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = ?1 AND wake_at IS NOT NULL);

-- name: begun
-- How many slots are taken. A worker that claimed a run and died before it began has none.
SELECT count(*) FROM runs INDEXED BY runs_begun
WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    AND queue = ?1 AND (status <> 'queued' OR EXISTS (SELECT 1 FROM workers WHERE workers.id = owner));

-- name: begun_by
-- The slots of one worker.
SELECT count(*) FROM runs INDEXED BY runs_begun
WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    AND queue = ?1 AND owner = ?2 AND EXISTS (SELECT 1 FROM workers WHERE workers.id = ?2);

-- name: begun_with_key
-- How many slots each key has; from the index alone. ?2: only of this key.
SELECT CAST(CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END AS BLOB) AS key, count(*)
FROM runs INDEXED BY runs_begun
WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    AND queue = ?1 AND CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END IS NOT NULL
    AND (?2 IS NULL OR CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END = ?2)
    AND (status <> 'queued' OR EXISTS (SELECT 1 FROM workers WHERE workers.id = owner))
GROUP BY key;

-- name: waiting
-- The first runs that wait only for a slot, in their order. ?4: keys that have no room.
SELECT priority, created_at, CAST(id AS BLOB),
    CAST(CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END AS BLOB)
FROM runs INDEXED BY runs_queued
WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = ?1 AND wake_at IS NULL
    AND workflow IN (SELECT value FROM json_each(?2))
    AND coalesce(CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END NOT IN (
        SELECT value FROM json_each(?4)), 1)
ORDER BY priority DESC, created_at, id LIMIT ?3;

-- name: come_due
-- Runs whose delay is over, the longest due first.
SELECT priority, created_at, CAST(id AS BLOB),
    CAST(CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END AS BLOB)
FROM runs INDEXED BY runs_queued
WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = ?1 AND wake_at <= ?5
    AND workflow IN (SELECT value FROM json_each(?2))
    AND coalesce(CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END NOT IN (
        SELECT value FROM json_each(?4)), 1)
ORDER BY wake_at, id LIMIT ?3;

-- name: count_waiting
-- For people: how many wait, from the index alone.
SELECT count(*) - count(wake_at), count(wake_at), min(iif(wake_at IS NULL, created_at, NULL))
FROM runs INDEXED BY runs_queued WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = ?1;

-- name: forget_slots
-- Slots whose workers are gone.
DELETE FROM slots WHERE name = ?1 AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = slots.worker);

-- name: count_slots
-- How many slots are taken, and whether one of them is this attempt's.
SELECT count(*), coalesce(max(run = ?2 AND call = ?3 AND worker = ?4), 0) FROM slots WHERE name = ?1;

-- name: take_slot
-- If the row belongs to a fenced worker, the new worker takes it over.
INSERT INTO slots (name, run, call, worker, since) VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (name, run, call) DO UPDATE SET worker = ?4, since = ?5;

-- name: free_slot
-- Only the worker's own slot: another worker may have taken the run over.
DELETE FROM slots WHERE name = ?1 AND run = ?2 AND call = ?3 AND worker = ?4;

-- name: slots
-- The slots of registered workers.
SELECT name, run, call, worker, since FROM slots
WHERE EXISTS (SELECT 1 FROM workers WHERE workers.id = slots.worker) ORDER BY name, since, run, call;
