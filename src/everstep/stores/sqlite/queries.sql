-- Every statement of the SQLite store, each with its reason.
--
-- {rows:n} becomes rows of n parameters, as many as a batch has (see queries.py): every step of a statement releases
-- Python's global lock, and a busy thread then keeps it for milliseconds, so a batch takes few statements.
-- Values are always parameters. Lists of texts come as one parameter, a JSON array.

-- ------------------------------------------------------------------------------------------------------- schema

-- name: what_it_is
-- Read from any SQLite file before anything is changed: its owner, and whether it is empty.
SELECT (SELECT application_id FROM pragma_application_id), NOT EXISTS (SELECT 1 FROM sqlite_schema);

-- name: schema_version
-- Only read from a file that is a store.
SELECT value FROM meta WHERE name = 'schema_version';

-- name: works_with
-- The version that a release must know at least, if that is not the schema's own.
SELECT value FROM meta WHERE name = 'works_with';

-- name: forget_works_with
-- A new version, which older releases cannot use unless its migration says so.
DELETE FROM meta WHERE name = 'works_with';

-- name: set_works_with
-- In one transaction with the migration.
INSERT INTO meta (name, value) VALUES ('works_with', ?);

-- name: set_schema_version
-- In one transaction with the migration that leads to it.
INSERT INTO meta (name, value) VALUES ('schema_version', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- ---------------------------------------------------------------------------------------------------- appending

-- name: move_head
-- An append to a run that stays `running` under the same owner. It changes no column that an index contains or tests,
-- so no index is written. It changes no row of a run that is not as expected.
UPDATE runs SET
    head_seq = ?9, head_digest = ?10, updated_at = ?6, current_step = ?7, published = coalesce(?8, published), deaths = 0
WHERE id = ?1 AND generation = ?2 AND epoch = ?3 AND head_seq = ?4 AND head_digest = ?5
    AND +status = 'running' AND +wake_at IS NULL;

-- name: move_heads
-- The same for many. (A list of a single row takes longer than no list.) Each `+` keeps SQLite from any index but that of
-- the ids: by another one it would walk over all runs that are running.
WITH new (
    run, generation, epoch, expected_seq, expected_digest, at, current_step, published, head_seq, head_digest
) AS (VALUES {rows:10})
UPDATE runs INDEXED BY sqlite_autoindex_runs_1 SET
    head_seq = new.head_seq, head_digest = new.head_digest, updated_at = new.at, current_step = new.current_step,
    published = coalesce(new.published, runs.published), deaths = 0
FROM new
WHERE runs.id = new.run AND +runs.generation = new.generation AND +runs.epoch = new.epoch
    AND +runs.head_seq = new.expected_seq AND +runs.head_digest = new.expected_digest
    AND +runs.status = 'running' AND +runs.wake_at IS NULL;

-- name: change_row
-- An append that also changes status, lease or timer. An end has an ended_at and gives the lease back.
UPDATE runs SET
    head_seq = ?9, head_digest = ?10, updated_at = ?6, current_step = ?7, published = coalesce(?8, published),
    status = ?11, wake_at = ?12, outcome = ?13, ended_at = ?14, owner = CASE WHEN ?15 THEN NULL ELSE owner END,
    deaths = CASE WHEN ?16 THEN 0 ELSE deaths END
WHERE id = ?1 AND generation = ?2 AND epoch = ?3 AND head_seq = ?4 AND head_digest = ?5;

-- name: change_rows
-- The same for many. See `move_heads`.
WITH new (
    run, generation, epoch, expected_seq, expected_digest, at, current_step, published, head_seq, head_digest,
    status, wake_at, outcome, ended_at, release, progress
) AS (VALUES {rows:16})
UPDATE runs INDEXED BY sqlite_autoindex_runs_1 SET
    head_seq = new.head_seq, head_digest = new.head_digest, updated_at = new.at, current_step = new.current_step,
    published = coalesce(new.published, runs.published), status = new.status, wake_at = new.wake_at,
    outcome = new.outcome, ended_at = new.ended_at, owner = CASE WHEN new.release THEN NULL ELSE runs.owner END,
    deaths = CASE WHEN new.progress THEN 0 ELSE runs.deaths END
FROM new
WHERE runs.id = new.run AND +runs.generation = new.generation AND +runs.epoch = new.epoch
    AND +runs.head_seq = new.expected_seq AND +runs.head_digest = new.expected_digest;

-- name: set_budget
-- After an append was accepted, for the few runs that have a budget.
UPDATE runs SET budget = ? WHERE id = ?;

-- name: append_events
-- The key (run, generation, seq) makes a second event with one number impossible, whatever else goes wrong.
INSERT INTO events (run, generation, seq, kind, step, at, body, digest) VALUES {rows:8};

-- name: keep_payloads
-- A payload is named by its digest, so an existing one is the same.
INSERT INTO payloads (run, digest, value) VALUES {rows:3} ON CONFLICT DO NOTHING;

-- name: keep_checkpoints
-- In one transaction with their events. Only a damaged row can have taken a place already: it stays, and recovery finds
-- that it is not the one that its event names.
INSERT INTO checkpoints (run, generation, seq, previous, engine, state, digest, complete) VALUES {rows:8}
ON CONFLICT DO NOTHING;

-- name: drop_checkpoints
-- All but the newest few. Recovery uses the newest; the others are kept in case that one is damaged.
DELETE FROM checkpoints WHERE run = ?1 AND generation = ?2 AND seq < (
    SELECT min(seq) FROM (
        SELECT seq FROM checkpoints WHERE run = ?1 AND generation = ?2 ORDER BY seq DESC LIMIT ?3
    )
);

-- name: keep_answers
-- In one transaction with their events. The first answer to a request counts.
INSERT INTO answers (run, number, generation, seq) VALUES {rows:4} ON CONFLICT DO NOTHING;

-- name: keep_entries
-- An append without events may be repeated when its commit is unknown: existing rows stay.
INSERT INTO streams (run, generation, name, position, seq, step, attempt, first, secret, at, value, digest)
VALUES {rows:12} ON CONFLICT DO NOTHING;

-- name: answer
-- Which event holds the answer to a request.
SELECT run, number, generation, seq FROM answers WHERE run = ?1 AND number = ?2;

-- name: stream
-- Entries after a position, in order. Texts are read as bytes, because they may be damaged.
SELECT CAST(run AS BLOB), generation, CAST(name AS BLOB), position, seq, CAST(step AS BLOB), attempt, first, secret, at,
    value, digest
FROM streams WHERE run = ?1 AND generation = ?2 AND name = ?3 AND position > ?4 ORDER BY position LIMIT ?5;

-- name: stream_head
-- The newest entry, which the next one follows.
SELECT CAST(run AS BLOB), generation, CAST(name AS BLOB), position, seq, CAST(step AS BLOB), attempt, first, secret, at,
    value, digest
FROM streams WHERE run = ?1 AND generation = ?2 AND name = ?3 ORDER BY position DESC LIMIT 1;

-- name: streams
-- The streams of a run, and the newest position of each. It hops from name to name: a stream may have a million
-- entries.
WITH RECURSIVE names (name) AS (
    SELECT min(name) FROM streams WHERE run = ?1 AND generation = ?2
    UNION ALL
    SELECT (SELECT min(name) FROM streams WHERE run = ?1 AND generation = ?2 AND name > names.name)
    FROM names WHERE names.name IS NOT NULL
)
SELECT CAST(name AS BLOB),
    (SELECT max(position) FROM streams WHERE run = ?1 AND generation = ?2 AND name = names.name)
FROM names WHERE name IS NOT NULL ORDER BY name;

-- name: entries_to_archive
-- Entries that were written after the last good event of this generation. Texts are read as bytes, because they may be
-- damaged.
SELECT CAST(run AS BLOB), generation, CAST(name AS BLOB), position, seq, CAST(step AS BLOB), attempt, first, secret, at,
    value, digest
FROM streams WHERE run = ?1 AND generation = ?2 AND seq > ?3 ORDER BY name, position;

-- name: forget_entries
-- They are in the archive now.
DELETE FROM streams WHERE run = ?1 AND generation = ?2 AND seq > ?3;

-- name: forget_answers
-- Their events are in the archive: the requests will be taken and answered again.
DELETE FROM answers WHERE run = ?1 AND generation = ?2 AND seq > ?3;

-- name: archive
-- Nothing that was damaged is overwritten or lost.
INSERT INTO archive (run, generation, what, seq, row, why, at) VALUES {rows:7};

-- name: remove_checkpoint
-- In one transaction with its copy in the archive.
DELETE FROM checkpoints WHERE run = ? AND generation = ? AND seq = ?;

-- name: create_runs
-- An id that exists is left alone; the number of changes tells.
INSERT INTO runs (id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at,
    queue, priority, tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview,
    published, outcome, budget)
VALUES {rows:25} ON CONFLICT DO NOTHING;

-- name: keep_tags
-- Searches find new runs by them.
INSERT INTO tagged (name, value, created_at, run) VALUES {rows:4} ON CONFLICT DO NOTHING;

-- name: restart_run
-- A new generation in the old row. The epoch stays: epochs never go down. The first and the last parameters are
-- those of create_runs, so ?9 (its epoch) is not used.
UPDATE runs SET
    workflow = ?2, version = ?3, semantics = ?4, status = ?5, generation = ?6, head_seq = ?7, head_digest = ?8,
    owner = ?10, wake_at = ?11, queue = ?12, priority = ?13, tags = ?14, parent = ?15, arguments = ?16,
    current_step = ?17, deaths = ?18, created_at = ?19, updated_at = ?20, ended_at = ?21, preview = ?22,
    published = ?23, outcome = ?24, budget = ?25
WHERE id = ?1 AND ?9 IS NOT NULL;

-- name: row_to_repair
-- The row as it is, if its epoch is the expected one and no living worker drives it.
SELECT CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget
FROM runs
WHERE id = ?1 AND epoch = ?2 AND (owner IS NULL OR owner = ?3
    OR NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = owner AND workers.lease_until > 0));

-- name: events_to_archive
-- What comes after the last good event, and what cannot belong to any existing generation.
SELECT CAST(run AS BLOB), generation, seq, CAST(kind AS BLOB), CAST(step AS BLOB), at, body, digest FROM events
WHERE run = ?1 AND ((generation = ?2 AND (seq > ?3 OR seq < 1)) OR generation > ?2 OR generation < 1)
ORDER BY generation, seq;

-- name: forget_events
-- They are in the archive now.
DELETE FROM events
WHERE run = ?1 AND ((generation = ?2 AND (seq > ?3 OR seq < 1)) OR generation > ?2 OR generation < 1);

-- name: checkpoints_to_archive
-- The checkpoints of the archived events: they are useless without them.
SELECT CAST(run AS BLOB), generation, seq, previous, engine, state, digest, complete FROM checkpoints
WHERE run = ?1 AND ((generation = ?2 AND (seq > ?3 OR seq < 1)) OR generation > ?2 OR generation < 1)
ORDER BY generation, seq;

-- name: forget_checkpoints
-- They are in the archive now.
DELETE FROM checkpoints
WHERE run = ?1 AND ((generation = ?2 AND (seq > ?3 OR seq < 1)) OR generation > ?2 OR generation < 1);

-- name: payloads_to_archive
-- Payloads that do not match their digests: an existing payload is never written again.
SELECT CAST(run AS BLOB), CAST(digest AS BLOB), value FROM payloads
WHERE run = ?1 AND digest IN (SELECT value FROM json_each(?2)) ORDER BY digest;

-- name: forget_payloads
-- They are in the archive now.
DELETE FROM payloads WHERE run = ?1 AND digest IN (SELECT value FROM json_each(?2));

-- name: archive_one
-- One row, as `archive` does.
INSERT INTO archive (run, generation, what, seq, row, why, at) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: raise_epoch
-- The worker that drove the run before is fenced.
UPDATE runs SET epoch = epoch + 1, owner = NULL WHERE id = ?;

-- name: append_event
-- One event, as `append_events` does.
INSERT INTO events (run, generation, seq, kind, step, at, body, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: pend_again
-- Deliveries whose events were archived, or that the archived end had left undelivered, are pending again.
UPDATE signals SET state = 'pending' WHERE run = ?1 AND state IN ('consumed', 'undelivered') AND number IN (SELECT value FROM json_each(?2));

-- name: mark_restored
-- One more restore, if as many are known as expected and no worker is registered.
INSERT INTO meta (name, value) SELECT 'restores', ?1 + 1
WHERE coalesce((SELECT value FROM meta WHERE name = 'restores'), 0) = ?1 AND NOT EXISTS (SELECT 1 FROM workers)
ON CONFLICT (name) DO UPDATE SET value = excluded.value RETURNING value;

-- name: begin_life
-- Later histories can be told from the histories before this restore.
INSERT INTO meta (name, value) VALUES ('life', lower(hex(randomblob(8))))
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: note_time
-- With each lease. A machine's clock may be set back; the store's time must not go back with it.
INSERT INTO meta (name, value) VALUES ('latest_time', ?)
ON CONFLICT (name) DO UPDATE SET value = max(meta.value, excluded.value);

-- name: latest_time
-- Read once, when a store is opened.
SELECT coalesce((SELECT value FROM meta WHERE name = 'latest_time'), 0);

-- name: ties
-- The runs that an unfinished run follows, that follow it, that have keys it waits for, and that wait for its keys.
-- Never the run itself, although a run may follow itself.
SELECT run FROM followers WHERE follower = ?1 AND run <> ?1
UNION SELECT follower FROM followers WHERE run = ?1 AND follower <> ?1
UNION SELECT effects.run FROM waiters JOIN effects ON effects.key = waiters.key WHERE waiters.run = ?1 AND effects.run <> ?1
UNION SELECT waiters.run FROM effects JOIN waiters ON waiters.key = effects.key WHERE effects.run = ?1 AND waiters.run <> ?1
ORDER BY 1;

-- name: asking
-- Unfinished runs that have asked for an approval.
SELECT DISTINCT events.run FROM events INDEXED BY events_asking
    JOIN runs ON runs.id = events.run AND runs.generation = events.generation
WHERE events.kind = 'approval_asked' AND runs.status NOT IN ('completed', 'failed', 'cancelled')
ORDER BY 1;

-- name: deletions
-- Runs that are partly deleted.
SELECT run, generation FROM deletions ORDER BY at, run;

-- name: is_being_deleted
-- Unless it was restarted since, by a release that does not check this table.
SELECT 1 FROM deletions JOIN runs ON runs.id = deletions.run AND runs.generation = deletions.generation
WHERE deletions.run = ?;

-- name: is_needed
-- Whether a run outside this family (?1, as JSON) needs one of it: a parent or a child; a run that may continue and has
-- one as its child (it received its end), or was forked from one, or from a run that has one as its child. The tag of a
-- fork (?2) is the other run's id, `@` and more; `A` is the next character after `@`.
WITH family AS MATERIALIZED (SELECT value AS run FROM json_each(?1)),
users AS MATERIALIZED (
    SELECT DISTINCT signals.run AS run FROM family CROSS JOIN signals ON signals.name = family.run AND signals.kind = 'child'
),
needing AS (
    SELECT run FROM users
    UNION ALL
    SELECT tagged.run FROM (SELECT run FROM family UNION SELECT run FROM users) AS source
        CROSS JOIN tagged ON tagged.name = ?2 AND tagged.value > source.run || '@' AND tagged.value < source.run || 'A'
)
SELECT EXISTS (
        SELECT 1 FROM needing CROSS JOIN runs ON runs.id = needing.run
        WHERE runs.status NOT IN ('completed', 'cancelled') AND runs.id NOT IN (SELECT run FROM family)
    )
    OR EXISTS (
        SELECT 1 FROM family CROSS JOIN runs INDEXED BY runs_parent ON runs.parent = family.run
        WHERE runs.id NOT IN (SELECT run FROM family)
    )
    OR EXISTS (
        SELECT 1 FROM family CROSS JOIN runs ON runs.id = family.run CROSS JOIN runs AS parents ON parents.id = runs.parent
        WHERE parents.id NOT IN (SELECT run FROM family)
    );

-- name: restores
-- How often the store was restored from a backup.
SELECT coalesce((SELECT value FROM meta WHERE name = 'restores'), 0);

-- name: life
-- The parts of the store's life: random bits that are drawn with each restore, and the number of restores. (An earlier
-- release only counts.)
SELECT coalesce((SELECT value FROM meta WHERE name = 'life'), substr((SELECT value FROM meta WHERE name = 'entropy'), 1, 16))
    || '.' || coalesce((SELECT value FROM meta WHERE name = 'restores'), 0);

-- name: arrival
-- Whether, and with which events, a run was imported.
SELECT run, generation, seq, doubted FROM arrivals WHERE run = ?;

-- name: archived
-- The oldest first.
SELECT run, generation, what, seq, row, why, at FROM archive INDEXED BY archive_run WHERE run = ? ORDER BY id;

-- name: archived_at
-- Read back after an unknown commit: a repair always archives the row.
SELECT count(*) FROM archive INDEXED BY archive_run WHERE run = ? AND what = 'run' AND at = ?;

-- name: run_head
-- The columns that decide whether an operation is accepted.
SELECT generation, epoch, head_seq, head_digest, CAST(status AS BLOB) FROM runs WHERE id = ?;

-- name: children_states
-- The columns that decide whether a child to be started is followed instead.
SELECT id, CAST(workflow AS BLOB), CAST(arguments AS BLOB), CAST(status AS BLOB), outcome, budget
FROM runs WHERE id IN (SELECT value FROM json_each(?));

-- name: event_digest
-- Read back after an unknown commit.
SELECT digest FROM events WHERE run = ? AND generation = ? AND seq = ?;

-- ------------------------------------------------------------------------------------------------------- inbox

-- name: entangled
-- Of runs about to end: those whose end concerns others, because they are followed (1), have deliveries in their inbox
-- (0), or have keys whose effects are in progress (2).
SELECT run, 1 FROM followers WHERE run IN (SELECT value FROM json_each(?1))
UNION ALL
SELECT run, 0 FROM signals INDEXED BY signals_pending
WHERE state = 'pending' AND run IN (SELECT value FROM json_each(?1))
UNION ALL
SELECT run, 2 FROM effects INDEXED BY effects_run
WHERE state = 'under-way' AND run IN (SELECT value FROM json_each(?1));

-- name: consume
-- Numbers of another run are left alone.
UPDATE signals SET state = 'consumed' WHERE run = ? AND number IN (SELECT value FROM json_each(?));

-- name: pending_cancels
-- A cancel is never lost: a run does not end over one that it has not consumed.
SELECT number FROM signals INDEXED BY signals_pending WHERE run = ? AND state = 'pending' AND kind = 'cancel';

-- name: settle_inbox
-- The run has ended: its pending deliveries become undelivered, and stay visible.
UPDATE signals INDEXED BY signals_pending SET state = 'undelivered' WHERE run = ? AND state = 'pending';

-- name: redeliver
-- The run had ended and its code continues: what was sent to it meanwhile, and acknowledged, is delivered after all.
UPDATE signals SET state = 'pending' WHERE run = ?1 AND state = 'undelivered' AND kind IN ('signal', 'request');

-- name: leave_inbox
-- The run is restarted: what its code has not taken is never delivered, and an id that was sent before may be sent
-- again. (Except a request's: its answer is still given to a caller that asks again.)
UPDATE signals SET
    state = CASE state WHEN 'consumed' THEN state ELSE 'left' END,
    id = CASE WHEN kind IN ('signal', 'cancel') THEN '' ELSE id END
WHERE run = ?1;

-- name: post
-- Into the inbox of a run that has not ended, unless the same kind and id exists. (Not ON CONFLICT, which would use up
-- a number.) The id of a `child` or `key` delivery is a call, which may come again.
INSERT INTO signals (run, kind, name, id, value, at, state)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, 'pending' FROM runs
WHERE runs.id = ?1 AND runs.status IN ('queued', 'running', 'waiting', 'held')
    AND NOT EXISTS (
        SELECT 1 FROM signals AS there
        WHERE there.run = ?1 AND there.kind = ?2 AND there.id = ?4 AND there.id <> ''
            AND there.kind NOT IN ('child', 'key')
    )
RETURNING number;

-- name: duplicate
-- The existing delivery with this kind and id.
SELECT number, state FROM signals WHERE run = ?1 AND kind = ?2 AND id = ?3 AND id <> '' AND kind NOT IN ('child', 'key');

-- name: post_again
-- A delivery that was undelivered and is sent again to a run that has not ended.
UPDATE signals SET state = 'pending', name = ?3, value = ?4, at = ?5
WHERE number = ?1 AND EXISTS (
    SELECT 1 FROM runs WHERE runs.id = ?2 AND runs.status IN ('queued', 'running', 'waiting', 'held')
)
RETURNING number;

-- name: deliver
-- For deliveries whose sender gets no verdict: one that comes too late is kept as undelivered, so it is visible.
INSERT INTO signals (run, kind, name, id, value, at, state)
SELECT ?1, ?2, ?3, ?4, ?5, ?6,
    CASE WHEN runs.status IN ('completed', 'failed', 'cancelled') THEN 'undelivered' ELSE 'pending' END
FROM runs WHERE runs.id = ?1
    AND NOT EXISTS (
        SELECT 1 FROM signals AS there
        WHERE there.run = ?1 AND there.kind = ?2 AND there.id = ?4 AND there.id <> ''
            AND there.kind NOT IN ('child', 'key')
    );

-- name: follow
-- The follower receives the run's end, once.
INSERT INTO followers (run, follower, call) VALUES {rows:3} ON CONFLICT DO NOTHING;

-- name: tell_followers
-- Delivers the ends of runs to the inboxes of their followers, in the order of the batch.
WITH ended (place, run, value, at) AS (VALUES {rows:4})
INSERT INTO signals (run, kind, name, id, value, at, state)
SELECT followers.follower, 'child', ended.run, CAST(followers.call AS TEXT), ended.value, ended.at,
    CASE WHEN runs.status IN ('completed', 'failed', 'cancelled') THEN 'undelivered' ELSE 'pending' END
FROM ended CROSS JOIN followers ON followers.run = ended.run JOIN runs ON runs.id = followers.follower
ORDER BY ended.place, followers.follower, followers.call;

-- name: forget_followers
-- They have received the end.
DELETE FROM followers WHERE run IN (SELECT value FROM json_each(?));

-- name: stop_following
-- Ends of runs that the old generation followed must not look like ends of the new one's calls.
DELETE FROM followers WHERE follower = ?;

-- -------------------------------------------------------------------------------------------------------- keys

-- name: store_entropy
-- The store's random bits; never changed.
SELECT value FROM meta WHERE name = 'entropy';

-- name: draw_entropy
-- A store that begins as a copy of another one must not be taken for that one.
UPDATE meta SET value = lower(hex(randomblob(16))) WHERE name = 'entropy';

-- name: effect
-- The owner of a key: it decides about a claim, and its outcome is what a second step shares.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM effects WHERE key = ?;

-- name: write_effect
-- The same transaction has just decided that the key may be changed in this way.
INSERT INTO effects (key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by,
    note, digest, outcome, secret)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET
    state = excluded.state, run = excluded.run, generation = excluded.generation, call = excluded.call,
    seq = excluded.seq, step = excluded.step, effect = excluded.effect, arguments = excluded.arguments,
    round = excluded.round, begun_at = excluded.begun_at, changed_at = excluded.changed_at, by = excluded.by,
    note = excluded.note, digest = excluded.digest, outcome = excluded.outcome, secret = excluded.secret;

-- name: delete_effect
-- A key that was never done and is free again is not kept.
DELETE FROM effects WHERE key = ?;

-- name: effects_under_way
-- The keys of the run's steps when it ends.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM effects INDEXED BY effects_run WHERE run = ? AND generation = ? AND state = 'under-way' ORDER BY key;

-- name: effects
-- A list for people, the most recently changed first. ?1: a prefix of the keys.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM effects INDEXED BY effects_changed
WHERE substr(key, 1, length(?1)) = ?1 AND (?2 IS NULL OR run = ?2) AND (?3 IS NULL OR step = ?3)
    AND (?4 IS NULL OR state = ?4)
ORDER BY changed_at DESC, key LIMIT ?5 OFFSET ?6;

-- name: old_effects
-- The oldest first. Keys in progress or being undone are never forgotten, nor keys that a run depends on which may
-- continue.
SELECT key FROM effects INDEXED BY effects_changed
WHERE changed_at < ?1 AND state IN ('done', 'free')
    AND NOT EXISTS (
        SELECT 1 FROM relied CROSS JOIN runs ON runs.id = relied.run
        WHERE relied.key = effects.key AND runs.status NOT IN ('completed', 'cancelled'))
ORDER BY changed_at, key LIMIT ?2;

-- name: forget_effects
-- Keys that were found by `old_effects`.
DELETE FROM effects WHERE key IN (SELECT value FROM json_each(?1));

-- name: rely_on_key
-- The key is kept while the run may continue.
INSERT INTO relied (key, run) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: forget_relied
-- The run no longer depends on these keys.
DELETE FROM relied WHERE key IN (SELECT value FROM json_each(?1));

-- name: wait_for_key
-- The step receives one delivery when the key changes.
INSERT INTO waiters (key, run, call) VALUES (?, ?, ?) ON CONFLICT DO NOTHING;

-- name: waiters
-- For a reader.
SELECT run, call FROM waiters WHERE key = ? ORDER BY run, call;

-- name: awaited_keys
-- Which of these keys any step waits for.
SELECT key FROM waiters WHERE key IN (SELECT value FROM json_each(?)) LIMIT 1;

-- name: tell_waiters
-- Delivers the change of a key to the inboxes of the runs that wait for it; an ended run needs it no longer.
INSERT INTO signals (run, kind, name, id, value, at, state)
SELECT waiters.run, 'key', waiters.key, CAST(waiters.call AS TEXT), x'', ?2, 'pending'
FROM waiters JOIN runs ON runs.id = waiters.run
WHERE waiters.key = ?1 AND runs.status NOT IN ('completed', 'failed', 'cancelled')
ORDER BY waiters.run, waiters.call;

-- name: tell_of_key
-- The same for a step that would wait for a key which is already settled.
INSERT INTO signals (run, kind, name, id, value, at, state)
SELECT ?1, 'key', ?2, ?3, x'', ?4, 'pending'
FROM runs WHERE runs.id = ?1 AND runs.status NOT IN ('completed', 'failed', 'cancelled');

-- name: forget_waiters
-- They have received the change.
DELETE FROM waiters WHERE key = ?;

-- ------------------------------------------------------------------------------------------------------- holds

-- name: open_hold
-- A second hold with one id is a mistake of the engine, and fails its unit.
INSERT INTO holds (id, run, reason, step, summary, report, resolutions, created_at, resolved_at, resolution, by, note)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, '', '', '');

-- name: resolve_hold
-- A hold is resolved once.
UPDATE holds SET resolved_at = ?, resolution = ?, by = ?, note = ? WHERE id = ? AND run = ? AND resolved_at IS NULL;

-- name: holds_open
-- The questions that wait for a person: few, however many were resolved before. A workflow's name is read as bytes,
-- because a damaged one must not hide the holds of other runs.
SELECT holds.id, holds.run, holds.reason, holds.step, holds.summary, holds.report, holds.resolutions, holds.created_at,
    holds.resolved_at, holds.resolution, holds.by, holds.note, CAST(runs.workflow AS BLOB)
FROM holds INDEXED BY holds_open JOIN runs ON runs.id = holds.run
WHERE holds.resolved_at IS NULL ORDER BY holds.created_at, holds.id;

-- name: holds_all
-- For a reader who wants the resolved ones as well.
SELECT holds.id, holds.run, holds.reason, holds.step, holds.summary, holds.report, holds.resolutions, holds.created_at,
    holds.resolved_at, holds.resolution, holds.by, holds.note, CAST(runs.workflow AS BLOB)
FROM holds JOIN runs ON runs.id = holds.run ORDER BY holds.created_at, holds.id;

-- name: holds_of_run
-- ?2: only the open ones.
SELECT holds.id, holds.run, holds.reason, holds.step, holds.summary, holds.report, holds.resolutions, holds.created_at,
    holds.resolved_at, holds.resolution, holds.by, holds.note, CAST(runs.workflow AS BLOB)
FROM holds INDEXED BY holds_run JOIN runs ON runs.id = holds.run
WHERE holds.run = ?1 AND (holds.resolved_at IS NULL OR NOT ?2) ORDER BY holds.created_at, holds.id;

-- name: diverged
-- Runs whose code did not match: a worker with other code may check whether its own does.
SELECT holds.run FROM holds INDEXED BY holds_diverged JOIN runs ON runs.id = holds.run
WHERE holds.resolved_at IS NULL AND holds.reason = 'diverged'
    AND runs.workflow IN (SELECT value FROM json_each(?1))
GROUP BY holds.run ORDER BY min(holds.created_at), min(holds.id) LIMIT ?2;

-- ----------------------------------------------------------------------------------------------- notifications

-- name: add_notifications
-- In one transaction with their hold: a crash right after it loses none.
INSERT INTO notifications (id, hold, run, target, state, attempts, next_at, claimed_by, last_error, created_at)
VALUES {rows:10} ON CONFLICT DO NOTHING;

-- name: drop_notifications
-- The hold is resolved, so no notification is needed any more.
UPDATE notifications INDEXED BY notifications_hold SET state = 'dropped', claimed_by = NULL
WHERE hold = ? AND state = 'pending';

-- name: take_notification
-- The condition and the claim are one statement. A claim ends with its time, or with its worker.
UPDATE notifications SET attempts = ?2, claimed_by = ?3, next_at = ?5
WHERE id = ?1 AND state = 'pending' AND attempts = ?2 - 1
    AND (next_at <= ?4
        OR (claimed_by IS NOT NULL AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = claimed_by)));

-- name: notification_sent
-- It has arrived, whatever was recorded meanwhile.
UPDATE notifications SET state = 'sent', claimed_by = NULL, last_error = '' WHERE id = ? AND state <> 'sent';

-- name: notification_not_sent
-- Only the last attempt decides what comes next, and only while the hold is open.
UPDATE notifications SET state = ?3, next_at = ?4, last_error = ?5, claimed_by = NULL
WHERE id = ?1 AND state = 'pending' AND attempts = ?2;

-- name: notification_claim
-- Read back after an unknown commit.
SELECT attempts, claimed_by, next_at FROM notifications WHERE id = ?;

-- name: due_notifications
-- For one target only: other targets may have many, which wait for a process that can reach them.
SELECT CAST(id AS BLOB), CAST(hold AS BLOB), CAST(run AS BLOB), CAST(target AS BLOB), CAST(state AS BLOB), attempts,
    next_at, CAST(claimed_by AS BLOB), CAST(last_error AS BLOB), created_at
FROM notifications INDEXED BY notifications_due
WHERE state = 'pending' AND target = ?1 AND next_at <= ?2 ORDER BY next_at, id LIMIT ?3;

-- name: abandoned_notifications
-- Taken by a worker that died before it recorded the result. At most as many as are sent at once.
SELECT CAST(id AS BLOB), CAST(hold AS BLOB), CAST(run AS BLOB), CAST(target AS BLOB), CAST(state AS BLOB), attempts,
    next_at, CAST(claimed_by AS BLOB), CAST(last_error AS BLOB), created_at
FROM notifications INDEXED BY notifications_claimed
WHERE state = 'pending' AND claimed_by IS NOT NULL AND target = ?1 AND next_at > ?2
    AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = claimed_by)
ORDER BY next_at, id LIMIT ?3;

-- name: next_notification
-- The first entry of the index.
SELECT min(next_at) FROM notifications INDEXED BY notifications_due WHERE state = 'pending' AND target = ?;

-- name: notifications_undelivered
-- For people: few, however many were delivered before.
SELECT CAST(told.id AS BLOB), CAST(told.hold AS BLOB), CAST(told.run AS BLOB), CAST(told.target AS BLOB),
    CAST(told.state AS BLOB), told.attempts, told.next_at, CAST(told.claimed_by AS BLOB), CAST(told.last_error AS BLOB),
    told.created_at
FROM notifications AS told INDEXED BY notifications_undelivered CROSS JOIN holds ON holds.id = told.hold
WHERE told.state IN ('pending', 'given up') AND holds.resolved_at IS NULL ORDER BY told.created_at, told.id;

-- name: notifications_all
-- For a reader who wants the delivered ones as well.
SELECT CAST(id AS BLOB), CAST(hold AS BLOB), CAST(run AS BLOB), CAST(target AS BLOB), CAST(state AS BLOB), attempts,
    next_at, CAST(claimed_by AS BLOB), CAST(last_error AS BLOB), created_at
FROM notifications ORDER BY created_at, id;

-- name: notifications_of_run
-- ?2: only the undelivered ones.
SELECT CAST(told.id AS BLOB), CAST(told.hold AS BLOB), CAST(told.run AS BLOB), CAST(told.target AS BLOB),
    CAST(told.state AS BLOB), told.attempts, told.next_at, CAST(told.claimed_by AS BLOB), CAST(told.last_error AS BLOB),
    told.created_at
FROM notifications AS told INDEXED BY notifications_run CROSS JOIN holds ON holds.id = told.hold
WHERE told.run = ?1 AND (NOT ?2 OR (told.state IN ('pending', 'given up') AND holds.resolved_at IS NULL))
ORDER BY told.created_at, told.id;

-- ------------------------------------------------------------------------------------------------------ leases

-- name: claim
-- The condition and the new epoch in one statement. An owner without a row in `workers` has died; its death counts
-- until an append moves the head (which sets `deaths` to 0). A lease that is not positive has lapsed: see `lapse`.
UPDATE runs SET
    epoch = epoch + 1,
    owner = ?2,
    deaths = deaths + (
        owner IS NOT NULL AND owner <> ?2 AND status IN ('running', 'queued')
        AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = owner)
    )
WHERE id = ?1 AND status IN (?3, ?4, ?5, ?6, ?7, ?8, ?9)
    AND (owner IS NULL OR owner = ?2
        OR NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = owner AND workers.lease_until > 0))
RETURNING CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget;

-- name: release
-- Without history: only the owner and the status. An ended run keeps its status. ?4: 1 if this counts as the death of
-- its owner, else 0. A run without an owner was given back before.
UPDATE runs SET owner = NULL, status = CASE WHEN ended_at IS NULL THEN ?3 ELSE status END,
    deaths = deaths + CASE WHEN owner IS NULL THEN 0 ELSE ?4 END
WHERE id = ?1 AND epoch = ?2;

-- name: lease_of_run
-- Read back after an unknown commit.
SELECT epoch, owner FROM runs WHERE id = ?;

-- name: data_version
-- Changes when another connection has written, never for this one's own writes. Very cheap.
PRAGMA data_version;

-- name: delivery_at
-- Read back after an unknown commit.
SELECT run, kind, name, id, value, at FROM signals WHERE number = ?;

-- name: workers
-- Few rows: one for each living worker.
SELECT id, place, pid, host, started_at, lease_until, CAST(targets AS BLOB), about FROM workers ORDER BY place;

-- name: places
-- The place of each worker's lock, its file of liveness locks, and the end of its lease.
SELECT id, place, lease_until, lock_file FROM workers ORDER BY place;

-- name: neighbours
-- The workers with a lease whose places come after that of ?1, and then from the beginning.
SELECT id, place, pid, host, started_at, lease_until, CAST(targets AS BLOB), about FROM workers
WHERE lease_until > 0 AND id <> ?1
ORDER BY place < coalesce((SELECT place FROM workers WHERE id = ?1), 0), place LIMIT ?2;

-- name: enter_worker
-- Committed only when the worker holds its liveness lock, so that no other process removes it in between.
INSERT INTO workers (id, place, pid, host, started_at, lease_until, targets, about, lock_file)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: remove_worker
-- By its place as well, so that a worker which came back under its id stays.
DELETE FROM workers WHERE id = ? AND place = ?;

-- name: forget_worker
-- The worker leaves by itself.
DELETE FROM workers WHERE id = ?;

-- name: renew
-- Changes nothing if the worker was removed. The number changes in any case, also where a clock was set back: others
-- watch it for changes and never compare it with a time.
UPDATE workers SET
    lease_until = ?1 + (?1 = abs(lease_until)), about = coalesce(?3, about), lock_file = coalesce(?4, lock_file)
WHERE id = ?2;

-- name: lapse
-- Only if the worker has not renewed its lease since ?2 was read.
UPDATE workers SET lease_until = -lease_until WHERE id = ?1 AND lease_until = ?2 AND lease_until > 0;

-- name: note_ended_worker
-- Proven by the kernel, or by the worker itself, which saw everything end that it had begun.
INSERT INTO ended_workers (id, at) VALUES (?, ?) ON CONFLICT (id) DO NOTHING;

-- name: forget_ended_workers
-- A worker that is not recorded here counts as unknown, not as ended.
DELETE FROM ended_workers WHERE at < ?;

-- name: is_ended_worker
-- Read before a step that must not happen twice is repeated.
SELECT 1 FROM ended_workers WHERE id = ?1
UNION ALL SELECT 1 FROM gone_workers WHERE kind = 'worker' AND name = ?1;

-- name: declare_gone
-- A person takes the responsibility that nothing which it began can act any more.
INSERT INTO gone_workers (kind, name, at, by, note) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: gone
-- For people, and for a worker that asks about itself.
SELECT kind, name, at, by, note FROM gone_workers
WHERE (?1 IS NULL OR kind = ?1) AND (?2 IS NULL OR name = ?2) ORDER BY at DESC, kind, name;

-- name: owners
-- Few, including workers that are no longer registered.
SELECT DISTINCT owner FROM runs INDEXED BY runs_owned WHERE owner IS NOT NULL ORDER BY owner;

-- name: fence_runs
-- As `give_back`, for a worker that may come back without knowing that it was declared gone: the new epoch refuses its
-- writes.
UPDATE runs INDEXED BY runs_owned SET
    epoch = epoch + 1, owner = NULL, status = CASE WHEN status = 'running' THEN 'queued' ELSE status END
WHERE owner = ?;

-- name: give_back
-- Another worker continues what a leaving worker was driving.
UPDATE runs INDEXED BY runs_owned SET
    owner = NULL, status = CASE WHEN status = 'running' THEN 'queued' ELSE status END
WHERE owner = ?;

-- ------------------------------------------------------------------------------------------------ finding work

-- name: gone_owners
-- Owners that died or whose lease is marked as lapsed. It hops from owner to owner in the index and never walks their
-- runs.
WITH RECURSIVE owners (id) AS (
    SELECT min(owner) FROM runs INDEXED BY runs_owned WHERE owner IS NOT NULL
    UNION ALL
    SELECT (SELECT min(owner) FROM runs INDEXED BY runs_owned WHERE owner > owners.id)
    FROM owners WHERE owners.id IS NOT NULL
)
SELECT CAST(json_group_array(owners.id) AS BLOB) FROM owners
WHERE owners.id IS NOT NULL AND owners.id <> ?1
    AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = owners.id AND workers.lease_until > 0);

-- name: due_ready_free
-- Each of the `due_` queries returns one row: an array of [priority, created_at, id].
SELECT CAST(json_group_array(json_array(priority, created_at, id)) AS BLOB) FROM (
    SELECT priority, created_at, id FROM runs INDEXED BY runs_free
    WHERE owner IS NULL AND (status = 'running' OR (status = 'queued' AND queue = 'default'))
        AND workflow IN (SELECT value FROM json_each(?1)) AND (?3 IS NULL OR queue IN (SELECT value FROM json_each(?3)))
    ORDER BY priority DESC, created_at, id LIMIT ?2
);

-- name: due_ready_owned
-- ?3: owners that are gone.
SELECT CAST(json_group_array(json_array(priority, created_at, id)) AS BLOB) FROM (
    SELECT priority, created_at, id FROM runs INDEXED BY runs_owned
    WHERE owner IN (SELECT value FROM json_each(?3)) AND status IN ('queued', 'running')
        AND workflow IN (SELECT value FROM json_each(?1)) AND (?4 IS NULL OR queue IN (SELECT value FROM json_each(?4)))
    ORDER BY priority DESC, created_at, id LIMIT ?2
);

-- name: due_timers_free
-- The longest overdue first, so that a limit does not sort a whole backlog. The wake-up time is the first value.
SELECT CAST(json_group_array(json_array(wake_at, priority, created_at, id)) AS BLOB) FROM (
    SELECT wake_at, priority, created_at, id FROM runs INDEXED BY runs_waking
    WHERE owner IS NULL AND status = 'waiting' AND wake_at IS NOT NULL AND wake_at <= ?3
        AND workflow IN (SELECT value FROM json_each(?1)) AND (?4 IS NULL OR queue IN (SELECT value FROM json_each(?4)))
    ORDER BY wake_at, id LIMIT ?2
);

-- name: due_timers_owned
-- ?4: this worker, and the owners that are gone.
SELECT CAST(json_group_array(json_array(wake_at, priority, created_at, id)) AS BLOB) FROM (
    SELECT wake_at, priority, created_at, id FROM runs INDEXED BY runs_owned
    WHERE owner IN (SELECT value FROM json_each(?4)) AND status = 'waiting' AND wake_at <= ?3
        AND workflow IN (SELECT value FROM json_each(?1))
        AND (?5 IS NULL OR owner = ?6 OR queue IN (SELECT value FROM json_each(?5)))
    ORDER BY wake_at, id LIMIT ?2
);

-- name: due_deliveries
-- From the few pending deliveries to their runs, never the other way round. ?3: whether free runs count.
SELECT CAST(json_group_array(json_array(priority, created_at, id)) AS BLOB) FROM (
    SELECT runs.priority, runs.created_at, runs.id
    FROM signals INDEXED BY signals_pending CROSS JOIN runs ON runs.id = signals.run
    WHERE signals.state = 'pending' AND runs.status = 'waiting'
        AND (runs.owner IN (SELECT value FROM json_each(?4)) OR (?3 AND runs.owner IS NULL))
        AND runs.workflow IN (SELECT value FROM json_each(?1))
        AND (?5 IS NULL OR runs.owner = ?6 OR runs.queue IN (SELECT value FROM json_each(?5)))
    GROUP BY signals.run ORDER BY min(signals.number) LIMIT ?2
);

-- name: pending_of_owner
-- Deliveries for runs that a worker drives, also while they are busy. The pending ones are few, so they lead.
SELECT CAST(json_group_array(run) AS BLOB) FROM (
    SELECT signals.run FROM signals INDEXED BY signals_pending CROSS JOIN runs ON runs.id = signals.run
    WHERE signals.state = 'pending' AND runs.owner = ?1
    GROUP BY signals.run ORDER BY min(signals.number)
);

-- name: next_wake_free
-- The first entry of the index.
SELECT min(wake_at) FROM runs INDEXED BY runs_waking
WHERE owner IS NULL AND status = 'waiting' AND wake_at IS NOT NULL;

-- name: next_wake_owned
-- One index lookup per owner.
SELECT min((
    SELECT min(wake_at) FROM runs INDEXED BY runs_owned
    WHERE owner = owners.value AND status = 'waiting' AND wake_at IS NOT NULL
)) FROM json_each(?) AS owners;

-- ----------------------------------------------------------------------------------------------------- reading

-- name: run
-- One run, by its id. Here and wherever a whole row is read, texts come as bytes: a damaged one must not make the row
-- unreadable.
SELECT CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget
FROM runs WHERE id = ?;

-- name: runs
-- Newest first. A tag's name and value are parameters within ?3, never part of a path.
SELECT CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget
FROM runs INDEXED BY runs_created
WHERE ?5 IS NULL AND (?1 IS NULL OR workflow = ?1) AND (?2 IS NULL OR parent = ?2)
    AND (?3 IS NULL OR NOT EXISTS (
        SELECT 1 FROM json_each(?3) AS wanted WHERE NOT EXISTS (
            SELECT 1 FROM json_each(runs.tags) AS tag WHERE tag.key = wanted.key AND tag.value = wanted.value)))
    AND (?6 IS NULL OR (created_at, id) < (?6, ?7))
    AND (?8 = '' OR instr(lower(id), ?8) OR instr(lower(workflow), ?8) OR instr(lower(preview), ?8)
        OR EXISTS (SELECT 1 FROM json_each(CASE WHEN json_valid(tags) THEN tags ELSE '{}' END) AS tag
            WHERE instr(lower(tag.key || '=' || tag.value), ?8)))
ORDER BY created_at DESC, id DESC LIMIT ?4;

-- name: runs_of_status
-- The same for one status. (Several statuses are queried one by one, so that no whole list is sorted.)
SELECT CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget
FROM runs INDEXED BY runs_status
WHERE status = ?5 AND (?1 IS NULL OR workflow = ?1) AND (?2 IS NULL OR parent = ?2)
    AND (?3 IS NULL OR NOT EXISTS (
        SELECT 1 FROM json_each(?3) AS wanted WHERE NOT EXISTS (
            SELECT 1 FROM json_each(runs.tags) AS tag WHERE tag.key = wanted.key AND tag.value = wanted.value)))
    AND (?6 IS NULL OR (created_at, id) < (?6, ?7))
    AND (?8 = '' OR instr(lower(id), ?8) OR instr(lower(workflow), ?8) OR instr(lower(preview), ?8)
        OR EXISTS (SELECT 1 FROM json_each(CASE WHEN json_valid(tags) THEN tags ELSE '{}' END) AS tag
            WHERE instr(lower(tag.key || '=' || tag.value), ?8)))
ORDER BY created_at DESC, id DESC LIMIT ?4;

-- name: runs_tagged
-- The same for runs with a tag (?9, ?10): walked in the order of that tag, whatever else there is.
SELECT CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, runs.created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget
FROM tagged CROSS JOIN runs ON runs.id = tagged.run
WHERE tagged.name = ?9 AND tagged.value = ?10 AND tagged.created_at = runs.created_at
    AND (?5 IS NULL OR status = ?5) AND (?1 IS NULL OR workflow = ?1) AND (?2 IS NULL OR parent = ?2)
    AND NOT EXISTS (
        SELECT 1 FROM json_each(?3) AS wanted WHERE NOT EXISTS (
            SELECT 1 FROM json_each(runs.tags) AS tag WHERE tag.key = wanted.key AND tag.value = wanted.value))
    AND (?6 IS NULL OR (tagged.created_at, tagged.run) < (?6, ?7))
    AND (?8 = '' OR instr(lower(id), ?8) OR instr(lower(workflow), ?8) OR instr(lower(preview), ?8)
        OR EXISTS (SELECT 1 FROM json_each(CASE WHEN json_valid(tags) THEN tags ELSE '{}' END) AS tag
            WHERE instr(lower(tag.key || '=' || tag.value), ?8)))
ORDER BY tagged.created_at DESC, tagged.run DESC LIMIT ?4;

-- name: children
-- Oldest first, as they were started.
SELECT CAST(id AS BLOB), CAST(workflow AS BLOB), CAST(version AS BLOB), semantics, CAST(status AS BLOB), generation,
    head_seq, head_digest, epoch, CAST(owner AS BLOB), wake_at, CAST(queue AS BLOB), priority, CAST(tags AS BLOB),
    CAST(parent AS BLOB), CAST(arguments AS BLOB), CAST(current_step AS BLOB), deaths, created_at, updated_at, ended_at,
    CAST(preview AS BLOB), published, outcome, budget
FROM runs INDEXED BY runs_parent WHERE parent = ? ORDER BY created_at, id;

-- name: counts
-- From the index alone.
SELECT CAST(status AS BLOB), count(*) FROM runs INDEXED BY runs_status GROUP BY status ORDER BY status;

-- name: runs_without_status
-- Damaged rows: their status is not a valid one. The gaps between the valid statuses, in their order, are looked up in
-- the index, so that the number of runs does not matter.
SELECT CAST(id AS BLOB) FROM (
    SELECT id FROM runs INDEXED BY runs_status WHERE status < 'cancelled'
    UNION ALL SELECT id FROM runs INDEXED BY runs_status WHERE status > 'cancelled' AND status < 'completed'
    UNION ALL SELECT id FROM runs INDEXED BY runs_status WHERE status > 'completed' AND status < 'failed'
    UNION ALL SELECT id FROM runs INDEXED BY runs_status WHERE status > 'failed' AND status < 'held'
    UNION ALL SELECT id FROM runs INDEXED BY runs_status WHERE status > 'held' AND status < 'queued'
    UNION ALL SELECT id FROM runs INDEXED BY runs_status WHERE status > 'queued' AND status < 'running'
    UNION ALL SELECT id FROM runs INDEXED BY runs_status WHERE status > 'running' AND status < 'waiting'
    UNION ALL SELECT id FROM runs INDEXED BY runs_status WHERE status > 'waiting'
) LIMIT ?;

-- name: events_packed
-- A whole history in one row, for the same reason as above: row by row, a busy thread makes loading 10,000 events take
-- many seconds. Column by column, so that no row has to be taken apart again. Digests and bodies alternate: joined,
-- they are TEXT, which their bytes go through unchanged, for SQLite does not look into it. Whether numbers are missing
-- shows in their extremes; a digest of another length, in the length of the whole, or as one that does not match.
SELECT (SELECT min(seq) FROM events WHERE run = ?1 AND generation = ?2 AND seq BETWEEN ?3 AND ?4),
    (SELECT max(seq) FROM events WHERE run = ?1 AND generation = ?2 AND seq BETWEEN ?3 AND ?4),
    CAST(json_group_array(kind) AS BLOB), CAST(json_group_array(step) AS BLOB), CAST(group_concat(at) AS BLOB),
    CAST(group_concat(length(body)) AS BLOB), CAST(group_concat(digest || body, '') AS BLOB)
FROM (
    SELECT kind, step, at, body, digest FROM events
    WHERE run = ?1 AND generation = ?2 AND seq BETWEEN ?3 AND ?4 ORDER BY seq
);

-- name: events
-- Row by row, for a history that is too long for one value, or whose texts are damaged.
SELECT seq, CAST(kind AS BLOB), CAST(step AS BLOB), at, body, digest FROM events
WHERE run = ? AND generation = ? AND seq BETWEEN ? AND ? ORDER BY seq;

-- name: checkpoint
-- The newest one before an event.
SELECT run, generation, seq, previous, engine, state, digest, complete FROM checkpoints
WHERE run = ? AND generation = ? AND seq < ? ORDER BY seq DESC LIMIT 1;

-- name: events_only
-- A few events of a history by their numbers: its ends are enough to check a result.
SELECT seq, CAST(kind AS BLOB), CAST(step AS BLOB), at, body, digest FROM events
WHERE run = ? AND generation = ? AND seq IN (?, ?, ?) ORDER BY seq;

-- name: generations
-- One look into the index for each.
WITH RECURSIVE found (generation) AS (
    SELECT min(generation) FROM events WHERE run = ?1
    UNION ALL
    SELECT (SELECT min(generation) FROM events WHERE run = ?1 AND events.generation > found.generation)
    FROM found WHERE found.generation IS NOT NULL
)
SELECT generation FROM found WHERE generation IS NOT NULL ORDER BY generation;

-- name: strays
-- Histories without a row of their run: it is gone, or has another id or generation. From the index alone.
SELECT DISTINCT CAST(events.run AS BLOB), events.generation FROM events
WHERE NOT EXISTS (
    SELECT 1 FROM runs WHERE runs.id = events.run AND runs.generation >= events.generation AND events.generation > 0
)
ORDER BY events.run, events.generation;

-- name: payload
-- A large value that is stored outside its event.
SELECT value FROM payloads WHERE run = ? AND digest = ?;

-- name: inbox
-- Only pending deliveries, however many were delivered before.
SELECT number, run, kind, name, id, value, at, state FROM signals INDEXED BY signals_pending
WHERE run = ? AND state = 'pending' ORDER BY number;

-- name: signals
-- All deliveries, for a reader and for recovery.
SELECT number, run, kind, name, id, value, at, state FROM signals INDEXED BY signals_run WHERE run = ? ORDER BY number;

-- --------------------------------------------------------------------------------------------------- schedules

-- name: create_schedule
-- Only if no schedule has this name; the number of changes tells.
INSERT INTO schedules (name, workflow, revision, next_at, waits, definition, state, created_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: change_schedule
-- Only with the newest revision: of several workers that start one tick, one succeeds.
UPDATE schedules SET workflow = ?2, revision = ?3, next_at = ?4, waits = ?5, definition = ?6, state = ?7, created_at = ?8
WHERE name = ?1 AND revision = ?9;

-- name: delete_schedule
-- The runs that it has started stay.
DELETE FROM schedules WHERE name = ? AND revision = ?;

-- name: schedule_revision
-- Read back after an unknown commit.
SELECT revision FROM schedules WHERE name = ?;

-- name: schedules
-- For people.
SELECT CAST(name AS BLOB), CAST(workflow AS BLOB), revision, next_at, waits, definition, state, created_at
FROM schedules ORDER BY name;

-- name: schedule
-- One of them.
SELECT CAST(name AS BLOB), CAST(workflow AS BLOB), revision, next_at, waits, definition, state, created_at
FROM schedules WHERE name = ?;

-- name: due_schedules
-- What a worker reads when its timer fires, or another process has written.
SELECT CAST(name AS BLOB), CAST(workflow AS BLOB), revision, next_at, waits, definition, state, created_at
FROM schedules INDEXED BY schedules_due
WHERE next_at IS NOT NULL AND next_at <= ?1 AND workflow IN (SELECT value FROM json_each(?2))
ORDER BY next_at, name LIMIT ?3;

-- name: waiting_schedules
-- Schedules with a tick that waits for the end of a run: few.
SELECT CAST(name AS BLOB), CAST(workflow AS BLOB), revision, next_at, waits, definition, state, created_at
FROM schedules INDEXED BY schedules_waiting
WHERE waits AND (next_at IS NULL OR next_at > ?1) AND workflow IN (SELECT value FROM json_each(?2))
ORDER BY name LIMIT ?3;

-- name: next_schedule
-- When the worker must look again. Schedules of workflows that it does not know are left out.
SELECT next_at FROM schedules INDEXED BY schedules_due
WHERE next_at IS NOT NULL AND workflow IN (SELECT value FROM json_each(?1)) ORDER BY next_at LIMIT 1;
