-- The statements about queues of runs and named limits of steps.
--
-- Runs that wait in a queue are found by `runs_in_line` and `runs_delayed`, from the place where the last look found the first
-- one (fronts.py); those that have a slot by `taken`. Runs of the queue `default`, and ended ones, cost nothing. The key of a
-- run is its tag `key`, as `tagged` has it.
--
-- A transaction locks the queue before it counts slots or takes a token: each statement sees what was committed before
-- it began, so no other transaction can take the same slot.

-- name: lock_queues
-- A queue may have no row yet, so an advisory lock is taken instead of a row lock. In a fixed order, after runs and
-- keys. $2 is the schema.
SELECT pg_catalog.pg_advisory_xact_lock(hash) FROM (
    SELECT DISTINCT pg_catalog.hashtextextended($2::text || '/' || name, 1) AS hash FROM pg_catalog.unnest($1::text[]) AS wanted (name) ORDER BY 1
) AS hashes;

-- name: queues_of_runs
-- The queues to lock. The runs are locked already, so they cannot move to another queue.
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
-- The settings after a change.
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
-- The columns that decide whether a run may be claimed from its queue.
SELECT status, queue, wake_at, (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1),
    EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = runs.owner), owner
FROM everstep.runs WHERE id = $1;

-- name: names_waiting
-- The queues in which runs wait. It hops from name to name in the indexes and never walks their runs.
WITH RECURSIVE names (name) AS (
    SELECT least(
        (SELECT pg_catalog.min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL),
        (SELECT pg_catalog.min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NOT NULL)
    )
    UNION ALL
    SELECT least(
        (SELECT pg_catalog.min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL AND queue > names.name),
        (SELECT pg_catalog.min(queue) FROM everstep.runs
            WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NOT NULL
                AND queue > names.name)
    ) FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL;

-- name: names_begun
-- The queues that have begun runs, in the same way.
WITH RECURSIVE names (name) AS (
    SELECT pg_catalog.min(queue) FROM everstep.runs
    WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
    UNION ALL
    SELECT (SELECT pg_catalog.min(queue) FROM everstep.runs
        WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL))
            AND queue > names.name)
    FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL;

-- name: fronts
-- The first run of each line, as kind, queue, priority, time and id. Kind 0: of a known queue and priority ($1 to $4:
-- from that place on), or of the priorities between those ($5 to $7: queue, above and below). Kind 1: of the runs that
-- wait for their time ($8 and $9: queue, from then on). Kind 2: names of queues between the known ones ($10 and $11:
-- after, before).
SELECT 0 AS kind, known.queue, known.priority, front.at, front.id
FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[]) AS known (queue, priority, at, id) CROSS JOIN LATERAL (
    SELECT created_at AS at, runs.id FROM everstep.runs
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL
        AND queue = known.queue AND priority = known.priority AND (created_at, runs.id) >= (known.at, known.id)
    ORDER BY created_at, runs.id LIMIT 1
) AS front
UNION ALL
SELECT 0, gap.queue, front.priority, front.at, front.id
FROM unnest($5::text[], $6::bigint[], $7::bigint[]) AS gap (queue, above, below) CROSS JOIN LATERAL (
    SELECT priority, created_at AS at, id FROM everstep.runs
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL
        AND queue = gap.queue AND priority < gap.above AND priority > gap.below
    ORDER BY priority DESC, created_at, id LIMIT 1
) AS front
UNION ALL
SELECT 1, known.queue, 0, front.at, front.id
FROM unnest($8::text[], $9::bigint[]) AS known (queue, at) CROSS JOIN LATERAL (
    SELECT wake_at AS at, id FROM everstep.runs
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NOT NULL
        AND queue = known.queue AND wake_at >= known.at
    ORDER BY wake_at, id LIMIT 1
) AS front
UNION ALL
SELECT 2, front.queue, 0, 0, '' FROM unnest($10::text[], $11::text[]) AS gap (after, before) CROSS JOIN LATERAL (
    (SELECT queue FROM everstep.runs
        WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL
            AND queue > gap.after AND queue < gap.before ORDER BY queue LIMIT 1)
    UNION ALL
    (SELECT queue FROM everstep.runs
        WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NOT NULL
            AND queue > gap.after AND queue < gap.before ORDER BY queue LIMIT 1)
) AS front;

-- name: begun
-- How many slots are taken. A worker that claimed a run and died before it began has none. Only runs that `taken` names on
-- its last page are read: an index of begun runs has all that ever began, while the past of the database is pinned.
SELECT pg_catalog.count(DISTINCT run) FROM everstep.taken AS entry
WHERE kind = 'queue' AND name = $1
    AND page = (SELECT pg_catalog.max(page) FROM everstep.taken WHERE kind = 'queue' AND name = $1)
    AND (SELECT queue = $1 AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL
            AND EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner)))
        FROM everstep.runs WHERE runs.id = entry.run);

-- name: begun_by
-- The slots of one worker.
SELECT pg_catalog.count(DISTINCT run) FROM everstep.taken AS entry
WHERE kind = 'queue' AND name = $1
    AND page = (SELECT pg_catalog.max(page) FROM everstep.taken WHERE kind = 'queue' AND name = $1)
    AND (SELECT queue = $1 AND owner = $2 AND status IN ('running', 'waiting', 'queued')
        FROM everstep.runs WHERE runs.id = entry.run)
    AND EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = $2);

-- name: begun_with_key
-- How many slots each key has. $2: only of this key.
SELECT key, pg_catalog.count(DISTINCT run) FROM (
    SELECT run, (SELECT value FROM everstep.tagged WHERE tagged.run = entry.run AND name = 'key' LIMIT 1) AS key
    FROM everstep.taken AS entry
    WHERE kind = 'queue' AND name = $1
        AND page = (SELECT pg_catalog.max(page) FROM everstep.taken WHERE kind = 'queue' AND name = $1)
        AND (SELECT queue = $1 AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL
                AND EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner)))
            FROM everstep.runs WHERE runs.id = entry.run)
) AS begun
WHERE key IS NOT NULL AND ($2::text IS NULL OR key = $2::text) GROUP BY key;

-- name: waiting
-- The first runs that wait only for a slot, in their order. $4: keys that have no room. $5 to $7: known priorities, and from where
-- on; $8 and $9: above and below those between.
SELECT run.priority, run.created_at, run.id, run.key
FROM unnest($5::bigint[], $6::bigint[], $7::text[]) AS known (priority, at, id) CROSS JOIN LATERAL (
    SELECT priority, created_at, runs.id, (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) AS key
    FROM everstep.runs
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1 AND wake_at IS NULL
        AND priority = known.priority AND (created_at, runs.id) >= (known.at, known.id)
        AND workflow = ANY ($2::text[])
        AND (pg_catalog.cardinality($4::text[]) = 0 OR coalesce(
            (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) <> ALL ($4::text[]), true))
    ORDER BY created_at, runs.id LIMIT $3
) AS run
UNION ALL
SELECT run.priority, run.created_at, run.id, run.key
FROM unnest($8::bigint[], $9::bigint[]) AS gap (above, below) CROSS JOIN LATERAL (
    SELECT priority, created_at, runs.id, (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) AS key
    FROM everstep.runs
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1 AND wake_at IS NULL
        AND priority < gap.above AND priority > gap.below
        AND workflow = ANY ($2::text[])
        AND (pg_catalog.cardinality($4::text[]) = 0 OR coalesce(
            (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) <> ALL ($4::text[]), true))
    ORDER BY priority DESC, created_at, runs.id LIMIT $3
) AS run
ORDER BY 1 DESC, 2, 3 LIMIT $3;

-- name: come_due
-- Runs whose delay is over, the longest due first. $6 is the time from which to read.
SELECT priority, created_at, id, (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1)
FROM everstep.runs
WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1 AND wake_at IS NOT NULL AND wake_at <= $5
    AND wake_at >= $6
    AND workflow = ANY ($2::text[])
    AND (pg_catalog.cardinality($4::text[]) = 0 OR coalesce(
        (SELECT value FROM everstep.tagged WHERE run = runs.id AND name = 'key' LIMIT 1) <> ALL ($4::text[]), true))
ORDER BY wake_at, id LIMIT $3;

-- name: count_waiting
-- For people: how many wait.
SELECT pg_catalog.count(*) - pg_catalog.count(wake_at), pg_catalog.count(wake_at), pg_catalog.min(CASE WHEN wake_at IS NULL THEN created_at END)
FROM everstep.runs WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND queue = $1;

-- name: forget_slots
-- Slots whose workers are gone, found as in `begun`.
DELETE FROM everstep.slots USING everstep.taken AS entry
WHERE entry.kind = 'limit' AND entry.name = $1
    AND entry.page = (SELECT pg_catalog.max(page) FROM everstep.taken WHERE kind = 'limit' AND name = $1)
    AND slots.name = $1 AND slots.run = entry.run AND slots.call = entry.call
    AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = slots.worker);

-- name: count_slots
-- How many slots are taken, and whether one of them is this attempt's.
SELECT pg_catalog.count(DISTINCT (entry.run, entry.call)), coalesce(pg_catalog.bool_or(entry.run = $2 AND entry.call = $3 AND holder.worker = $4), false)
FROM everstep.taken AS entry CROSS JOIN LATERAL (
    SELECT slots.worker FROM everstep.slots
    WHERE slots.name = $1 AND slots.run = entry.run AND slots.call = entry.call LIMIT 1
) AS holder
WHERE entry.kind = 'limit' AND entry.name = $1
    AND entry.page = (SELECT pg_catalog.max(page) FROM everstep.taken WHERE kind = 'limit' AND name = $1);

-- name: take_slot
-- If the row belongs to a fenced worker, the new worker takes it over.
INSERT INTO everstep.slots (name, run, call, worker, since) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (name, run, call) DO UPDATE SET worker = excluded.worker, since = excluded.since;

-- name: free_slot
-- Only the worker's own slot: another worker may have taken the run over.
DELETE FROM everstep.slots WHERE name = $1 AND run = $2 AND call = $3 AND worker = $4;

-- name: slots
-- The slots of registered workers.
SELECT name, run, call, worker, since FROM everstep.slots
WHERE EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = slots.worker) ORDER BY name, since, run, call;
