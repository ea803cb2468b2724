-- The statements with which whole runs are deleted, and moved between stores.

-- name: state_of_run
-- The columns that decide whether a part of the run may be deleted.
SELECT status, epoch, generation, EXISTS (SELECT 1 FROM holds WHERE run = ?1 AND resolved_at IS NULL)
FROM runs WHERE id = ?1;

-- name: as_judged
-- How many of these runs (?1) still have the epochs (?2) with which they were judged, ended before ?3, and have nothing
-- that forbids their deletion. ?4 is the prefix of workflow names that are single steps.
WITH judged AS MATERIALIZED (SELECT key, value AS run FROM json_each(?1)),
epochs AS MATERIALIZED (SELECT key, value AS epoch FROM json_each(?2))
SELECT count(*) FROM judged CROSS JOIN epochs ON epochs.key = judged.key CROSS JOIN runs ON runs.id = judged.run
WHERE runs.epoch = epochs.epoch AND runs.status IN ('completed', 'failed', 'cancelled') AND runs.ended_at < ?3
    AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = runs.owner AND workers.lease_until > 0)
    AND NOT EXISTS (SELECT 1 FROM holds WHERE holds.run = runs.id AND holds.resolved_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM effects INDEXED BY effects_run WHERE effects.run = runs.id AND effects.state NOT IN ('done', 'free'))
    AND NOT (substr(runs.workflow, 1, length(?4)) = ?4
        AND EXISTS (SELECT 1 FROM saved_states WHERE saved_states.thread = json_extract(runs.tags, '$.thread')));

-- name: claim_family
-- Only after `as_judged` has confirmed all of them.
UPDATE runs SET epoch = epoch + 1, owner = ?2 WHERE id IN (SELECT value FROM json_each(?1));

-- name: note_deletions
-- From now on no other worker claims these runs. A row left here by an earlier deletion names an older generation.
INSERT INTO deletions (run, generation, at) SELECT id, generation, ?2 FROM runs
WHERE id IN (SELECT value FROM json_each(?1))
ON CONFLICT (run) DO UPDATE SET generation = excluded.generation, at = excluded.at;

-- name: delete_events
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM events WHERE rowid IN (SELECT rowid FROM events WHERE run = ?1 LIMIT ?2);

-- name: delete_payloads
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM payloads WHERE rowid IN (SELECT rowid FROM payloads WHERE run = ?1 LIMIT ?2);

-- name: delete_checkpoints
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM checkpoints WHERE rowid IN (SELECT rowid FROM checkpoints WHERE run = ?1 LIMIT ?2);

-- name: delete_archive
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM archive WHERE rowid IN (SELECT rowid FROM archive WHERE run = ?1 LIMIT ?2);

-- name: delete_signals
-- A limited number of rows. Their numbers are never used again.
DELETE FROM signals WHERE number IN (SELECT number FROM signals WHERE run = ?1 LIMIT ?2);

-- name: delete_streams
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM streams WHERE rowid IN (SELECT rowid FROM streams WHERE run = ?1 LIMIT ?2);

-- name: delete_answers
-- One row for each request, and all are small.
DELETE FROM answers WHERE run = ?;

-- name: note_deletion
-- The run is no longer whole. If this worker does not finish, the next one that deletes anything does.
INSERT INTO deletions (run, generation, at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING;

-- name: delete_holds
-- All of them are resolved.
DELETE FROM holds WHERE run = ?;

-- name: delete_notifications
-- The notifications of these holds.
DELETE FROM notifications WHERE run = ?;

-- name: delete_followers
-- They have received the run's end.
DELETE FROM followers WHERE run = ?;

-- name: delete_following
-- An ended run needs the ends of other runs no longer.
DELETE FROM followers WHERE follower = ?;

-- name: delete_markers
-- An ended run no longer looks for its markers.
DELETE FROM everstep_markers WHERE run = ?;

-- name: delete_relied
-- The run no longer depends on any key.
DELETE FROM relied WHERE run = ?;

-- name: delete_deletion
-- Nothing of it is left to delete.
DELETE FROM deletions WHERE run = ?;

-- name: delete_arrival
-- Another run may be given its id.
DELETE FROM arrivals WHERE run = ?;

-- name: delete_run
-- The last row of the run.
DELETE FROM runs WHERE id = ?;

-- name: dump_run
-- The run's row.
SELECT CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget
FROM runs WHERE id = ?;

-- name: dump_events
-- The events of all generations.
SELECT generation, seq, kind, step, at, body, digest FROM events WHERE run = ? ORDER BY generation, seq;

-- name: dump_payloads
-- By their digests, so that two dumps of one run are the same.
SELECT digest, value FROM payloads WHERE run = ? ORDER BY digest;

-- name: dump_checkpoints
-- The newest few.
SELECT run, generation, seq, previous, engine, state, digest, complete FROM checkpoints
WHERE run = ? ORDER BY generation, seq;

-- name: dump_signals
-- Including consumed ones, because a second delivery with the same id is recognised by them.
SELECT number, run, kind, name, id, value, at, state FROM signals WHERE run = ? ORDER BY number;

-- name: dump_followers
-- The runs that wait for this run's end.
SELECT follower, call FROM followers WHERE run = ? ORDER BY follower, call;

-- name: dump_holds
-- Open and resolved ones.
SELECT holds.id, run, reason, step, summary, report, resolutions, holds.created_at, resolved_at, resolution, by, note, ''
FROM holds WHERE run = ? ORDER BY holds.created_at, holds.id;

-- name: dump_effects
-- The keys of its actions.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM effects WHERE run = ? ORDER BY key;

-- name: dump_waiters
-- The whole table. It has few rows, because each is a call that waits now.
SELECT key, call FROM waiters WHERE run = ? ORDER BY key, call;

-- name: dump_archive
-- The oldest first.
SELECT run, generation, what, seq, row, why, at FROM archive WHERE run = ? ORDER BY id;

-- name: dump_answers
-- Which events hold the answers.
SELECT run, number, generation, seq FROM answers WHERE run = ? ORDER BY number;

-- name: dump_entries
-- All streams of all generations.
SELECT run, generation, name, position, seq, step, attempt, first, secret, at, value, digest FROM streams
WHERE run = ? ORDER BY generation, name, position;

-- name: dump_markers
-- The markers of atomic steps that write to the store itself.
SELECT key, run, step, attempt, outcome, at FROM everstep_markers WHERE run = ? ORDER BY key;

-- name: are_taken
-- Whether any of these ids of runs or holds, or keys of markers, exists here.
SELECT EXISTS (SELECT 1 FROM json_each(?1) AS wanted JOIN runs ON runs.id = wanted.value)
    OR EXISTS (SELECT 1 FROM json_each(?2) AS wanted JOIN holds ON holds.id = wanted.value)
    OR EXISTS (SELECT 1 FROM json_each(?3) AS wanted JOIN everstep_markers ON everstep_markers.key = wanted.value);

-- name: are_keys_taken
-- Whether any step here has, or had, one of these keys.
SELECT EXISTS (SELECT 1 FROM json_each(?1) AS wanted JOIN effects ON effects.key = wanted.value);

-- name: put_run
-- No run has this id: the same transaction has checked that.
INSERT INTO runs (id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at,
    queue, priority, tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview,
    published, outcome, budget)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: put_tag
-- Searches find the run by it.
INSERT INTO tagged (name, value, created_at, run) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: put_event
-- Unchanged: its digest was verified.
INSERT INTO events (run, generation, seq, kind, step, at, body, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: put_payload
-- Named by its digest.
INSERT INTO payloads (run, digest, value) VALUES (?, ?, ?);

-- name: put_checkpoint
-- Its event has its digest.
INSERT INTO checkpoints (run, generation, seq, previous, engine, state, digest, complete) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: put_delivery
-- With its number, because histories refer to it, or with NULL for the next free number.
INSERT INTO signals (number, run, kind, name, id, value, at, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING number;

-- name: put_answer
-- With the number that its request has here.
INSERT INTO answers (run, number, generation, seq) VALUES (?, ?, ?, ?);

-- name: put_entry
-- An entry of a stream, unchanged.
INSERT INTO streams (run, generation, name, position, seq, step, attempt, first, secret, at, value, digest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: number_taken
-- Whether a delivery here has this number.
SELECT 1 FROM signals WHERE number = ?;

-- name: put_follower
-- A run that receives the end.
INSERT INTO followers (run, follower, call) VALUES (?, ?, ?);

-- name: put_hold
-- Open or resolved, as it was.
INSERT INTO holds (id, run, reason, step, summary, report, resolutions, created_at, resolved_at, resolution, by, note)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: put_effect
-- A key that exists here stays as it is.
INSERT INTO effects (key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by,
    note, digest, outcome, secret)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: put_waiter
-- A step that waits for a key.
INSERT INTO waiters (key, run, call) VALUES (?, ?, ?) ON CONFLICT DO NOTHING;

-- name: put_archived
-- What was archived before it was moved.
INSERT INTO archive (run, generation, what, seq, row, why, at) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: put_marker
-- The marker of an atomic step that wrote to the store from which the run comes.
INSERT INTO everstep_markers (key, run, step, attempt, outcome, at) VALUES (?, ?, ?, ?, ?, ?);

-- name: put_arrival
-- The last event that the run brought along.
INSERT INTO arrivals (run, generation, seq, doubted) VALUES (?, ?, ?, ?);
