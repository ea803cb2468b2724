-- The statements for what frameworks save: threads with their states, and items.

-- name: take_thread
-- A thread is free if no worker has it, or one that is gone. A worker that has it keeps the epoch.
INSERT INTO saved_threads (thread, owner, epoch, since, born) VALUES (?1, ?2, 1, ?3, ?3)
ON CONFLICT (thread) DO UPDATE SET owner = ?2, epoch = epoch + (owner IS NOT ?2), since = ?3
WHERE owner IS NULL OR owner = ?2
    OR NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = saved_threads.owner AND workers.lease_until > 0)
RETURNING epoch, born;

-- name: put_thread
-- A thread from another store keeps the time when it was first taken.
INSERT INTO saved_threads (thread, owner, epoch, since, born) VALUES (?, NULL, 1, ?, ?) ON CONFLICT DO NOTHING;

-- name: free_thread
-- The epoch stays: it never goes down.
UPDATE saved_threads SET owner = NULL WHERE thread = ? AND owner = ? AND epoch = ?;

-- name: thread_guard
-- The columns that decide who may write to a thread.
SELECT owner, epoch, EXISTS (SELECT 1 FROM workers WHERE workers.id = saved_threads.owner AND workers.lease_until > 0)
FROM saved_threads WHERE thread = ?1;

-- name: thread_owner
-- For the message to a worker that may not.
SELECT owner, epoch, since, born FROM saved_threads WHERE thread = ?;

-- name: digest_of_part
-- Whether a series continued differently.
SELECT digest FROM saved_parts WHERE thread = ? AND namespace = ? AND channel = ? AND series = ? AND number = ?;

-- name: save_part
-- An existing part is the same.
INSERT INTO saved_parts (thread, namespace, channel, series, number, value, digest)
VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: forget_part
-- A part that was just added together with one that could not be.
DELETE FROM saved_parts
WHERE thread = ? AND namespace = ? AND channel = ? AND series = ? AND number = ?;

-- name: save_state
-- A state with this id is replaced.
INSERT INTO saved_states (thread, namespace, id, parent, origin, body, digest, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (thread, namespace, id) DO UPDATE SET
    parent = excluded.parent, origin = excluded.origin, body = excluded.body, digest = excluded.digest, at = excluded.at;

-- name: save_write
-- An existing write stays.
INSERT INTO saved_writes (thread, namespace, state, call, place, path, channel, body, digest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: save_rewrite
-- An existing write is replaced.
INSERT INTO saved_writes (thread, namespace, state, call, place, path, channel, body, digest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (thread, namespace, state, call, place) DO UPDATE SET
    path = excluded.path, channel = excluded.channel, body = excluded.body, digest = excluded.digest;

-- name: forget_states
-- All states of a thread.
DELETE FROM saved_states WHERE thread = ?;

-- name: forget_parts
-- All parts of a thread.
DELETE FROM saved_parts WHERE thread = ?;

-- name: forget_writes
-- All writes of a thread.
DELETE FROM saved_writes WHERE thread = ?;

-- name: forget_thread
-- Unless a worker runs it: then its epoch is still needed.
DELETE FROM saved_threads WHERE thread = ? AND owner IS NULL;

-- name: hold_thread
-- No worker takes the thread before the transaction ends. A thread without a row gets one with epoch 0.
INSERT INTO saved_threads (thread, owner, epoch, since, born) VALUES (?, NULL, 0, 0, 0)
ON CONFLICT (thread) DO UPDATE SET epoch = saved_threads.epoch;

-- name: drop_held_thread
-- Removes the row that was made to hold a thread.
DELETE FROM saved_threads WHERE thread = ? AND epoch = 0;

-- name: forget_old_states
-- All states of a thread, if none is new. It must be one statement, because a person may change a thread without taking
-- it.
DELETE FROM saved_states WHERE thread = ?1 AND NOT EXISTS (
    SELECT 1 FROM saved_states AS new WHERE new.thread = ?1 AND new.at >= ?2
);

-- name: forget_old_parts
-- All parts of a thread, if no state has arrived meanwhile that may need them.
DELETE FROM saved_parts WHERE thread = ?1 AND NOT EXISTS (SELECT 1 FROM saved_states WHERE thread = ?1);

-- name: forget_old_writes
-- All writes of a thread, if no state has arrived meanwhile.
DELETE FROM saved_writes WHERE thread = ?1 AND NOT EXISTS (SELECT 1 FROM saved_states WHERE thread = ?1);

-- name: forget_state
-- One of them.
DELETE FROM saved_states WHERE thread = ? AND namespace = ? AND id = ?;

-- name: forget_writes_of_state
-- The writes of one state.
DELETE FROM saved_writes WHERE thread = ? AND namespace = ? AND state = ?;

-- name: forget_series
-- A value that no state needs any more.
DELETE FROM saved_parts WHERE thread = ? AND namespace = ? AND channel = ? AND series = ?;

-- name: saved_state
-- By its key.
SELECT CAST(namespace AS BLOB), CAST(id AS BLOB), CAST(parent AS BLOB), CAST(origin AS BLOB), body, digest, at
FROM saved_states WHERE thread = ? AND namespace = ? AND id = ?;

-- name: saved_states
-- The newest first.
SELECT CAST(namespace AS BLOB), CAST(id AS BLOB), CAST(parent AS BLOB), CAST(origin AS BLOB), body, digest, at
FROM saved_states WHERE thread = ?1 AND namespace = ?2 AND (?3 IS NULL OR id < ?3) ORDER BY id DESC LIMIT ?4;

-- name: saved_states_of_thread
-- The newest first, of all namespaces.
SELECT CAST(namespace AS BLOB), CAST(id AS BLOB), CAST(parent AS BLOB), CAST(origin AS BLOB), body, digest, at
FROM saved_states WHERE thread = ?1 AND (?2 IS NULL OR id < ?2 OR (id = ?2 AND namespace < ?3))
ORDER BY id DESC, namespace DESC LIMIT ?4;

-- name: saved_lineage
-- From a state to its parents.
WITH RECURSIVE line (place, namespace, id, parent, origin, body, digest, at) AS (
    SELECT 1, namespace, id, parent, origin, body, digest, at FROM saved_states
    WHERE thread = ?1 AND namespace = ?2 AND id = ?3
    UNION ALL
    SELECT line.place + 1, s.namespace, s.id, s.parent, s.origin, s.body, s.digest, s.at
    FROM line JOIN saved_states AS s ON s.thread = ?1 AND s.namespace = ?2 AND s.id = line.parent
    WHERE line.place < ?4
)
SELECT CAST(namespace AS BLOB), CAST(id AS BLOB), CAST(parent AS BLOB), CAST(origin AS BLOB), body, digest, at
FROM line ORDER BY place;

-- name: saved_writes
-- In the order in which they apply.
SELECT CAST(namespace AS BLOB), CAST(state AS BLOB), CAST(call AS BLOB), place, CAST(path AS BLOB), CAST(channel AS BLOB),
    body, digest
FROM saved_writes WHERE thread = ?1 AND namespace = ?2 AND state IN (SELECT value FROM json_each(?3))
ORDER BY state, path, call, place;

-- name: saved_parts
-- A value up to a part.
SELECT number, value, digest FROM saved_parts
WHERE thread = ? AND namespace = ? AND channel = ? AND series = ? AND number <= ? ORDER BY number;

-- name: saved_series
-- To find series that no state needs any more.
SELECT CAST(namespace AS BLOB), CAST(channel AS BLOB), CAST(series AS BLOB)
FROM saved_parts WHERE thread = ? GROUP BY namespace, channel, series;

-- name: saved_threads_listed
-- A page; with a time, only threads that have not changed since.
SELECT CAST(thread AS BLOB) FROM saved_states WHERE thread > ?1
GROUP BY thread HAVING ?3 IS NULL OR max(at) < ?3 ORDER BY thread LIMIT ?2;

-- name: states_of_origins
-- By an index.
SELECT CAST(thread AS BLOB), CAST(namespace AS BLOB), CAST(id AS BLOB) FROM saved_states
WHERE origin <> '' AND origin IN (SELECT value FROM json_each(?)) ORDER BY thread, namespace, id;

-- name: save_item
-- An existing item keeps its time of creation.
INSERT INTO saved_items (namespace, key, value, created_at, updated_at, expires_at, seconds) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (namespace, key) DO UPDATE SET
    value = excluded.value, updated_at = excluded.updated_at, expires_at = excluded.expires_at, seconds = excluded.seconds;

-- name: delete_item
-- By its key.
DELETE FROM saved_items WHERE namespace = ? AND key = ?;

-- name: delete_expired_item
-- Unless it was put again, or read, since it was found.
DELETE FROM saved_items WHERE namespace = ? AND key = ? AND expires_at <= ?;

-- name: see_item
-- A read extends its life.
UPDATE saved_items SET expires_at = ?3 WHERE namespace = ?1 AND key = ?2 AND expires_at IS NOT NULL;

-- name: saved_item
-- Only if it has not expired.
SELECT namespace, key, value, created_at, updated_at, expires_at, seconds FROM saved_items
WHERE namespace = ?1 AND key = ?2 AND (expires_at IS NULL OR expires_at > ?3);

-- name: saved_items_listed
-- A page of the items whose namespace has a prefix.
SELECT namespace, key, value, created_at, updated_at, expires_at, seconds FROM saved_items
WHERE namespace >= ?1 AND namespace < ?2 AND (namespace, key) > (?3, ?4) AND (expires_at IS NULL OR expires_at > ?5)
ORDER BY namespace, key LIMIT ?6;

-- name: saved_namespaces
-- A page of them.
SELECT DISTINCT CAST(namespace AS BLOB) FROM saved_items
WHERE namespace > ?2 AND (expires_at IS NULL OR expires_at > ?1) ORDER BY namespace LIMIT ?3;

-- name: dead_items
-- Expired items.
SELECT CAST(namespace AS BLOB), CAST(key AS BLOB) FROM saved_items INDEXED BY saved_items_dying
WHERE expires_at IS NOT NULL AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2;
