-- The statements for what frameworks save: threads with their states, and items.

-- name: take_thread
-- It is free if nobody has it, or a worker that is gone. Whoever has it keeps the epoch.
INSERT INTO saved_threads (thread, owner, epoch, since, born) VALUES (?1, ?2, 1, ?3, ?3)
ON CONFLICT (thread) DO UPDATE SET owner = ?2, epoch = epoch + (owner IS NOT ?2), since = ?3
WHERE owner IS NULL OR owner = ?2
    OR NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = saved_threads.owner AND workers.lease_until > 0)
RETURNING epoch, born;

-- name: put_thread
-- One that comes from another store keeps when it was first taken.
INSERT INTO saved_threads (thread, owner, epoch, since, born) VALUES (?, NULL, 1, ?, ?) ON CONFLICT DO NOTHING;

-- name: free_thread
-- The epoch stays: it never goes down.
UPDATE saved_threads SET owner = NULL WHERE thread = ? AND owner = ? AND epoch = ?;

-- name: thread_guard
-- Who may write to a thread.
SELECT owner, epoch, EXISTS (SELECT 1 FROM workers WHERE workers.id = saved_threads.owner AND workers.lease_until > 0)
FROM saved_threads WHERE thread = ?1;

-- name: thread_owner
-- For whoever is told that it is not they.
SELECT owner, epoch, since, born FROM saved_threads WHERE thread = ?;

-- name: digest_of_part
-- Whether a series went on otherwise.
SELECT digest FROM saved_parts WHERE thread = ? AND namespace = ? AND channel = ? AND series = ? AND number = ?;

-- name: save_part
-- One that is there is the same.
INSERT INTO saved_parts (thread, namespace, channel, series, number, value, digest)
VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: forget_part
-- One that was added a moment ago, beside another that could not be.
DELETE FROM saved_parts
WHERE thread = ? AND namespace = ? AND channel = ? AND series = ? AND number = ?;

-- name: save_state
-- One with this id is replaced.
INSERT INTO saved_states (thread, namespace, id, parent, origin, body, digest, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (thread, namespace, id) DO UPDATE SET
    parent = excluded.parent, origin = excluded.origin, body = excluded.body, digest = excluded.digest, at = excluded.at;

-- name: save_write
-- The first one stays.
INSERT INTO saved_writes (thread, namespace, state, call, place, path, channel, body, digest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: save_rewrite
-- The last one stays.
INSERT INTO saved_writes (thread, namespace, state, call, place, path, channel, body, digest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (thread, namespace, state, call, place) DO UPDATE SET
    path = excluded.path, channel = excluded.channel, body = excluded.body, digest = excluded.digest;

-- name: forget_states
-- All of a thread.
DELETE FROM saved_states WHERE thread = ?;

-- name: forget_parts
-- All of a thread.
DELETE FROM saved_parts WHERE thread = ?;

-- name: forget_writes
-- All of a thread.
DELETE FROM saved_writes WHERE thread = ?;

-- name: forget_thread
-- Unless somebody runs it: then their epoch is still needed.
DELETE FROM saved_threads WHERE thread = ? AND owner IS NULL;

-- name: hold_thread
-- No worker takes the thread before the transaction ends. One that has no row gets one of epoch 0.
INSERT INTO saved_threads (thread, owner, epoch, since, born) VALUES (?, NULL, 0, 0, 0)
ON CONFLICT (thread) DO UPDATE SET epoch = saved_threads.epoch;

-- name: drop_held_thread
-- The row that was made to hold a thread.
DELETE FROM saved_threads WHERE thread = ? AND epoch = 0;

-- name: forget_old_states
-- All of a thread, if none is new: in one statement, for a person may change a thread without taking it.
DELETE FROM saved_states WHERE thread = ?1 AND NOT EXISTS (
    SELECT 1 FROM saved_states AS new WHERE new.thread = ?1 AND new.at >= ?2
);

-- name: forget_old_parts
-- All of a thread, if no state came meanwhile that may need them.
DELETE FROM saved_parts WHERE thread = ?1 AND NOT EXISTS (SELECT 1 FROM saved_states WHERE thread = ?1);

-- name: forget_old_writes
-- All of a thread, if no state came meanwhile.
DELETE FROM saved_writes WHERE thread = ?1 AND NOT EXISTS (SELECT 1 FROM saved_states WHERE thread = ?1);

-- name: forget_state
-- One of them.
DELETE FROM saved_states WHERE thread = ? AND namespace = ? AND id = ?;

-- name: forget_writes_of_state
-- What was called in it.
DELETE FROM saved_writes WHERE thread = ? AND namespace = ? AND state = ?;

-- name: forget_series
-- A value that no state has any more.
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
-- In the order in which they count.
SELECT CAST(namespace AS BLOB), CAST(state AS BLOB), CAST(call AS BLOB), place, CAST(path AS BLOB), CAST(channel AS BLOB),
    body, digest
FROM saved_writes WHERE thread = ?1 AND namespace = ?2 AND state IN (SELECT value FROM json_each(?3))
ORDER BY state, path, call, place;

-- name: saved_parts
-- A value, up to a part.
SELECT number, value, digest FROM saved_parts
WHERE thread = ? AND namespace = ? AND channel = ? AND series = ? AND number <= ? ORDER BY number;

-- name: saved_series
-- To find those that no state has any more.
SELECT CAST(namespace AS BLOB), CAST(channel AS BLOB), CAST(series AS BLOB)
FROM saved_parts WHERE thread = ? GROUP BY namespace, channel, series;

-- name: saved_threads_listed
-- A page of them; with a time, those that have not changed since.
SELECT CAST(thread AS BLOB) FROM saved_states WHERE thread > ?1
GROUP BY thread HAVING ?3 IS NULL OR max(at) < ?3 ORDER BY thread LIMIT ?2;

-- name: states_of_origins
-- By an index.
SELECT CAST(thread AS BLOB), CAST(namespace AS BLOB), CAST(id AS BLOB) FROM saved_states
WHERE origin <> '' AND origin IN (SELECT value FROM json_each(?)) ORDER BY thread, namespace, id;

-- name: save_item
-- When it was created stays.
INSERT INTO saved_items (namespace, key, value, created_at, updated_at, expires_at, seconds) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (namespace, key) DO UPDATE SET
    value = excluded.value, updated_at = excluded.updated_at, expires_at = excluded.expires_at, seconds = excluded.seconds;

-- name: delete_item
-- By its key.
DELETE FROM saved_items WHERE namespace = ? AND key = ?;

-- name: delete_expired_item
-- Unless it was put again, or looked at, since it was found.
DELETE FROM saved_items WHERE namespace = ? AND key = ? AND expires_at <= ?;

-- name: see_item
-- Somebody looked at it: it lives on.
UPDATE saved_items SET expires_at = ?3 WHERE namespace = ?1 AND key = ?2 AND expires_at IS NOT NULL;

-- name: saved_item
-- One that is alive.
SELECT namespace, key, value, created_at, updated_at, expires_at, seconds FROM saved_items
WHERE namespace = ?1 AND key = ?2 AND (expires_at IS NULL OR expires_at > ?3);

-- name: saved_items_listed
-- A page of those whose namespace begins in a certain way.
SELECT namespace, key, value, created_at, updated_at, expires_at, seconds FROM saved_items
WHERE namespace >= ?1 AND namespace < ?2 AND (namespace, key) > (?3, ?4) AND (expires_at IS NULL OR expires_at > ?5)
ORDER BY namespace, key LIMIT ?6;

-- name: saved_namespaces
-- A page of them.
SELECT DISTINCT CAST(namespace AS BLOB) FROM saved_items
WHERE namespace > ?2 AND (expires_at IS NULL OR expires_at > ?1) ORDER BY namespace LIMIT ?3;

-- name: dead_items
-- Those whose time is over.
SELECT CAST(namespace AS BLOB), CAST(key AS BLOB) FROM saved_items INDEXED BY saved_items_dying
WHERE expires_at IS NOT NULL AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2;
