-- The statements for what frameworks save: threads with their states, and items.

-- name: take_thread
-- A thread is free if no worker has it, or one that is gone. A worker that has it keeps the epoch.
INSERT INTO everstep.saved_threads (thread, owner, epoch, since, born) VALUES ($1, $2, 1, $3, $3)
ON CONFLICT (thread) DO UPDATE SET
    owner = $2, epoch = saved_threads.epoch + (saved_threads.owner IS DISTINCT FROM $2)::int, since = $3
WHERE saved_threads.owner IS NULL OR saved_threads.owner = $2
    OR NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = saved_threads.owner AND workers.lease_until > 0)
RETURNING saved_threads.epoch, saved_threads.born;

-- name: put_thread
-- A thread from another store keeps the time when it was first taken.
INSERT INTO everstep.saved_threads (thread, owner, epoch, since, born) VALUES ($1, NULL, 1, $2, $3) ON CONFLICT DO NOTHING;

-- name: free_thread
-- The epoch stays: it never goes down.
UPDATE everstep.saved_threads SET owner = NULL WHERE thread = $1 AND owner = $2 AND epoch = $3;

-- name: thread_guard
-- The columns that decide who may write to a thread.
SELECT owner, epoch, EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = saved_threads.owner AND workers.lease_until > 0)
FROM everstep.saved_threads WHERE thread = $1 FOR SHARE;

-- name: change_thread
-- A change that adds states, parts and writes, if the worker may; else it says why not. If a part exists already it fails, and
-- nothing is done: the longer way then finds out whether it is the same.
WITH guard AS MATERIALIZED (
    SELECT owner, epoch, EXISTS (
        SELECT 1 FROM everstep.workers WHERE workers.id = saved_threads.owner AND workers.lease_until > 0
    ) AS lives
    FROM everstep.saved_threads WHERE thread = $1 FOR SHARE
), refusal AS MATERIALIZED (
    SELECT CASE
        WHEN $3 > 0 AND NOT EXISTS (SELECT 1 FROM guard WHERE owner = $2 AND epoch = $3) THEN 'fenced'
        WHEN $3 = 0 AND EXISTS (SELECT 1 FROM guard WHERE owner <> $2 AND lives) THEN 'taken'
    END AS why
), parts AS (
    INSERT INTO everstep.saved_parts (thread, namespace, channel, series, number, value, digest)
    SELECT $1, * FROM unnest(
        $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bytea[], $9::bytea[]
    ) WHERE (SELECT why FROM refusal) IS NULL
    ON CONFLICT DO NOTHING RETURNING 1
), states AS (
    INSERT INTO everstep.saved_states (thread, namespace, id, parent, origin, body, digest, at)
    SELECT $1, * FROM unnest(
        $10::text[], $11::text[], $12::text[], $13::text[], $14::bytea[], $15::bytea[], $16::bigint[]
    ) WHERE (SELECT why FROM refusal) IS NULL
    ON CONFLICT (thread, namespace, id) DO UPDATE SET
        parent = excluded.parent, origin = excluded.origin, body = excluded.body, digest = excluded.digest,
        at = excluded.at
), writes AS (
    INSERT INTO everstep.saved_writes (thread, namespace, state, call, place, path, channel, body, digest)
    SELECT $1, * FROM unnest(
        $17::text[], $18::text[], $19::text[], $20::bigint[], $21::text[], $22::text[], $23::bytea[], $24::bytea[]
    ) WHERE (SELECT why FROM refusal) IS NULL
    ON CONFLICT DO NOTHING
)
SELECT why, 1 / (why IS NOT NULL OR (SELECT pg_catalog.count(*) FROM parts) = pg_catalog.cardinality($4))::int FROM refusal;

-- name: thread_owner
-- For the message to a worker that may not.
SELECT owner, epoch, since, born FROM everstep.saved_threads WHERE thread = $1;

-- name: digest_of_part
-- Whether a series continued differently.
SELECT digest FROM everstep.saved_parts WHERE thread = $1 AND namespace = $2 AND channel = $3 AND series = $4 AND number = $5;

-- name: save_part
-- An existing part is the same.
INSERT INTO everstep.saved_parts (thread, namespace, channel, series, number, value, digest)
VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING;

-- name: forget_part
-- A part that was just added together with one that could not be.
DELETE FROM everstep.saved_parts
WHERE thread = $1 AND namespace = $2 AND channel = $3 AND series = $4 AND number = $5;

-- name: save_state
-- A state with this id is replaced.
INSERT INTO everstep.saved_states (thread, namespace, id, parent, origin, body, digest, at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (thread, namespace, id) DO UPDATE SET
    parent = excluded.parent, origin = excluded.origin, body = excluded.body, digest = excluded.digest, at = excluded.at;

-- name: save_write
-- An existing write stays.
INSERT INTO everstep.saved_writes (thread, namespace, state, call, place, path, channel, body, digest)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING;

-- name: save_rewrite
-- An existing write is replaced.
INSERT INTO everstep.saved_writes (thread, namespace, state, call, place, path, channel, body, digest)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (thread, namespace, state, call, place) DO UPDATE SET
    path = excluded.path, channel = excluded.channel, body = excluded.body, digest = excluded.digest;

-- name: forget_states
-- All states of a thread.
DELETE FROM everstep.saved_states WHERE thread = $1;

-- name: forget_parts
-- All parts of a thread.
DELETE FROM everstep.saved_parts WHERE thread = $1;

-- name: forget_writes
-- All writes of a thread.
DELETE FROM everstep.saved_writes WHERE thread = $1;

-- name: forget_thread
-- Unless a worker runs it: then its epoch is still needed.
DELETE FROM everstep.saved_threads WHERE thread = $1 AND owner IS NULL;

-- name: hold_thread
-- No worker takes the thread before the transaction ends. A thread without a row gets one with epoch 0.
INSERT INTO everstep.saved_threads (thread, owner, epoch, since, born) VALUES ($1, NULL, 0, 0, 0)
ON CONFLICT (thread) DO UPDATE SET epoch = saved_threads.epoch;

-- name: drop_held_thread
-- Removes the row that was made to hold a thread.
DELETE FROM everstep.saved_threads WHERE thread = $1 AND epoch = 0;

-- name: forget_old_states
-- All states of a thread, if none is new. It must be one statement, because a person may change a thread without taking
-- it.
DELETE FROM everstep.saved_states WHERE thread = $1 AND NOT EXISTS (
    SELECT 1 FROM everstep.saved_states AS new WHERE new.thread = $1 AND new.at >= $2
);

-- name: forget_old_parts
-- All parts of a thread, if no state has arrived meanwhile that may need them.
DELETE FROM everstep.saved_parts WHERE thread = $1 AND NOT EXISTS (SELECT 1 FROM everstep.saved_states WHERE thread = $1);

-- name: forget_old_writes
-- All writes of a thread, if no state has arrived meanwhile.
DELETE FROM everstep.saved_writes WHERE thread = $1 AND NOT EXISTS (SELECT 1 FROM everstep.saved_states WHERE thread = $1);

-- name: forget_state
-- One of them.
DELETE FROM everstep.saved_states WHERE thread = $1 AND namespace = $2 AND id = $3;

-- name: forget_writes_of_state
-- The writes of one state.
DELETE FROM everstep.saved_writes WHERE thread = $1 AND namespace = $2 AND state = $3;

-- name: forget_series
-- A value that no state needs any more.
DELETE FROM everstep.saved_parts WHERE thread = $1 AND namespace = $2 AND channel = $3 AND series = $4;

-- name: saved_state
-- By its key.
SELECT namespace, id, parent, origin, body, digest, at
FROM everstep.saved_states WHERE thread = $1 AND namespace = $2 AND id = $3;

-- name: saved_states
-- The newest first.
SELECT namespace, id, parent, origin, body, digest, at
FROM everstep.saved_states WHERE thread = $1 AND namespace = $2 AND ($3::text IS NULL OR id < $3) ORDER BY id DESC LIMIT $4;

-- name: saved_states_of_thread
-- The newest first, of all namespaces.
SELECT namespace, id, parent, origin, body, digest, at
FROM everstep.saved_states WHERE thread = $1 AND ($2::text IS NULL OR id < $2 OR (id = $2 AND namespace < $3::text))
ORDER BY id DESC, namespace DESC LIMIT $4;

-- name: saved_lineage
-- From a state to its parents.
WITH RECURSIVE line (place, namespace, id, parent, origin, body, digest, at) AS (
    SELECT 1, namespace, id, parent, origin, body, digest, at FROM everstep.saved_states
    WHERE thread = $1 AND namespace = $2 AND id = $3
    UNION ALL
    SELECT line.place + 1, s.namespace, s.id, s.parent, s.origin, s.body, s.digest, s.at
    FROM line JOIN everstep.saved_states AS s ON s.thread = $1 AND s.namespace = $2 AND s.id = line.parent
    WHERE line.place < $4
)
SELECT namespace, id, parent, origin, body, digest, at
FROM line ORDER BY place;

-- name: saved_writes
-- In the order in which they apply.
SELECT namespace, state, call, place, path, channel,
    body, digest
FROM everstep.saved_writes WHERE thread = $1 AND namespace = $2 AND state = ANY ($3::text[])
ORDER BY state, path, call, place;

-- name: saved_parts
-- A value up to a part.
SELECT number, value, digest FROM everstep.saved_parts
WHERE thread = $1 AND namespace = $2 AND channel = $3 AND series = $4 AND number <= $5 ORDER BY number;

-- name: saved_series
-- To find series that no state needs any more.
SELECT namespace, channel, series
FROM everstep.saved_parts WHERE thread = $1 GROUP BY namespace, channel, series;

-- name: saved_threads_listed
-- A page; with a time, only threads that have not changed since.
SELECT thread FROM everstep.saved_states WHERE thread > $1
GROUP BY thread HAVING $3::bigint IS NULL OR pg_catalog.max(at) < $3 ORDER BY thread LIMIT $2;

-- name: states_of_origins
-- By an index.
SELECT thread, namespace, id FROM everstep.saved_states
WHERE origin <> '' AND origin = ANY ($1::text[]) ORDER BY thread, namespace, id;

-- name: save_item
-- An existing item keeps its time of creation.
INSERT INTO everstep.saved_items (namespace, key, value, created_at, updated_at, expires_at, seconds) VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (namespace, key) DO UPDATE SET
    value = excluded.value, updated_at = excluded.updated_at, expires_at = excluded.expires_at, seconds = excluded.seconds;

-- name: delete_item
-- By its key.
DELETE FROM everstep.saved_items WHERE namespace = $1 AND key = $2;

-- name: delete_expired_item
-- Unless it was put again, or read, since it was found.
DELETE FROM everstep.saved_items WHERE namespace = $1 AND key = $2 AND expires_at <= $3;

-- name: see_item
-- A read extends its life.
UPDATE everstep.saved_items SET expires_at = $3 WHERE namespace = $1 AND key = $2 AND expires_at IS NOT NULL;

-- name: saved_item
-- Only if it has not expired.
SELECT namespace, key, value, created_at, updated_at, expires_at, seconds FROM everstep.saved_items
WHERE namespace = $1 AND key = $2 AND (expires_at IS NULL OR expires_at > $3);

-- name: saved_items_listed
-- A page of the items whose namespace has a prefix.
SELECT namespace, key, value, created_at, updated_at, expires_at, seconds FROM everstep.saved_items
WHERE namespace >= $1 AND namespace < $2 AND (namespace, key) > ($3, $4) AND (expires_at IS NULL OR expires_at > $5)
ORDER BY namespace, key LIMIT $6;

-- name: saved_namespaces
-- A page of them.
SELECT DISTINCT namespace FROM everstep.saved_items
WHERE namespace > $2 AND (expires_at IS NULL OR expires_at > $1) ORDER BY namespace LIMIT $3;

-- name: dead_items
-- Expired items.
SELECT namespace, key FROM everstep.saved_items
WHERE expires_at IS NOT NULL AND expires_at <= $1 ORDER BY expires_at LIMIT $2;
