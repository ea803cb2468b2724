-- The statements with which whole runs are deleted, and moved between stores.

-- name: state_of_run
-- The columns that decide whether a part of the run may be deleted.
SELECT status, epoch, generation, EXISTS (SELECT 1 FROM everstep.holds WHERE run = $1 AND resolved_at IS NULL)
FROM everstep.runs WHERE id = $1;

-- name: as_judged
-- How many of these runs ($1) still have the epochs ($2) with which they were judged, ended before $3, and have nothing
-- that forbids their deletion. $4 is the prefix of workflow names that are single steps.
SELECT pg_catalog.count(*) FROM unnest($1::text[], $2::bigint[]) AS judged (run, epoch) JOIN everstep.runs ON runs.id = judged.run
WHERE runs.epoch = judged.epoch AND runs.status IN ('completed', 'failed', 'cancelled') AND runs.ended_at < $3
    AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = runs.owner AND workers.lease_until > 0)
    AND NOT EXISTS (SELECT 1 FROM everstep.holds WHERE holds.run = runs.id AND holds.resolved_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM everstep.effects WHERE effects.run = runs.id AND effects.state NOT IN ('done', 'free'))
    AND NOT (pg_catalog.left(runs.workflow, pg_catalog.length($4::text)) = $4::text AND EXISTS (
        SELECT 1 FROM everstep.tagged JOIN everstep.saved_states ON saved_states.thread = tagged.value
        WHERE tagged.run = runs.id AND tagged.name = 'thread'));

-- name: claim_family
-- Only after `as_judged` has confirmed all of them.
UPDATE everstep.runs SET epoch = epoch + 1, owner = $2 WHERE id = ANY ($1::text[]);

-- name: note_deletions
-- From now on no other worker claims these runs. A row left here by an earlier deletion names an older generation.
INSERT INTO everstep.deletions (run, generation, at) SELECT id, generation, $2::bigint FROM everstep.runs
WHERE id = ANY ($1::text[])
ON CONFLICT (run) DO UPDATE SET generation = excluded.generation, at = excluded.at;

-- name: delete_events
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM everstep.events WHERE ctid = ANY (ARRAY(SELECT ctid FROM everstep.events WHERE run = $1 LIMIT $2));

-- name: delete_payloads
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM everstep.payloads WHERE ctid = ANY (ARRAY(SELECT ctid FROM everstep.payloads WHERE run = $1 LIMIT $2));

-- name: delete_checkpoints
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM everstep.checkpoints WHERE ctid = ANY (ARRAY(SELECT ctid FROM everstep.checkpoints WHERE run = $1 LIMIT $2));

-- name: delete_archive
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM everstep.archive WHERE ctid = ANY (ARRAY(SELECT ctid FROM everstep.archive WHERE run = $1 LIMIT $2));

-- name: delete_signals
-- A limited number of rows. Their numbers are never used again.
DELETE FROM everstep.signals WHERE number IN (SELECT number FROM everstep.signals WHERE run = $1 LIMIT $2);

-- name: delete_streams
-- A limited number of rows, found by the key: a transaction stays short however many there are.
DELETE FROM everstep.streams WHERE ctid = ANY (ARRAY(SELECT ctid FROM everstep.streams WHERE run = $1 LIMIT $2));

-- name: delete_answers
-- One row for each request, and all are small.
DELETE FROM everstep.answers WHERE run = $1;

-- name: note_deletion
-- The run is no longer whole. If this worker does not finish, the next one that deletes anything does.
INSERT INTO everstep.deletions (run, generation, at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING;

-- name: delete_holds
-- All of them are resolved.
DELETE FROM everstep.holds WHERE run = $1;

-- name: delete_notifications
-- The notifications of these holds.
DELETE FROM everstep.notifications WHERE run = $1;

-- name: delete_followers
-- They have received the run's end.
DELETE FROM everstep.followers WHERE run = $1;

-- name: delete_following
-- An ended run needs the ends of other runs no longer.
DELETE FROM everstep.followers WHERE follower = $1;

-- name: delete_markers
-- An ended run no longer looks for its markers.
DELETE FROM everstep.everstep_markers WHERE run = $1;

-- name: delete_relied
-- The run no longer depends on any key.
DELETE FROM everstep.relied WHERE run = $1;

-- name: delete_deletion
-- Nothing of it is left to delete.
DELETE FROM everstep.deletions WHERE run = $1;

-- name: delete_arrival
-- Another run may be given its id.
DELETE FROM everstep.arrivals WHERE run = $1;

-- name: delete_run
-- The last row of the run.
WITH untagged AS (DELETE FROM everstep.tagged WHERE run = $1)
DELETE FROM everstep.runs WHERE id = $1;

-- name: dump_run
-- The run's row.
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs WHERE id = $1;

-- name: dump_events
-- The events of all generations.
SELECT generation, seq, kind, step, at, body, digest FROM everstep.events WHERE run = $1 ORDER BY generation, seq;

-- name: dump_payloads
-- By their digests, so that two dumps of one run are the same.
SELECT digest, value FROM everstep.payloads WHERE run = $1 ORDER BY digest;

-- name: dump_checkpoints
-- The newest few.
SELECT run, generation, seq, previous, engine, state, digest, complete FROM everstep.checkpoints
WHERE run = $1 ORDER BY generation, seq;

-- name: dump_signals
-- Including consumed ones, because a second delivery with the same id is recognised by them.
SELECT number, run, kind, name, id, value, at, state FROM everstep.signals WHERE run = $1 ORDER BY number;

-- name: dump_followers
-- The runs that wait for this run's end.
SELECT follower, call FROM everstep.followers WHERE run = $1 ORDER BY follower, call;

-- name: dump_holds
-- Open and resolved ones.
SELECT holds.id, run, reason, step, summary, report, resolutions, holds.created_at, resolved_at, resolution, by, note, ''::text
FROM everstep.holds WHERE run = $1 ORDER BY holds.created_at, holds.id;

-- name: dump_effects
-- The keys of its actions.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM everstep.effects WHERE run = $1 ORDER BY key;

-- name: dump_waiters
-- The whole table. It has few rows, because each is a call that waits now.
SELECT key, call FROM everstep.waiters WHERE run = $1 ORDER BY key, call;

-- name: dump_archive
-- The oldest first.
SELECT run, generation, what, seq, row, why, at FROM everstep.archive WHERE run = $1 ORDER BY id;

-- name: dump_answers
-- Which events hold the answers.
SELECT run, number, generation, seq FROM everstep.answers WHERE run = $1 ORDER BY number;

-- name: dump_entries
-- All streams of all generations.
SELECT run, generation, name, position, seq, step, attempt, first, secret, at, value, digest FROM everstep.streams
WHERE run = $1 ORDER BY generation, name, position;

-- name: dump_markers
-- The markers of atomic steps that write to the store itself.
SELECT key, run, step, attempt, outcome, at FROM everstep.everstep_markers WHERE run = $1 ORDER BY key;

-- name: are_taken
-- Whether any of these ids of runs or holds, or keys of markers, exists here.
SELECT EXISTS (SELECT 1 FROM pg_catalog.unnest($1::text[]) AS wanted (value) JOIN everstep.runs ON runs.id = wanted.value)
    OR EXISTS (SELECT 1 FROM pg_catalog.unnest($2::text[]) AS wanted (value) JOIN everstep.holds ON holds.id = wanted.value)
    OR EXISTS (SELECT 1 FROM pg_catalog.unnest($3::text[]) AS wanted (value) JOIN everstep.everstep_markers ON everstep_markers.key = wanted.value);

-- name: are_keys_taken
-- Whether any step here has, or had, one of these keys.
SELECT EXISTS (SELECT 1 FROM pg_catalog.unnest($1::text[]) AS wanted (value) JOIN everstep.effects ON effects.key = wanted.value);

-- name: put_run
-- No run has this id: the same transaction has checked that.
INSERT INTO everstep.runs (id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at,
    queue, priority, tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview,
    published, outcome, budget)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25);

-- name: put_tag
-- Searches find the run by it.
INSERT INTO everstep.tagged (name, value, created_at, run) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING;

-- name: put_event
-- Unchanged: its digest was verified.
INSERT INTO everstep.events (run, generation, seq, kind, step, at, body, digest) VALUES ($1, $2, $3, $4, $5, $6, $7, $8);

-- name: put_payload
-- Named by its digest.
INSERT INTO everstep.payloads (run, digest, value) VALUES ($1, $2, $3);

-- name: put_checkpoint
-- Its event has its digest.
INSERT INTO everstep.checkpoints (run, generation, seq, previous, engine, state, digest, complete) VALUES ($1, $2, $3, $4, $5, $6, $7, $8);

-- name: put_delivery
-- With its number, because histories refer to it, or with NULL for the next free number. The table is locked against
-- other deliveries, so that none takes a number meanwhile.
WITH kept AS MATERIALIZED (
    SELECT coalesce($1::bigint, pg_catalog.nextval('everstep.signals_number_seq')) AS number
), moved AS MATERIALIZED (
    SELECT pg_catalog.setval('everstep.signals_number_seq', kept.number) FROM kept, everstep.signals_number_seq AS numbers
    WHERE kept.number > numbers.last_value OR NOT numbers.is_called
)
INSERT INTO everstep.signals (number, run, kind, name, id, value, at, state)
SELECT kept.number, $2, $3, $4, $5, $6, $7, $8 FROM kept LEFT JOIN moved ON true RETURNING number;

-- name: put_answer
-- With the number that its request has here.
INSERT INTO everstep.answers (run, number, generation, seq) VALUES ($1, $2, $3, $4);

-- name: put_entry
-- An entry of a stream, unchanged.
INSERT INTO everstep.streams (run, generation, name, position, seq, step, attempt, first, secret, at, value, digest)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: number_taken
-- Whether a delivery here has this number.
SELECT 1 FROM everstep.signals WHERE number = $1;

-- name: put_follower
-- A run that receives the end.
INSERT INTO everstep.followers (run, follower, call) VALUES ($1, $2, $3);

-- name: put_hold
-- Open or resolved, as it was.
INSERT INTO everstep.holds (id, run, reason, step, summary, report, resolutions, created_at, resolved_at, resolution, by, note)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: put_effect
-- A key that exists here stays as it is.
INSERT INTO everstep.effects (key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by,
    note, digest, outcome, secret)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17) ON CONFLICT DO NOTHING;

-- name: put_waiter
-- A step that waits for a key.
INSERT INTO everstep.waiters (key, run, call) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING;

-- name: put_archived
-- What was archived before it was moved.
INSERT INTO everstep.archive (run, generation, what, seq, row, why, at) VALUES ($1, $2, $3, $4, $5, $6, $7);

-- name: put_marker
-- The marker of an atomic step that wrote to the store from which the run comes.
INSERT INTO everstep.everstep_markers (key, run, step, attempt, outcome, at) VALUES ($1, $2, $3, $4, $5, $6);

-- name: put_arrival
-- The last event that the run brought along.
INSERT INTO everstep.arrivals (run, generation, seq, doubted) VALUES ($1, $2, $3, $4);
