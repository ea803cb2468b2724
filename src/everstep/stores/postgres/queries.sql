-- Every statement of the PostgreSQL store, each with its reason.
--
-- The tables are in the schema `everstep`; for a store in another schema that name replaces this one.
-- Values are always parameters. A list is one parameter, an array; rows for a batch are one array for each column.
--
-- Functions and tables are qualified. Operators and types are found in `pg_catalog` alone, because each session, or
-- behind a pooler each transaction, sets that first (see connections.py). `unnest` of several arrays is syntax: its name
-- stays bare, and it is always the server's own.

-- ----------------------------------------------------------------------------------------------------- settings
-- These run before those settings are in force, so here operators and types are qualified as well.

-- name: settings_missing
-- The settings that a session should have and does not have. One that the server does not know is not missing.
SELECT wanted.name FROM unnest($1::pg_catalog.text[], $2::pg_catalog.text[]) AS wanted (name, value)
WHERE pg_catalog.current_setting(wanted.name, true) OPERATOR(pg_catalog.<>) wanted.value;

-- name: say_for_transaction
-- The first statement of each transaction behind a pooler.
SELECT pg_catalog.set_config(wanted.name, wanted.value, true)
FROM unnest($1::pg_catalog.text[], $2::pg_catalog.text[]) AS wanted (name, value)
WHERE pg_catalog.current_setting(wanted.name, true) IS NOT NULL;

-- name: take_names
-- In a caller's own transaction: returns the settings to restore later.
SELECT pg_catalog.current_setting('search_path'), pg_catalog.current_setting('client_encoding'),
    pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
    pg_catalog.set_config('client_encoding', 'UTF8', true);

-- name: give_names_back
SELECT pg_catalog.set_config('search_path', $1, true), pg_catalog.set_config('client_encoding', $2, true);

-- ------------------------------------------------------------------------------------------------------- schema

-- name: has_schema
-- Whether the schema exists: creating it needs a right, even if it exists.
SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1;

-- name: create_schema
-- In the transaction of the first migration.
CREATE SCHEMA IF NOT EXISTS everstep;

-- name: session
-- The server's process that answers.
SELECT pg_catalog.pg_backend_pid();

-- name: has_meta
-- Whether the schema has a store in it.
SELECT 1 FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = $1 AND relname = 'meta';

-- name: has_tables
-- Whether the schema has any other tables.
SELECT 1 FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = $1 AND relkind = 'r' AND relname <> 'everstep_markers' LIMIT 1;

-- name: owned_by_strangers
-- Roles that own the schema, or one of these tables in it, and could make anything run with the rights of those who
-- write there. Not included: this role and the roles that it is a member of, the owner of the database and its members,
-- superusers.
SELECT DISTINCT owner.rolname::text FROM pg_catalog.pg_namespace AS place
    LEFT JOIN pg_catalog.pg_class AS relation ON relation.relnamespace = place.oid AND relation.relname::text = ANY ($2::text[])
    JOIN pg_catalog.pg_roles AS owner ON owner.oid = place.nspowner OR owner.oid = relation.relowner
    JOIN pg_catalog.pg_database AS here ON here.datname = pg_catalog.current_database()
WHERE place.nspname = $1 AND NOT owner.rolsuper AND owner.rolname <> 'pg_database_owner'
    AND NOT pg_catalog.pg_has_role(owner.oid, 'MEMBER') AND NOT pg_catalog.pg_has_role(owner.oid, here.datdba, 'MEMBER')
ORDER BY 1;

-- name: lock_schema
-- Only one process migrates at a time, until the transaction ends.
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('everstep migration of ' || $1::text, 0));

-- name: schema_version
-- Only read from a schema that is a store.
SELECT value::bigint FROM everstep.meta WHERE name = 'schema_version';

-- name: works_with
-- The version that a release must know at least, if that is not the schema's own.
SELECT value::bigint FROM everstep.meta WHERE name = 'works_with';

-- name: forget_works_with
-- A new version, which older releases cannot use unless its migration says so.
DELETE FROM everstep.meta WHERE name = 'works_with';

-- name: set_works_with
-- In one transaction with the migration.
INSERT INTO everstep.meta (name, value) VALUES ('works_with', $1::bigint::text);

-- name: lock_worker_rows
-- No worker registers during a migration that older releases cannot use.
LOCK TABLE everstep.workers IN SHARE ROW EXCLUSIVE MODE;

-- name: workers_at_work
-- Workers whose lock is held; of those that could never have one, those with a lease. A lock counts only if its role
-- may change the table of workers: any role that can connect to the database can take any lock.
SELECT id, pid, host FROM everstep.workers
WHERE CASE WHEN has_lock = 0 THEN lease_until > 0
    ELSE NOT pg_catalog.pg_try_advisory_xact_lock_shared($1::int, place::int) AND EXISTS (
        SELECT 1 FROM pg_catalog.pg_locks AS held JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
        WHERE held.locktype = 'advisory' AND held.classid = $1::bigint::oid AND held.objid = place::oid AND held.objsubid = 2
            AND held.granted AND held.mode = 'ExclusiveLock'
            AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
            AND pg_catalog.has_table_privilege(session.usesysid, 'everstep.workers', 'UPDATE')
    ) END
ORDER BY id;

-- name: set_schema_version
-- In one transaction with the migration that leads to it.
INSERT INTO everstep.meta (name, value) VALUES ('schema_version', $1::bigint::text)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- ---------------------------------------------------------------------------------------------------- appending

-- name: plan_for_values
-- Plans for the given values, until the end of the transaction.
SET LOCAL plan_cache_mode = force_custom_plan;

-- name: lock_runs
-- Every transaction locks runs in this order, so that none wait in a circle. Later statements of the transaction see
-- what was committed before the lock.
SELECT id FROM everstep.runs WHERE id = ANY ($1::text[]) ORDER BY id FOR UPDATE;

-- name: append_simple
-- Appends that change only their own runs, all at once: a run's row is locked, compared with what is expected, and
-- changed; the events and payloads of exactly those runs are written; their ids are returned. An end that concerns
-- others, because the run is followed, has deliveries in its inbox, or has keys whose effects are in progress, is left
-- alone: a caller that sends ends has locked the runs before. (EXISTS might become a table of all that is pending,
-- built again for each batch.) `fresh`: only if this transaction has created the run. The first 18 parameters are one
-- array for each column of `new`.
WITH new AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bigint[], $7::text[],
        $8::bytea[], $9::bigint[], $10::bytea[], $11::text[], $12::bigint[], $13::bytea[], $14::bigint[],
        $15::bigint[], $16::bigint[], $17::bytea[], $18::bigint[])
    AS new (run, generation, epoch, expected_seq, expected_digest, at, current_step, published, head_seq, head_digest,
        status, wake_at, outcome, ended_at, release, moved, budget, fresh)
), moved AS (
    UPDATE everstep.runs SET
        head_seq = new.head_seq, head_digest = new.head_digest, updated_at = new.at, current_step = new.current_step,
        published = coalesce(new.published, runs.published), status = new.status, wake_at = new.wake_at,
        outcome = new.outcome, ended_at = new.ended_at, owner = CASE WHEN new.release <> 0 THEN NULL ELSE runs.owner END,
        deaths = CASE WHEN new.moved <> 0 THEN 0 ELSE runs.deaths END, budget = coalesce(new.budget, runs.budget)
    FROM new
    WHERE runs.id = new.run AND runs.generation = new.generation AND runs.epoch = new.epoch
        AND runs.head_seq = new.expected_seq AND runs.head_digest = new.expected_digest
        AND (new.fresh = 0 OR runs.xmin = pg_catalog.pg_current_xact_id()::xid)
        AND (new.ended_at IS NULL OR (
            (SELECT 1 FROM everstep.followers WHERE followers.run = new.run LIMIT 1) IS NULL
            AND (SELECT 1 FROM everstep.signals WHERE signals.run = new.run AND signals.state = 'pending' LIMIT 1) IS NULL
            AND (SELECT 1 FROM everstep.effects WHERE effects.run = new.run AND effects.state = 'under-way' LIMIT 1) IS NULL
        ))
    RETURNING runs.id
), appended AS (
    INSERT INTO everstep.events (run, generation, seq, kind, step, at, body, digest)
    SELECT event.* FROM unnest($19::text[], $20::bigint[], $21::bigint[], $22::text[], $23::text[], $24::bigint[],
        $25::bytea[], $26::bytea[]) AS event (run, generation, seq, kind, step, at, body, digest)
    JOIN moved ON moved.id = event.run
), kept AS (
    INSERT INTO everstep.payloads (run, digest, value)
    SELECT payload.* FROM unnest($27::text[], $28::text[], $29::bytea[]) AS payload (run, digest, value)
    JOIN moved ON moved.id = payload.run
    ON CONFLICT DO NOTHING
)
SELECT id FROM moved;

-- name: append_one
-- The same for the most common append: one run, of which only the head moves, one or a few events, and nothing else.
WITH moved AS (
    UPDATE everstep.runs SET
        head_seq = $9, head_digest = $10, updated_at = $6, current_step = $7, published = coalesce($8, published),
        status = $11, wake_at = $12, outcome = NULL, ended_at = NULL, owner = CASE WHEN $13::bigint <> 0 THEN NULL ELSE owner END,
        deaths = CASE WHEN $14::bigint <> 0 THEN 0 ELSE deaths END
    WHERE id = $1 AND generation = $2 AND epoch = $3 AND head_seq = $4 AND head_digest = $5
    RETURNING id
)
INSERT INTO everstep.events (run, generation, seq, kind, step, at, body, digest)
SELECT moved.id, $2, event.* FROM moved, unnest($15::bigint[], $16::text[], $17::text[], $18::bigint[], $19::bytea[],
    $20::bytea[]) AS event (seq, kind, step, at, body, digest);

-- name: start_simple
-- New runs without followers, with their first events, payloads and tags. Those whose ids exist are left alone; the ids
-- of the others are returned. The first 25 parameters are one array for each column of `runs`.
WITH made AS (
    INSERT INTO everstep.runs (id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at,
        queue, priority, tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview,
        published, outcome, budget)
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[], $8::bytea[], $9::bigint[],
        $10::text[], $11::bigint[], $12::text[], $13::bigint[], $14::text[], $15::text[], $16::text[], $17::text[],
        $18::bigint[], $19::bigint[], $20::bigint[], $21::bigint[], $22::text[], $23::bytea[], $24::bytea[], $25::bytea[]) AS new (id)
    ORDER BY new.id ON CONFLICT DO NOTHING RETURNING id
), appended AS (
    INSERT INTO everstep.events (run, generation, seq, kind, step, at, body, digest)
    SELECT event.* FROM unnest($26::text[], $27::bigint[], $28::bigint[], $29::text[], $30::text[], $31::bigint[],
        $32::bytea[], $33::bytea[]) AS event (run, generation, seq, kind, step, at, body, digest)
    JOIN made ON made.id = event.run
), kept AS (
    INSERT INTO everstep.payloads (run, digest, value)
    SELECT payload.* FROM unnest($34::text[], $35::text[], $36::bytea[]) AS payload (run, digest, value)
    JOIN made ON made.id = payload.run
    ON CONFLICT DO NOTHING
), tags AS (
    INSERT INTO everstep.tagged (name, value, created_at, run)
    SELECT tag.* FROM unnest($37::text[], $38::text[], $39::bigint[], $40::text[]) AS tag (name, value, created_at, run)
    JOIN made ON made.id = tag.run
    ON CONFLICT DO NOTHING
)
SELECT id FROM made;

-- name: beside_simple
-- What accepted appends of the same transaction write in addition to their events. An append was accepted if the run
-- has its head and this transaction has written the row. $1 to $3: the runs, their epochs and new heads.
WITH accepted AS MATERIALIZED (
    SELECT runs.id FROM unnest($1::text[], $2::bigint[], $3::bytea[]) AS new (run, epoch, head_digest)
    JOIN everstep.runs ON runs.id = new.run AND runs.epoch = new.epoch AND runs.head_digest = new.head_digest
        AND runs.xmin = pg_catalog.pg_current_xact_id()::xid
), consumed AS (
    UPDATE everstep.signals SET state = 'consumed'
    FROM accepted, unnest($4::text[], $5::bigint[]) AS taken (run, number)
    WHERE taken.run = accepted.id AND signals.run = accepted.id AND signals.number = taken.number
), answered AS (
    INSERT INTO everstep.answers (run, number, generation, seq)
    SELECT answer.* FROM unnest($6::text[], $7::bigint[], $8::bigint[], $9::bigint[])
        AS answer (run, number, generation, seq) JOIN accepted ON accepted.id = answer.run
    ON CONFLICT DO NOTHING
), entered AS (
    INSERT INTO everstep.streams (run, generation, name, position, seq, step, attempt, first, secret, at, value, digest)
    SELECT entry.* FROM unnest($10::text[], $11::bigint[], $12::text[], $13::bigint[], $14::bigint[], $15::text[],
        $16::bigint[], $17::bigint[], $18::bigint[], $19::bigint[], $20::bytea[], $21::bytea[])
        AS entry (run, generation, name, position, seq, step, attempt, first, secret, at, value, digest)
    JOIN accepted ON accepted.id = entry.run
    ON CONFLICT DO NOTHING
)
INSERT INTO everstep.checkpoints (run, generation, seq, previous, engine, state, digest, complete)
SELECT checkpoint.* FROM unnest($22::text[], $23::bigint[], $24::bigint[], $25::bytea[], $26::bytea[], $27::bytea[],
    $28::bytea[], $29::bigint[]) AS checkpoint (run, generation, seq, previous, engine, state, digest, complete)
JOIN accepted ON accepted.id = checkpoint.run
ON CONFLICT DO NOTHING;

-- name: drop_checkpoints_of
-- As `drop_checkpoints`, if the append of the same transaction was accepted.
DELETE FROM everstep.checkpoints WHERE run = $1 AND generation = $2 AND seq < (
    SELECT pg_catalog.min(seq) FROM (
        SELECT seq FROM everstep.checkpoints WHERE run = $1 AND generation = $2 ORDER BY seq DESC LIMIT $3
    ) AS newest
) AND EXISTS (
    SELECT 1 FROM everstep.runs
    WHERE id = $1 AND epoch = $4 AND head_digest = $5 AND runs.xmin = pg_catalog.pg_current_xact_id()::xid
);

-- name: concerned
-- The runs to which a transaction may have to deliver something, in addition to those that it names: followers of runs
-- that end ($1), runs that wait for their keys or for keys that it changes ($2), and the owners of those.
SELECT follower FROM everstep.followers WHERE run = ANY ($1::text[])
UNION SELECT waiters.run FROM everstep.waiters WHERE key = ANY ($2::text[])
UNION SELECT effects.run FROM everstep.effects WHERE key = ANY ($2::text[])
UNION SELECT waiters.run FROM everstep.effects JOIN everstep.waiters ON waiters.key = effects.key
    WHERE effects.run = ANY ($1::text[]) AND effects.state = 'under-way';

-- name: keys_under_way
-- The keys that ending runs may have to give back.
SELECT key FROM everstep.effects WHERE run = ANY ($1::text[]) AND state = 'under-way';

-- name: lock_keys
-- A key may have no row yet, so an advisory lock is taken instead of a row lock. In a fixed order, as for runs. $2 is
-- the schema.
SELECT pg_catalog.pg_advisory_xact_lock(hash) FROM (
    SELECT DISTINCT pg_catalog.hashtextextended($2::text || '/' || key, 0) AS hash FROM pg_catalog.unnest($1::text[]) AS wanted (key) ORDER BY 1
) AS hashes;

-- name: is_hold_taken
-- A second hold with one id is a mistake of the engine, and fails its unit before anything of it is written.
SELECT 1 FROM everstep.holds WHERE id = $1;

-- name: lock_numbers
-- While imported runs keep the numbers of their deliveries, no other transaction takes a number.
LOCK TABLE everstep.signals IN SHARE ROW EXCLUSIVE MODE;

-- name: lock_workers
-- Workers register one after the other.
SELECT pg_catalog.pg_advisory_xact_lock($1::int, 0);

-- name: end_other_sessions
-- Ends what an earlier session of this writer may still be doing, and waits for it, before the writer reads back
-- whether it was done.
SELECT pg_catalog.pg_terminate_backend(pid, 10000) FROM pg_catalog.pg_stat_activity
WHERE (application_name = $1 OR pg_catalog.starts_with(application_name, $1::text || ' '))
    AND pid <> pg_catalog.pg_backend_pid() AND usename = current_user;

-- name: name_session
-- Behind its own name, the session that writes has the place of its worker: while it is there, so is that process.
SELECT pg_catalog.set_config('application_name', $1, false);

-- name: lock_writer
-- Behind a pooler no session can be ended: each transaction of a writer that may be in doubt holds this lock, so a
-- writer that gets it after a lost reply knows that the transaction is over.
SELECT pg_catalog.pg_advisory_xact_lock($1::bigint);

-- name: untag
-- Before a run's row gets other tags.
DELETE FROM everstep.tagged WHERE run = $1;

-- name: change_row
-- An append in a transaction that has locked the run and found it as expected.
UPDATE everstep.runs SET
    head_seq = $9, head_digest = $10, updated_at = $6, current_step = $7, published = coalesce($8, published),
    status = $11, wake_at = $12, outcome = $13, ended_at = $14, owner = CASE WHEN $15::bigint <> 0 THEN NULL ELSE owner END,
    deaths = CASE WHEN $16::bigint <> 0 THEN 0 ELSE deaths END
WHERE id = $1 AND generation = $2 AND epoch = $3 AND head_seq = $4 AND head_digest = $5;

-- name: set_budget
-- After an append was accepted, for the few runs that have a budget.
UPDATE everstep.runs SET budget = $1 WHERE id = $2;

-- name: append_events
-- The key (run, generation, seq) makes a second event with one number impossible, whatever else goes wrong.
INSERT INTO everstep.events (run, generation, seq, kind, step, at, body, digest)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::bigint[],
    $7::bytea[], $8::bytea[]);

-- name: keep_payloads
-- A payload is named by its digest, so an existing one is the same.
INSERT INTO everstep.payloads (run, digest, value)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[])
ON CONFLICT DO NOTHING;

-- name: keep_checkpoints
-- In one transaction with their events. Only a damaged row can have taken a place already: it stays, and recovery finds
-- that it is not the one that its event names.
INSERT INTO everstep.checkpoints (run, generation, seq, previous, engine, state, digest, complete)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bytea[], $5::bytea[], $6::bytea[],
    $7::bytea[], $8::bigint[])
ON CONFLICT DO NOTHING;

-- name: drop_checkpoints
-- All but the newest few. Recovery uses the newest; the others are kept in case that one is damaged.
DELETE FROM everstep.checkpoints WHERE run = $1 AND generation = $2 AND seq < (
    SELECT pg_catalog.min(seq) FROM (
        SELECT seq FROM everstep.checkpoints WHERE run = $1 AND generation = $2 ORDER BY seq DESC LIMIT $3
    ) AS newest
);

-- name: keep_answers
-- In one transaction with their events. The first answer to a request counts.
INSERT INTO everstep.answers (run, number, generation, seq)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) ON CONFLICT DO NOTHING;

-- name: keep_entries
-- An append without events may be repeated when its commit is unknown: existing rows stay.
INSERT INTO everstep.streams (run, generation, name, position, seq, step, attempt, first, secret, at, value, digest)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::bigint[],
    $8::bigint[], $9::bigint[], $10::bigint[], $11::bytea[], $12::bytea[])
ON CONFLICT DO NOTHING;

-- name: answer
-- Which event holds the answer to a request.
SELECT run, number, generation, seq FROM everstep.answers WHERE run = $1 AND number = $2;

-- name: stream
-- Entries after a position, in order.
SELECT run, generation, name, position, seq, step, attempt, first, secret, at, value, digest
FROM everstep.streams WHERE run = $1 AND generation = $2 AND name = $3 AND position > $4 ORDER BY position LIMIT $5;

-- name: stream_head
-- The newest entry, which the next one follows.
SELECT run, generation, name, position, seq, step, attempt, first, secret, at, value, digest
FROM everstep.streams WHERE run = $1 AND generation = $2 AND name = $3 ORDER BY position DESC LIMIT 1;

-- name: streams
-- The streams of a run, and the newest position of each. It hops from name to name: a stream may have a million
-- entries.
WITH RECURSIVE names (name) AS (
    SELECT pg_catalog.min(name) FROM everstep.streams WHERE run = $1 AND generation = $2
    UNION ALL
    SELECT (SELECT pg_catalog.min(name) FROM everstep.streams WHERE run = $1 AND generation = $2 AND name > names.name)
    FROM names WHERE names.name IS NOT NULL
)
SELECT name,
    (SELECT pg_catalog.max(position) FROM everstep.streams WHERE run = $1 AND generation = $2 AND name = names.name)
FROM names WHERE name IS NOT NULL ORDER BY name;

-- name: entries_to_archive
-- Entries that were written after the last good event of this generation.
SELECT run, generation, name, position, seq, step, attempt, first, secret, at, value, digest
FROM everstep.streams WHERE run = $1 AND generation = $2 AND seq > $3 ORDER BY name, position;

-- name: forget_entries
-- They are in the archive now.
DELETE FROM everstep.streams WHERE run = $1 AND generation = $2 AND seq > $3;

-- name: forget_answers
-- Their events are in the archive: the requests will be taken and answered again.
DELETE FROM everstep.answers WHERE run = $1 AND generation = $2 AND seq > $3;

-- name: archive
-- Nothing that was damaged is overwritten or lost.
INSERT INTO everstep.archive (run, generation, what, seq, row, why, at)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[], $5::bytea[], $6::text[], $7::bigint[]);

-- name: remove_checkpoint
-- In one transaction with its copy in the archive.
DELETE FROM everstep.checkpoints WHERE run = $1 AND generation = $2 AND seq = $3;

-- name: create_runs
-- An id that exists is left alone; the number of changes tells. The statement waits for another transaction that is
-- creating it.
INSERT INTO everstep.runs (id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at,
    queue, priority, tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview,
    published, outcome, budget)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[], $8::bytea[], $9::bigint[],
    $10::text[], $11::bigint[], $12::text[], $13::bigint[], $14::text[], $15::text[], $16::text[], $17::text[],
    $18::bigint[], $19::bigint[], $20::bigint[], $21::bigint[], $22::text[], $23::bytea[], $24::bytea[], $25::bytea[]) AS new (id)
ORDER BY new.id ON CONFLICT DO NOTHING;

-- name: keep_tags
-- Searches find new runs by them.
INSERT INTO everstep.tagged (name, value, created_at, run)
SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[]) ON CONFLICT DO NOTHING;

-- name: restart_run
-- A new generation in the old row. The epoch stays: epochs never go down. The first and the last parameters are
-- those of create_runs, so $9 (its epoch) is not used.
UPDATE everstep.runs SET
    workflow = $2, version = $3, semantics = $4, status = $5, generation = $6, head_seq = $7, head_digest = $8,
    owner = $10, wake_at = $11, queue = $12, priority = $13, tags = $14, parent = $15, arguments = $16,
    current_step = $17, deaths = $18, created_at = $19, updated_at = $20, ended_at = $21, preview = $22,
    published = $23, outcome = $24, budget = $25
WHERE id = $1 AND $9 IS NOT NULL;

-- name: row_to_repair
-- The row as it is, if its epoch is the expected one and no living worker drives it.
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs
WHERE id = $1 AND epoch = $2 AND (owner IS NULL OR owner = $3
    OR NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner AND workers.lease_until > 0));

-- name: events_to_archive
-- What comes after the last good event, and what cannot belong to any existing generation.
SELECT run, generation, seq, kind, step, at, body, digest FROM everstep.events
WHERE run = $1 AND ((generation = $2 AND (seq > $3 OR seq < 1)) OR generation > $2 OR generation < 1)
ORDER BY generation, seq;

-- name: forget_events
-- They are in the archive now.
DELETE FROM everstep.events
WHERE run = $1 AND ((generation = $2 AND (seq > $3 OR seq < 1)) OR generation > $2 OR generation < 1);

-- name: checkpoints_to_archive
-- The checkpoints of the archived events: they are useless without them.
SELECT run, generation, seq, previous, engine, state, digest, complete FROM everstep.checkpoints
WHERE run = $1 AND ((generation = $2 AND (seq > $3 OR seq < 1)) OR generation > $2 OR generation < 1)
ORDER BY generation, seq;

-- name: forget_checkpoints
-- They are in the archive now.
DELETE FROM everstep.checkpoints
WHERE run = $1 AND ((generation = $2 AND (seq > $3 OR seq < 1)) OR generation > $2 OR generation < 1);

-- name: payloads_to_archive
-- Payloads that do not match their digests: an existing payload is never written again.
SELECT run, digest, value FROM everstep.payloads
WHERE run = $1 AND digest = ANY ($2::text[]) ORDER BY digest;

-- name: forget_payloads
-- They are in the archive now.
DELETE FROM everstep.payloads WHERE run = $1 AND digest = ANY ($2::text[]);

-- name: archive_one
-- One row, as `archive` does.
INSERT INTO everstep.archive (run, generation, what, seq, row, why, at) VALUES ($1, $2, $3, $4, $5, $6, $7);

-- name: raise_epoch
-- The worker that drove the run before is fenced.
UPDATE everstep.runs SET epoch = epoch + 1, owner = NULL WHERE id = $1;

-- name: append_event
-- One event, as `append_events` does.
INSERT INTO everstep.events (run, generation, seq, kind, step, at, body, digest) VALUES ($1, $2, $3, $4, $5, $6, $7, $8);

-- name: pend_again
-- Deliveries whose events were archived, or that the archived end had left undelivered, are pending again.
UPDATE everstep.signals SET state = 'pending' WHERE run = $1 AND state IN ('consumed', 'undelivered') AND number = ANY ($2::bigint[]);

-- name: mark_restored
-- One more restore, if as many are known as expected and no worker is registered.
INSERT INTO everstep.meta (name, value) SELECT 'restores', ($1::bigint + 1)::text
WHERE coalesce((SELECT value FROM everstep.meta WHERE name = 'restores'), '0')::bigint = $1
    AND NOT EXISTS (SELECT 1 FROM everstep.workers)
ON CONFLICT (name) DO UPDATE SET value = excluded.value RETURNING value;

-- name: begin_life
-- Later histories can be told from the histories before this restore.
INSERT INTO everstep.meta (name, value) VALUES ('life', pg_catalog.left(pg_catalog.replace(pg_catalog.gen_random_uuid()::text, '-', ''), 16))
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: latest_time
-- Read once, when a store is opened.
SELECT coalesce((SELECT value FROM everstep.meta WHERE name = 'latest_time'), '0')::bigint;

-- name: ties
-- The runs that an unfinished run follows, that follow it, that have keys it waits for, and that wait for its keys.
-- Never the run itself, although a run may follow itself.
SELECT run FROM everstep.followers WHERE follower = $1 AND run <> $1
UNION SELECT follower FROM everstep.followers WHERE run = $1 AND follower <> $1
UNION SELECT effects.run FROM everstep.waiters JOIN everstep.effects ON effects.key = waiters.key
    WHERE waiters.run = $1 AND effects.run <> $1
UNION SELECT waiters.run FROM everstep.effects JOIN everstep.waiters ON waiters.key = effects.key
    WHERE effects.run = $1 AND waiters.run <> $1
ORDER BY 1;

-- name: asking
-- Unfinished runs that have asked for an approval.
SELECT DISTINCT events.run FROM everstep.events
    JOIN everstep.runs ON runs.id = events.run AND runs.generation = events.generation
WHERE events.kind = 'approval_asked' AND runs.status NOT IN ('completed', 'failed', 'cancelled')
ORDER BY 1;

-- name: deletions
-- Runs that are partly deleted.
SELECT run, generation FROM everstep.deletions ORDER BY at, run;

-- name: is_being_deleted
-- Unless it was restarted since, by a release that does not check this table.
SELECT 1 FROM everstep.deletions JOIN everstep.runs ON runs.id = deletions.run AND runs.generation = deletions.generation
WHERE deletions.run = $1;

-- name: is_needed
-- Whether a run outside this family ($1) needs one of it: a parent or a child; a run that may continue and has one as
-- its child (it received its end), or was forked from one, or from a run that has one as its child. The tag of a fork
-- ($2) is the other run's id, `@` and more; `A` is the next character after `@`.
WITH family AS MATERIALIZED (SELECT run FROM pg_catalog.unnest($1::text[]) AS family (run)),
users AS MATERIALIZED (
    SELECT DISTINCT signals.run FROM family JOIN everstep.signals ON signals.name = family.run AND signals.kind = 'child'
),
needing AS (
    SELECT run FROM users
    UNION ALL
    SELECT tagged.run FROM (SELECT run FROM family UNION SELECT run FROM users) AS source
        JOIN everstep.tagged ON tagged.name = $2
            AND tagged.value > (source.run || '@') COLLATE "C" AND tagged.value < (source.run || 'A') COLLATE "C"
)
SELECT EXISTS (
        SELECT 1 FROM needing JOIN everstep.runs ON runs.id = needing.run
        WHERE runs.status NOT IN ('completed', 'cancelled') AND runs.id <> ALL ($1::text[])
    )
    OR EXISTS (
        SELECT 1 FROM family JOIN everstep.runs ON runs.parent = family.run WHERE runs.id <> ALL ($1::text[])
    )
    OR EXISTS (
        SELECT 1 FROM family JOIN everstep.runs ON runs.id = family.run
            JOIN everstep.runs AS parents ON parents.id = runs.parent
        WHERE parents.id <> ALL ($1::text[])
    );

-- name: restores
-- How often the store was restored from a backup.
SELECT coalesce((SELECT value FROM everstep.meta WHERE name = 'restores'), '0')::bigint;

-- name: life
-- The parts of the store's life: random bits that are drawn with each restore, and the number of restores. (An earlier
-- release only counts.)
SELECT coalesce((SELECT value FROM everstep.meta WHERE name = 'life'), pg_catalog.left((SELECT value FROM everstep.meta WHERE name = 'entropy'), 16))
    || '.' || coalesce((SELECT value FROM everstep.meta WHERE name = 'restores'), '0');

-- name: arrival
-- Whether, and with which events, a run was imported.
SELECT run, generation, seq, doubted FROM everstep.arrivals WHERE run = $1;

-- name: archived
-- The oldest first.
SELECT run, generation, what, seq, row, why, at FROM everstep.archive WHERE run = $1 ORDER BY id;

-- name: archived_at
-- Read back after an unknown commit: a repair always archives the row.
SELECT pg_catalog.count(*) FROM everstep.archive WHERE run = $1 AND what = 'run' AND at = $2;

-- name: rows_of_runs
-- Many at once, for starts of runs that exist.
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs WHERE id = ANY ($1::text[]);

-- name: run_head
-- The columns that decide whether an operation is accepted.
SELECT generation, epoch, head_seq, head_digest, status FROM everstep.runs WHERE id = $1;

-- name: children_states
-- The columns that decide whether a child to be started is followed instead.
SELECT id, workflow, arguments, status, outcome, budget
FROM everstep.runs WHERE id = ANY ($1::text[]);

-- name: event_digest
-- Read back after an unknown commit.
SELECT digest FROM everstep.events WHERE run = $1 AND generation = $2 AND seq = $3;

-- ------------------------------------------------------------------------------------------------------- inbox

-- name: consume
-- Numbers of another run are left alone.
UPDATE everstep.signals SET state = 'consumed' WHERE run = $1 AND number = ANY ($2::bigint[]);

-- name: pending_cancels
-- A cancel is never lost: a run does not end over one that it has not consumed.
SELECT number FROM everstep.signals WHERE run = $1 AND state = 'pending' AND kind = 'cancel';

-- name: settle_inbox
-- The run has ended: its pending deliveries become undelivered, and stay visible.
UPDATE everstep.signals SET state = 'undelivered' WHERE run = $1 AND state = 'pending';

-- name: redeliver
-- The run had ended and its code continues: what was sent to it meanwhile, and acknowledged, is delivered after all.
UPDATE everstep.signals SET state = 'pending' WHERE run = $1 AND state = 'undelivered' AND kind IN ('signal', 'request');

-- name: leave_inbox
-- The run is restarted: what its code has not taken is never delivered, and an id that was sent before may be sent
-- again. (Except a request's: its answer is still given to a caller that asks again.)
UPDATE everstep.signals SET
    state = CASE state WHEN 'consumed' THEN state ELSE 'left' END,
    id = CASE WHEN kind IN ('signal', 'cancel') THEN '' ELSE id END
WHERE run = $1;

-- name: post
-- Into the inbox of a run that has not ended, unless the same kind and id exists. (Not ON CONFLICT, which would use up
-- a number.) The id of a `child` or `key` delivery is a call, which may come again.
INSERT INTO everstep.signals (run, kind, name, id, value, at, state)
SELECT $1, $2, $3, $4, $5, $6, 'pending' FROM everstep.runs
WHERE runs.id = $1 AND runs.status IN ('queued', 'running', 'waiting', 'held')
    AND NOT EXISTS (
        SELECT 1 FROM everstep.signals AS there
        WHERE there.run = $1 AND there.kind = $2 AND there.id = $4 AND there.id <> ''
            AND there.kind NOT IN ('child', 'key')
    )
RETURNING number;

-- name: duplicate
-- The existing delivery with this kind and id.
SELECT number, state FROM everstep.signals WHERE run = $1 AND kind = $2 AND id = $3 AND id <> '' AND kind NOT IN ('child', 'key');

-- name: post_again
-- A delivery that was undelivered and is sent again to a run that has not ended.
UPDATE everstep.signals SET state = 'pending', name = $3, value = $4, at = $5
WHERE number = $1 AND EXISTS (
    SELECT 1 FROM everstep.runs WHERE runs.id = $2 AND runs.status IN ('queued', 'running', 'waiting', 'held')
)
RETURNING number;

-- name: deliver
-- For deliveries whose sender gets no verdict: one that comes too late is kept as undelivered, so it is visible.
INSERT INTO everstep.signals (run, kind, name, id, value, at, state)
SELECT $1, $2, $3, $4, $5, $6,
    CASE WHEN runs.status IN ('completed', 'failed', 'cancelled') THEN 'undelivered' ELSE 'pending' END
FROM everstep.runs WHERE runs.id = $1
    AND NOT EXISTS (
        SELECT 1 FROM everstep.signals AS there
        WHERE there.run = $1 AND there.kind = $2 AND there.id = $4 AND there.id <> ''
            AND there.kind NOT IN ('child', 'key')
    );

-- name: follow
-- The follower receives the run's end, once.
INSERT INTO everstep.followers (run, follower, call)
SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[]) ON CONFLICT DO NOTHING;

-- name: tell_followers
-- Delivers the ends of runs to the inboxes of their followers, in the order of the batch. All of them are locked.
INSERT INTO everstep.signals (run, kind, name, id, value, at, state)
SELECT followers.follower, 'child', ended.run, followers.call::text, ended.value, ended.at,
    CASE WHEN runs.status IN ('completed', 'failed', 'cancelled') THEN 'undelivered' ELSE 'pending' END
FROM unnest($1::bigint[], $2::text[], $3::bytea[], $4::bigint[]) AS ended (place, run, value, at)
    JOIN everstep.followers ON followers.run = ended.run JOIN everstep.runs ON runs.id = followers.follower
ORDER BY ended.place, followers.follower, followers.call;

-- name: forget_followers
-- They have received the end.
DELETE FROM everstep.followers WHERE run = ANY ($1::text[]);

-- name: stop_following
-- Ends of runs that the old generation followed must not look like ends of the new one's calls.
DELETE FROM everstep.followers WHERE follower = $1;

-- -------------------------------------------------------------------------------------------------------- keys

-- name: store_entropy
-- The store's random bits; never changed.
SELECT value FROM everstep.meta WHERE name = 'entropy';

-- name: effect
-- The owner of a key: it decides about a claim, and its outcome is what a second step shares.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM everstep.effects WHERE key = $1;

-- name: write_effect
-- The same transaction has just decided that the key may be changed in this way.
INSERT INTO everstep.effects (key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by,
    note, digest, outcome, secret)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)
ON CONFLICT (key) DO UPDATE SET
    state = excluded.state, run = excluded.run, generation = excluded.generation, call = excluded.call,
    seq = excluded.seq, step = excluded.step, effect = excluded.effect, arguments = excluded.arguments,
    round = excluded.round, begun_at = excluded.begun_at, changed_at = excluded.changed_at, by = excluded.by,
    note = excluded.note, digest = excluded.digest, outcome = excluded.outcome, secret = excluded.secret;

-- name: delete_effect
-- A key that was never done and is free again is not kept.
DELETE FROM everstep.effects WHERE key = $1;

-- name: effects_under_way
-- The keys of the run's steps when it ends.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM everstep.effects WHERE run = $1 AND generation = $2 AND state = 'under-way' ORDER BY key;

-- name: effects
-- A list for people, the most recently changed first. $1: a prefix of the keys.
SELECT key, state, run, generation, call, seq, step, effect, arguments, round, begun_at, changed_at, by, note, digest,
    outcome, secret
FROM everstep.effects
WHERE pg_catalog.starts_with(key, $1::text) AND ($2::text IS NULL OR run = $2) AND ($3::text IS NULL OR step = $3)
    AND ($4::text IS NULL OR state = $4)
ORDER BY changed_at DESC, key LIMIT $5 OFFSET $6;

-- name: old_effects
-- The oldest first. Keys in progress or being undone are never forgotten, nor keys that a run depends on which may
-- continue.
SELECT key FROM everstep.effects
WHERE changed_at < $1 AND state IN ('done', 'free')
    AND NOT EXISTS (
        SELECT 1 FROM everstep.relied JOIN everstep.runs ON runs.id = relied.run
        WHERE relied.key = effects.key AND runs.status NOT IN ('completed', 'cancelled'))
ORDER BY changed_at, key LIMIT $2;

-- name: forget_effects
-- Keys that were found by `old_effects`, and are locked.
DELETE FROM everstep.effects WHERE key = ANY ($1::text[]);

-- name: rely_on_key
-- The key is kept while the run may continue.
INSERT INTO everstep.relied (key, run) VALUES ($1, $2) ON CONFLICT DO NOTHING;

-- name: forget_relied
-- The run no longer depends on these keys.
DELETE FROM everstep.relied WHERE key = ANY ($1::text[]);

-- name: wait_for_key
-- The step receives one delivery when the key changes.
INSERT INTO everstep.waiters (key, run, call) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING;

-- name: waiters
-- For a reader.
SELECT run, call FROM everstep.waiters WHERE key = $1 ORDER BY run, call;

-- name: awaited_keys
-- Which of these keys any step waits for.
SELECT key FROM everstep.waiters WHERE key = ANY ($1::text[]) LIMIT 1;

-- name: tell_waiters
-- Delivers the change of a key to the inboxes of the runs that wait for it; an ended run needs it no longer.
INSERT INTO everstep.signals (run, kind, name, id, value, at, state)
SELECT waiters.run, 'key', waiters.key, waiters.call::text, ''::bytea, $2, 'pending'
FROM everstep.waiters JOIN everstep.runs ON runs.id = waiters.run
WHERE waiters.key = $1 AND runs.status NOT IN ('completed', 'failed', 'cancelled')
ORDER BY waiters.run, waiters.call;

-- name: tell_of_key
-- The same for a step that would wait for a key which is already settled.
INSERT INTO everstep.signals (run, kind, name, id, value, at, state)
SELECT $1, 'key', $2, $3, ''::bytea, $4, 'pending'
FROM everstep.runs WHERE runs.id = $1 AND runs.status NOT IN ('completed', 'failed', 'cancelled');

-- name: forget_waiters
-- They have received the change.
DELETE FROM everstep.waiters WHERE key = $1;

-- ------------------------------------------------------------------------------------------------------- holds

-- name: open_hold
-- A second hold with one id is a mistake of the engine, and fails its unit.
INSERT INTO everstep.holds (id, run, reason, step, summary, report, resolutions, created_at, resolved_at, resolution, by, note)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, NULL, '', '', '');

-- name: resolve_hold
-- A hold is resolved once.
UPDATE everstep.holds SET resolved_at = $1, resolution = $2, by = $3, note = $4 WHERE id = $5 AND run = $6 AND resolved_at IS NULL;

-- name: holds_open
-- The questions that wait for a person: few, however many were resolved before.
SELECT holds.id, holds.run, holds.reason, holds.step, holds.summary, holds.report, holds.resolutions, holds.created_at,
    holds.resolved_at, holds.resolution, holds.by, holds.note, runs.workflow
FROM everstep.holds JOIN everstep.runs ON runs.id = holds.run
WHERE holds.resolved_at IS NULL ORDER BY holds.created_at, holds.id;

-- name: holds_all
-- For a reader who wants the resolved ones as well.
SELECT holds.id, holds.run, holds.reason, holds.step, holds.summary, holds.report, holds.resolutions, holds.created_at,
    holds.resolved_at, holds.resolution, holds.by, holds.note, runs.workflow
FROM everstep.holds JOIN everstep.runs ON runs.id = holds.run ORDER BY holds.created_at, holds.id;

-- name: holds_of_run
-- $2: only the open ones.
SELECT holds.id, holds.run, holds.reason, holds.step, holds.summary, holds.report, holds.resolutions, holds.created_at,
    holds.resolved_at, holds.resolution, holds.by, holds.note, runs.workflow
FROM everstep.holds JOIN everstep.runs ON runs.id = holds.run
WHERE holds.run = $1 AND (holds.resolved_at IS NULL OR $2::bigint = 0) ORDER BY holds.created_at, holds.id;

-- name: diverged
-- Runs whose code did not match: a worker with other code may check whether its own does.
SELECT holds.run FROM everstep.holds JOIN everstep.runs ON runs.id = holds.run
WHERE holds.resolved_at IS NULL AND holds.reason = 'diverged' AND runs.workflow = ANY ($1::text[])
GROUP BY holds.run ORDER BY pg_catalog.min(holds.created_at), pg_catalog.min(holds.id) LIMIT $2;

-- name: add_notifications
-- In one transaction with their hold: a crash right after it loses none.
INSERT INTO everstep.notifications (id, hold, run, target, state, attempts, next_at, claimed_by, last_error, created_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::text[], $9::text[], $10::bigint[])
ON CONFLICT DO NOTHING;

-- name: drop_notifications
-- The hold is resolved, so no notification is needed any more.
UPDATE everstep.notifications SET state = 'dropped', claimed_by = NULL
WHERE hold = $1 AND state = 'pending';

-- name: take_notification
-- The condition and the claim are one statement. A claim ends with its time, or with its worker.
UPDATE everstep.notifications SET attempts = $2, claimed_by = $3, next_at = $5
WHERE id = $1 AND state = 'pending' AND attempts = $2 - 1
    AND (next_at <= $4
        OR (claimed_by IS NOT NULL AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = claimed_by)));

-- name: notification_sent
-- It has arrived, whatever was recorded meanwhile.
UPDATE everstep.notifications SET state = 'sent', claimed_by = NULL, last_error = '' WHERE id = $1 AND state <> 'sent';

-- name: notification_not_sent
-- Only the last attempt decides what comes next, and only while the hold is open.
UPDATE everstep.notifications SET state = $3, next_at = $4, last_error = $5, claimed_by = NULL
WHERE id = $1 AND state = 'pending' AND attempts = $2;

-- name: notification_claim
-- Read back after an unknown commit.
SELECT attempts, claimed_by, next_at FROM everstep.notifications WHERE id = $1;

-- name: due_notifications
-- For one target only: other targets may have many, which wait for a process that can reach them.
SELECT id, hold, run, target, state, attempts,
    next_at, claimed_by, last_error, created_at
FROM everstep.notifications
WHERE state = 'pending' AND target = $1 AND next_at <= $2 ORDER BY next_at, id LIMIT $3;

-- name: abandoned_notifications
-- Taken by a worker that died before it recorded the result. At most as many as are sent at once.
SELECT id, hold, run, target, state, attempts,
    next_at, claimed_by, last_error, created_at
FROM everstep.notifications
WHERE state = 'pending' AND claimed_by IS NOT NULL AND target = $1 AND next_at > $2
    AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = claimed_by)
ORDER BY next_at, id LIMIT $3;

-- name: next_notification
-- The first entry of the index.
SELECT pg_catalog.min(next_at) FROM everstep.notifications WHERE state = 'pending' AND target = $1;

-- name: notifications_undelivered
-- For people: few, however many were delivered before.
SELECT told.id, told.hold, told.run, told.target,
    told.state, told.attempts, told.next_at, told.claimed_by, told.last_error,
    told.created_at
FROM everstep.notifications AS told JOIN everstep.holds ON holds.id = told.hold
WHERE told.state IN ('pending', 'given up') AND holds.resolved_at IS NULL ORDER BY told.created_at, told.id;

-- name: notifications_all
-- For a reader who wants the delivered ones as well.
SELECT id, hold, run, target, state, attempts,
    next_at, claimed_by, last_error, created_at
FROM everstep.notifications ORDER BY created_at, id;

-- name: notifications_of_run
-- $2: only the undelivered ones.
SELECT told.id, told.hold, told.run, told.target,
    told.state, told.attempts, told.next_at, told.claimed_by, told.last_error,
    told.created_at
FROM everstep.notifications AS told JOIN everstep.holds ON holds.id = told.hold
WHERE told.run = $1 AND ($2::bigint = 0 OR (told.state IN ('pending', 'given up') AND holds.resolved_at IS NULL))
ORDER BY told.created_at, told.id;

-- ------------------------------------------------------------------------------------------------------ leases

-- name: claim
-- The condition and the new epoch in one statement. An owner without a row in `workers` has died; its death counts
-- until an append moves the head (which sets `deaths` to 0). A lease that is not positive has lapsed: see `lapse`.
UPDATE everstep.runs SET
    epoch = epoch + 1,
    owner = $2,
    deaths = deaths + CASE WHEN owner IS NOT NULL AND owner <> $2 AND status IN ('running', 'queued')
        AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner) THEN 1 ELSE 0 END
WHERE id = $1 AND status = ANY ($3::text[])
    AND (owner IS NULL OR owner = $2
        OR NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner AND workers.lease_until > 0))
RETURNING id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget;

-- name: claim_simple
-- The same for many runs of the queue `default`, which other workers may claim at the same time: those that were
-- claimed, as 1 and the columns of `runs`, and those that were not, as 0. The runs are locked already. $1: runs, $2:
-- the worker, $3: statuses.
WITH claimed AS (
    UPDATE everstep.runs SET
        epoch = epoch + 1,
        owner = $2,
        deaths = deaths + CASE WHEN owner IS NOT NULL AND owner <> $2 AND status IN ('running', 'queued')
            AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner) THEN 1 ELSE 0 END
    FROM pg_catalog.unnest($1::text[]) AS new (run)
    WHERE runs.id = new.run AND queue = 'default' AND status = ANY ($3::text[])
        AND (owner IS NULL OR owner = $2
            OR NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owner AND workers.lease_until > 0))
    RETURNING id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
        tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
)
SELECT 1::bigint, claimed.* FROM claimed
UNION ALL
SELECT 0, id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs
WHERE id = ANY ($1::text[]) AND queue = 'default' AND NOT EXISTS (SELECT 1 FROM claimed WHERE claimed.id = runs.id);

-- name: events_of_claimed
-- The histories of the runs that this transaction has claimed, if they are short: the worker replays them next. Nothing
-- else in the transaction has changed them. $1: runs, $2: the maximum number of events. In no order: a plan that was
-- made while there were few might walk all events to have one.
SELECT events.run, seq, kind, step, at, body, digest
FROM everstep.runs JOIN everstep.events ON events.run = runs.id AND events.generation = runs.generation
WHERE runs.id = ANY ($1::text[]) AND head_seq <= $2 AND runs.xmin = pg_catalog.pg_current_xact_id()::xid;

-- name: inboxes
-- The pending deliveries of runs, in no order. The runs are locked, so that no delivery is added meanwhile.
SELECT number, run, kind, name, id, value, at, state FROM everstep.signals
WHERE run = ANY ($1::text[]) AND state = 'pending';

-- name: release
-- Without history: only the owner and the status. An ended run keeps its status. $4: 1 if this counts as the death of
-- its owner, else 0. A run without an owner was given back before.
UPDATE everstep.runs SET owner = NULL, status = CASE WHEN ended_at IS NULL THEN $3 ELSE status END,
    deaths = deaths + CASE WHEN owner IS NULL THEN 0 ELSE $4::bigint END
WHERE id = $1 AND epoch = $2;

-- name: lease_of_run
-- Read back after an unknown commit.
SELECT epoch, owner FROM everstep.runs WHERE id = $1;

-- name: delivery_at
-- Read back after an unknown commit.
SELECT run, kind, name, id, value, at FROM everstep.signals WHERE number = $1;

-- name: settings
-- The server's settings for durability, as this session sees them.
SELECT name, setting FROM pg_catalog.pg_settings
WHERE name IN (
    'server_version', 'fsync', 'full_page_writes', 'synchronous_commit', 'max_connections', 'synchronous_standby_names'
)
UNION ALL SELECT 'standbys', pg_catalog.count(*)::text FROM pg_catalog.pg_stat_replication WHERE application_name <> 'pg_basebackup';

-- name: pins
-- What keeps the past of the database visible for longer than $1 seconds, so that dead rows cannot be removed:
-- transactions, prepared ones, replication slots, and standbys with `hot_standby_feedback`. The columns: its kind, its
-- name, its role, its application, its state, seconds (NULL where the server does not know) and transactions that have
-- begun since. Without a time, $2 of those count.
SELECT * FROM (
    SELECT CASE WHEN backend_type = 'walsender' THEN 'standby' ELSE 'session' END, pid::text, coalesce(usename::text, ''),
        coalesce(application_name, ''), coalesce(state, ''),
        extract(epoch FROM pg_catalog.clock_timestamp() - xact_start)::bigint AS seconds,
        greatest(pg_catalog.age(backend_xmin), pg_catalog.age(backend_xid))::bigint AS transactions
    FROM pg_catalog.pg_stat_activity
    WHERE pid <> pg_catalog.pg_backend_pid() AND (datname = pg_catalog.current_database() OR backend_type = 'walsender')
        AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND backend_type <> 'autovacuum worker'
    UNION ALL
    SELECT 'prepared', gid, owner::text, '', '', extract(epoch FROM pg_catalog.clock_timestamp() - prepared)::bigint, pg_catalog.age(transaction)::bigint
    FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database()
    UNION ALL
    SELECT 'slot', slot_name::text, '', coalesce(plugin::text, ''), CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL,
        pg_catalog.age(xmin)::bigint
    FROM pg_catalog.pg_replication_slots WHERE xmin IS NOT NULL
) AS pin
WHERE coalesce(seconds >= $1, transactions >= $2) ORDER BY transactions DESC;

-- name: server_time
-- The store's clock, in microseconds.
SELECT (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint;

-- name: take_place
-- A worker's liveness lock, on the session that lasts as long as its process. $1 is the store, $2 the place.
SELECT pg_catalog.pg_try_advisory_lock($1::int, $2::int);

-- name: free_place
-- The worker leaves.
SELECT pg_catalog.pg_advisory_unlock($1::int, $2::int);

-- name: end_last_session
-- End the session that has the lock of a place and the name of this session: this worker's previous one. Names have
-- random bits, so no other worker has it; the same role may end it.
SELECT pg_catalog.pg_terminate_backend(held.pid) FROM pg_catalog.pg_locks AS held JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.classid = $1::bigint::oid AND held.objid = $2::bigint::oid AND held.objsubid = 2
    AND held.granted AND held.mode = 'ExclusiveLock' AND held.pid <> pg_catalog.pg_backend_pid()
    AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND session.application_name = $3;

-- name: silent_workers
-- Workers whose lock nobody has, and those whose lease is marked as lapsed. A restart of the server frees all locks, so none is
-- missed before everybody has had a while to take them again. (A lock that could be had is let go with the transaction.)
-- Who has a lock is asked only when the lease has lapsed: it may be somebody who is no worker.
-- Of one that could never have a lock nobody knows; an hour after its lease, by the server's clock, its row goes. $3: how many are looked
-- at, those with the next places after $4 and then from the beginning; NULL for all.
-- The last column: the session that writes for the worker is there, so its process lives without its lock, and has a lease.
SELECT id, place, is_lockless, is_lapsed, pid, machine, NOT is_lapsed AND EXISTS (
    SELECT 1 FROM pg_catalog.pg_stat_activity AS session
    WHERE pg_catalog.split_part(session.application_name, ' w ', 2) = $1::int::text || '.' || place::text
        AND session.datname = pg_catalog.current_database()
        AND pg_catalog.has_table_privilege(session.usesysid, 'everstep.workers', 'UPDATE')
) FROM (
    SELECT id, place, pid, machine,
        CASE WHEN has_lock = 0 THEN lease_until <= 0
                AND -lease_until <= extract(epoch FROM pg_catalog.clock_timestamp() - interval '1 hour') * 1000000
            ELSE pg_catalog.clock_timestamp() - pg_catalog.pg_postmaster_start_time() >= pg_catalog.make_interval(secs => $2::bigint / 1000000.0)
                AND (pg_catalog.pg_try_advisory_xact_lock_shared($1::int, place::int) OR (lease_until <= 0 AND NOT EXISTS (
                    SELECT 1 FROM pg_catalog.pg_locks AS held JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
                    WHERE held.locktype = 'advisory' AND held.classid = $1::bigint::oid AND held.objid = place::oid AND held.objsubid = 2
                        AND held.granted AND held.mode = 'ExclusiveLock'
                        AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
                        AND pg_catalog.has_table_privilege(session.usesysid, 'everstep.workers', 'UPDATE')
                )))
        END AS is_lockless,
        lease_until <= 0 AS is_lapsed
    FROM (
        (SELECT * FROM everstep.workers WHERE place > $4 ORDER BY place LIMIT $3)
        UNION ALL
        (SELECT * FROM everstep.workers WHERE place <= $4 ORDER BY place LIMIT $3)
        LIMIT $3
    ) AS next
) AS looked_at
WHERE is_lockless OR is_lapsed ORDER BY place;

-- name: is_place_free
-- Checked again before a worker is removed, when no other can register. A place that no worker has is free.
SELECT pg_catalog.pg_try_advisory_xact_lock_shared($1::int, $2::int) OR NOT EXISTS (
    SELECT 1 FROM pg_catalog.pg_locks AS held JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
    WHERE held.locktype = 'advisory' AND held.classid = $1::bigint::oid AND held.objid = $2::bigint::oid AND held.objsubid = 2
        AND held.granted AND held.mode = 'ExclusiveLock'
        AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
        AND pg_catalog.has_table_privilege(session.usesysid, 'everstep.workers', 'UPDATE')
);

-- name: is_place_taken
-- The same without touching the lock, for a worker that is about to take it.
SELECT EXISTS (
    SELECT 1 FROM pg_catalog.pg_locks AS held JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
    WHERE held.locktype = 'advisory' AND held.classid = $1::bigint::oid AND held.objid = $2::bigint::oid AND held.objsubid = 2
        AND held.granted AND held.mode = 'ExclusiveLock'
        AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
        AND pg_catalog.has_table_privilege(session.usesysid, 'everstep.workers', 'UPDATE')
);

-- name: any_place_taken
-- Whether any worker has a liveness lock of this store, registered or not, or a lease without a lock.
SELECT EXISTS (
    SELECT 1 FROM pg_catalog.pg_locks AS held JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
    WHERE held.locktype = 'advisory' AND held.classid = $1::bigint::oid AND held.objid <> 0 AND held.objsubid = 2
        AND held.granted AND held.mode = 'ExclusiveLock'
        AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
        AND pg_catalog.has_table_privilege(session.usesysid, 'everstep.workers', 'UPDATE')
) OR EXISTS (SELECT 1 FROM everstep.workers WHERE has_lock = 0 AND lease_until > 0);

-- name: tell
-- Notifies other processes that something has changed. Nothing depends on it: a process that misses it looks a little
-- later.
SELECT pg_catalog.pg_notify($1, $2);

-- name: workers
-- Few rows: one for each living worker.
SELECT id, place, pid, host, started_at, lease_until, targets, about FROM everstep.workers ORDER BY place;

-- name: neighbours
-- The workers with a lease whose places come after that of $1, and then from the beginning.
SELECT id, place, pid, host, started_at, lease_until, targets, about FROM everstep.workers
WHERE lease_until > 0 AND id <> $1
ORDER BY place < coalesce((SELECT place FROM everstep.workers WHERE id = $1), 0), place LIMIT $2;

-- name: enter_worker
-- Committed only when the worker holds its liveness lock, so that no other process removes it in between.
WITH noted AS (
    INSERT INTO everstep.meta (name, value) VALUES ('latest_time', $5::bigint::text)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE meta.value::bigint < excluded.value::bigint
)
INSERT INTO everstep.workers (id, place, pid, host, started_at, lease_until, targets, about, has_lock, machine)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10);

-- name: remove_worker
-- By its place as well, so that a worker which came back under its id stays.
DELETE FROM everstep.workers WHERE id = $1 AND place = $2;

-- name: forget_worker
-- The worker leaves by itself.
DELETE FROM everstep.workers WHERE id = $1;

-- name: renew
-- Changes nothing if the worker was removed; else it returns the server's clock. With each lease the time is recorded: a
-- server's clock may be set back, and the store's time must not go back with it. The lease changes in any case: others watch it for
-- changes and never compare it with a time.
WITH noted AS (
    INSERT INTO everstep.meta (name, value) VALUES ('latest_time', $3::bigint::text)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE meta.value::bigint < excluded.value::bigint
)
UPDATE everstep.workers SET
    lease_until = $1::bigint + CASE WHEN pg_catalog.abs(lease_until) = $1::bigint THEN 1 ELSE 0 END, about = coalesce($4::bytea, about)
WHERE id = $2 RETURNING (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint;

-- name: lapse
-- Only if the worker has not renewed its lease since $2 was read.
UPDATE everstep.workers SET lease_until = -lease_until WHERE id = $1 AND lease_until = $2 AND lease_until > 0;

-- name: note_ended_worker
-- Proven by the kernel, or by the worker itself, which saw everything end that it had begun.
INSERT INTO everstep.ended_workers (id, at) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING;

-- name: forget_ended_workers
-- A worker that is not recorded here counts as unknown, not as ended.
DELETE FROM everstep.ended_workers WHERE at < $1;

-- name: is_ended_worker
-- Read before a step that must not happen twice is repeated.
SELECT 1 FROM everstep.ended_workers WHERE id = $1
UNION ALL SELECT 1 FROM everstep.gone_workers WHERE kind = 'worker' AND name = $1 LIMIT 1;

-- name: declare_gone
-- A person takes the responsibility that nothing which it began can act any more.
INSERT INTO everstep.gone_workers (kind, name, at, by, note) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING;

-- name: gone
-- For people, and for a worker that asks about itself.
SELECT kind, name, at, by, note FROM everstep.gone_workers
WHERE ($1::text IS NULL OR kind = $1) AND ($2::text IS NULL OR name = $2) ORDER BY at DESC, kind, name;

-- name: owners
-- Few, including workers that are no longer registered.
WITH RECURSIVE owners (id) AS (
    SELECT pg_catalog.min(owner) FROM everstep.runs WHERE owner IS NOT NULL
    UNION ALL
    SELECT (SELECT pg_catalog.min(owner) FROM everstep.runs WHERE owner > owners.id) FROM owners WHERE owners.id IS NOT NULL
)
SELECT id FROM owners WHERE id IS NOT NULL;

-- name: fence_runs
-- As `give_back`, for a worker that may come back without knowing that it was declared gone: the new epoch refuses its
-- writes.
WITH theirs AS MATERIALIZED (SELECT id FROM everstep.runs WHERE owner = $1 ORDER BY id FOR UPDATE)
UPDATE everstep.runs SET
    epoch = epoch + 1, owner = NULL, status = CASE WHEN status = 'running' THEN 'queued' ELSE status END
FROM theirs WHERE runs.id = theirs.id AND owner = $1;

-- name: give_back
-- Another worker continues what a leaving worker was driving.
WITH mine AS MATERIALIZED (SELECT id FROM everstep.runs WHERE owner = $1 ORDER BY id FOR UPDATE)
UPDATE everstep.runs SET owner = NULL, status = CASE WHEN status = 'running' THEN 'queued' ELSE status END
FROM mine WHERE runs.id = mine.id AND owner = $1;

-- name: gone_owners
-- Owners that died or whose lease is marked as lapsed. It hops from owner to owner in the index and never walks their
-- runs. $1 is the worker that asks.
WITH RECURSIVE owners (id) AS (
    SELECT pg_catalog.min(owner) FROM everstep.runs WHERE owner IS NOT NULL
    UNION ALL
    SELECT (SELECT pg_catalog.min(owner) FROM everstep.runs WHERE owner > owners.id) FROM owners WHERE owners.id IS NOT NULL
)
SELECT owners.id FROM owners
WHERE owners.id IS NOT NULL AND owners.id <> $1
    AND NOT EXISTS (SELECT 1 FROM everstep.workers WHERE workers.id = owners.id AND workers.lease_until > 0);

-- name: due
-- Everything that needs a driver now, as kind (0, and 1 for timers), wake-up time, priority, age, id and owner; each
-- part is limited by itself, in the order of its index. Kind 2: the first free run of each priority, whatever its
-- workflow is. $1: the worker, $2: the time, $3: workflows, $4: the limit, $5: whether free runs count, $6: queues, or
-- NULL for all. $7 to $9: the places from which free runs are read, by priority; $10 and $11: above and below the
-- priorities between those; $12: the time from which timers of free runs are read, $13: those of this worker; $14:
-- owners that are gone; $15 and $16: pending deliveries, see `pending`.
WITH fronts AS MATERIALIZED (
    SELECT known.priority, front.created_at, front.id
    FROM unnest($7::bigint[], $8::bigint[], $9::text[]) AS known (priority, at, id) CROSS JOIN LATERAL (
        SELECT created_at, runs.id FROM everstep.runs
        WHERE owner IS NULL AND (status = 'running' OR (status = 'queued' AND queue = 'default'))
            AND priority = known.priority AND (created_at, runs.id) >= (known.at, known.id) AND $5::bigint <> 0
        ORDER BY created_at, runs.id LIMIT 1
    ) AS front
), between AS MATERIALIZED (
    SELECT gap.above, gap.below, front.priority, front.created_at, front.id
    FROM unnest($10::bigint[], $11::bigint[]) AS gap (above, below) CROSS JOIN LATERAL (
        SELECT priority, created_at, id FROM everstep.runs
        WHERE owner IS NULL AND (status = 'running' OR (status = 'queued' AND queue = 'default'))
            AND priority < gap.above AND priority > gap.below AND $5::bigint <> 0
        ORDER BY priority DESC, created_at, id LIMIT 1
    ) AS front
), pending AS MATERIALIZED (
    SELECT run, pg_catalog.min(number) AS number FROM unnest($15::text[], $16::bigint[]) AS delivery (run, number) GROUP BY run
)
SELECT 2 AS kind, NULL::bigint AS wake_at, priority, created_at, id, NULL AS owner FROM fronts
UNION ALL
SELECT 2, NULL, priority, created_at, id, NULL FROM between
UNION ALL (
    SELECT 0, NULL, run.priority, run.created_at, run.id, NULL FROM fronts CROSS JOIN LATERAL (
        SELECT priority, created_at, runs.id FROM everstep.runs
        WHERE owner IS NULL AND (status = 'running' OR (status = 'queued' AND queue = 'default'))
            AND priority = fronts.priority AND (created_at, runs.id) >= (fronts.created_at, fronts.id)
            AND workflow = ANY ($3::text[]) AND ($6::text[] IS NULL OR queue = ANY ($6::text[]))
        ORDER BY created_at, runs.id LIMIT $4
    ) AS run
    ORDER BY run.priority DESC, run.created_at, run.id LIMIT $4
) UNION ALL (
    SELECT 0, NULL, run.priority, run.created_at, run.id, NULL FROM between CROSS JOIN LATERAL (
        SELECT priority, created_at, runs.id FROM everstep.runs
        WHERE owner IS NULL AND (status = 'running' OR (status = 'queued' AND queue = 'default'))
            AND priority <= between.priority AND priority > between.below
            AND workflow = ANY ($3::text[]) AND ($6::text[] IS NULL OR queue = ANY ($6::text[]))
        ORDER BY priority DESC, created_at, runs.id LIMIT $4
    ) AS run
    ORDER BY run.priority DESC, run.created_at, run.id LIMIT $4
) UNION ALL (
    SELECT 0, NULL, priority, created_at, runs.id, owner FROM pg_catalog.unnest($14::text[]) AS gone (id) JOIN everstep.runs ON runs.owner = gone.id
    WHERE status IN ('queued', 'running') AND workflow = ANY ($3::text[])
        AND ($6::text[] IS NULL OR queue = ANY ($6::text[]))
    ORDER BY priority DESC, created_at, runs.id LIMIT $4
) UNION ALL (
    SELECT 1, wake_at, priority, created_at, id, NULL FROM everstep.runs
    WHERE owner IS NULL AND status = 'waiting' AND wake_at IS NOT NULL AND wake_at <= $2 AND wake_at >= $12
        AND workflow = ANY ($3::text[]) AND $5::bigint <> 0 AND ($6::text[] IS NULL OR queue = ANY ($6::text[]))
    ORDER BY wake_at, id LIMIT $4
) UNION ALL (
    SELECT 1, wake_at, priority, created_at, runs.id, NULL FROM everstep.runs
    WHERE owner = $1 AND status = 'waiting' AND wake_at <= $2 AND wake_at >= $13 AND workflow = ANY ($3::text[])
    ORDER BY wake_at, runs.id LIMIT $4
) UNION ALL (
    SELECT 1, wake_at, priority, created_at, runs.id, owner FROM pg_catalog.unnest($14::text[]) AS gone (id) JOIN everstep.runs ON runs.owner = gone.id
    WHERE status = 'waiting' AND wake_at <= $2 AND workflow = ANY ($3::text[])
        AND ($6::text[] IS NULL OR queue = ANY ($6::text[]))
    ORDER BY wake_at, runs.id LIMIT $4
) UNION ALL (
    SELECT 0, NULL, run.priority, run.created_at, run.id, NULL
    FROM pending CROSS JOIN LATERAL (SELECT * FROM everstep.runs WHERE runs.id = pending.run LIMIT 1) AS run
    WHERE run.status = 'waiting' AND run.workflow = ANY ($3::text[])
        AND (run.owner = $1 OR ($5::bigint <> 0 AND NOT EXISTS (
            SELECT 1 FROM everstep.workers WHERE workers.id = run.owner AND workers.lease_until > 0)))
        AND ($6::text[] IS NULL OR run.owner = $1 OR run.queue = ANY ($6::text[]))
    ORDER BY pending.number LIMIT $4
);

-- name: next_wake
-- The first entry of an index, for free runs, for this worker's and for runs of owners that are gone. $1: the worker, $2: whether free
-- runs count, $3 and $4: the times to read from, for free runs and its own, $5: owners that are gone.
SELECT
    (
        SELECT pg_catalog.min(wake_at) FROM everstep.runs
        WHERE owner IS NULL AND status = 'waiting' AND wake_at IS NOT NULL AND $2::bigint <> 0 AND wake_at >= $3
    ), (
        SELECT pg_catalog.min(wake_at) FROM everstep.runs
        WHERE owner = $1 AND status = 'waiting' AND wake_at IS NOT NULL AND wake_at >= $4
    ), (
        SELECT pg_catalog.min(first.wake_at) FROM pg_catalog.unnest($5::text[]) AS gone (id) CROSS JOIN LATERAL (
            SELECT pg_catalog.min(wake_at) AS wake_at FROM everstep.runs
            WHERE owner = gone.id AND status = 'waiting' AND wake_at IS NOT NULL
        ) AS first
    );

-- name: pending
-- All pending deliveries, and the newest number of any delivery.
SELECT number, run FROM everstep.signals WHERE state = 'pending'
UNION ALL SELECT pg_catalog.max(number), NULL FROM everstep.signals;

-- name: pending_since
-- The same, for the number $1 and later ones, and for older ones that were pending at the last look ($2). OFFSET 0
-- keeps the index `signals_pending` out, which has all deliveries that were ever pending while the past of the database
-- is pinned.
SELECT number, run FROM (
    SELECT number, run, state FROM everstep.signals WHERE number >= $1 OFFSET 0
) AS recent WHERE state = 'pending'
UNION ALL
SELECT number, run FROM (
    SELECT number, run, state FROM everstep.signals WHERE number = ANY ($2::bigint[]) AND number < $1 OFFSET 0
) AS older WHERE state = 'pending'
UNION ALL SELECT pg_catalog.max(number), NULL FROM everstep.signals;

-- name: owned_among
-- Which of these runs a worker drives.
SELECT id FROM everstep.runs WHERE id = ANY ($2::text[]) AND owner = $1;

-- name: run
-- One run, by its id.
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs WHERE id = $1;

-- name: runs
-- Newest first.
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs
WHERE $5::text IS NULL AND ($1::text IS NULL OR workflow = $1) AND ($2::text IS NULL OR parent = $2)
    AND NOT EXISTS (
        SELECT 1 FROM pg_catalog.generate_series(1, pg_catalog.cardinality($3::text[]), 2) AS place WHERE NOT EXISTS (
            SELECT 1 FROM everstep.tagged AS tag
            WHERE tag.run = runs.id AND tag.name = ($3)[place] AND tag.value = ($3)[place + 1]))
    AND ($6::bigint IS NULL OR (created_at, id) < ($6, $7::text))
    AND ($8::text = '' OR pg_catalog.strpos(pg_catalog.lower(id), $8) > 0 OR pg_catalog.strpos(pg_catalog.lower(workflow), $8) > 0 OR pg_catalog.strpos(pg_catalog.lower(preview), $8) > 0
        OR EXISTS (SELECT 1 FROM everstep.tagged AS tag
            WHERE tag.run = runs.id AND pg_catalog.strpos(pg_catalog.lower(tag.name || '=' || tag.value), $8) > 0))
ORDER BY created_at DESC, id DESC LIMIT $4;

-- name: runs_of_status
-- The same for one status. (Several statuses are queried one by one, so that no whole list is sorted.)
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs
WHERE status = $5 AND ($1::text IS NULL OR workflow = $1) AND ($2::text IS NULL OR parent = $2)
    AND NOT EXISTS (
        SELECT 1 FROM pg_catalog.generate_series(1, pg_catalog.cardinality($3::text[]), 2) AS place WHERE NOT EXISTS (
            SELECT 1 FROM everstep.tagged AS tag
            WHERE tag.run = runs.id AND tag.name = ($3)[place] AND tag.value = ($3)[place + 1]))
    AND ($6::bigint IS NULL OR (created_at, id) < ($6, $7::text))
    AND ($8::text = '' OR pg_catalog.strpos(pg_catalog.lower(id), $8) > 0 OR pg_catalog.strpos(pg_catalog.lower(workflow), $8) > 0 OR pg_catalog.strpos(pg_catalog.lower(preview), $8) > 0
        OR EXISTS (SELECT 1 FROM everstep.tagged AS tag
            WHERE tag.run = runs.id AND pg_catalog.strpos(pg_catalog.lower(tag.name || '=' || tag.value), $8) > 0))
ORDER BY created_at DESC, id DESC LIMIT $4;

-- name: runs_tagged
-- The same for runs with a tag ($9, $10): walked in the order of that tag, whatever else there is.
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, runs.created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.tagged JOIN everstep.runs ON runs.id = tagged.run
WHERE tagged.name = $9 AND tagged.value = $10 AND tagged.created_at = runs.created_at
    AND ($5::text IS NULL OR status = $5) AND ($1::text IS NULL OR workflow = $1) AND ($2::text IS NULL OR parent = $2)
    AND NOT EXISTS (
        SELECT 1 FROM pg_catalog.generate_series(1, pg_catalog.cardinality($3::text[]), 2) AS place WHERE NOT EXISTS (
            SELECT 1 FROM everstep.tagged AS tag
            WHERE tag.run = runs.id AND tag.name = ($3)[place] AND tag.value = ($3)[place + 1]))
    AND ($6::bigint IS NULL OR (tagged.created_at, tagged.run) < ($6, $7::text))
    AND ($8::text = '' OR pg_catalog.strpos(pg_catalog.lower(id), $8) > 0 OR pg_catalog.strpos(pg_catalog.lower(workflow), $8) > 0 OR pg_catalog.strpos(pg_catalog.lower(preview), $8) > 0
        OR EXISTS (SELECT 1 FROM everstep.tagged AS tag
            WHERE tag.run = runs.id AND pg_catalog.strpos(pg_catalog.lower(tag.name || '=' || tag.value), $8) > 0))
ORDER BY tagged.created_at DESC, tagged.run DESC LIMIT $4;

-- name: children
-- Oldest first, as they were started.
SELECT id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority,
    tags, parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
FROM everstep.runs WHERE parent = $1 ORDER BY created_at, id;

-- name: counts
-- From the index alone.
SELECT status, pg_catalog.count(*) FROM everstep.runs GROUP BY status ORDER BY status;

-- name: runs_without_status
-- Damaged rows: their status is not a valid one. The gaps between the valid statuses, in their order, are looked up in
-- the index, so that the number of runs does not matter.
SELECT id FROM everstep.runs
WHERE status < 'cancelled'
    OR (status > 'cancelled' AND status < 'completed')
    OR (status > 'completed' AND status < 'failed')
    OR (status > 'failed' AND status < 'held')
    OR (status > 'held' AND status < 'queued')
    OR (status > 'queued' AND status < 'running')
    OR (status > 'running' AND status < 'waiting')
    OR status > 'waiting'
LIMIT $1;

-- name: events
-- Row by row, for a history that is too long for one value, or whose texts are damaged.
SELECT seq, kind, step, at, body, digest FROM everstep.events
WHERE run = $1 AND generation = $2 AND seq BETWEEN $3 AND $4 ORDER BY seq;

-- name: checkpoint
-- The newest one before an event.
SELECT run, generation, seq, previous, engine, state, digest, complete FROM everstep.checkpoints
WHERE run = $1 AND generation = $2 AND seq < $3 ORDER BY seq DESC LIMIT 1;

-- name: events_only
-- A few events of a history by their numbers: its ends are enough to check a result.
SELECT seq, kind, step, at, body, digest FROM everstep.events
WHERE run = $1 AND generation = $2 AND seq IN ($3::bigint, $4::bigint, $5::bigint) ORDER BY seq;

-- name: generations
-- One look into the index for each.
WITH RECURSIVE found (generation) AS (
    SELECT pg_catalog.min(generation) FROM everstep.events WHERE run = $1
    UNION ALL
    SELECT (SELECT pg_catalog.min(generation) FROM everstep.events WHERE run = $1 AND events.generation > found.generation)
    FROM found WHERE found.generation IS NOT NULL
)
SELECT generation FROM found WHERE generation IS NOT NULL ORDER BY generation;

-- name: strays
-- Histories without a row of their run: it is gone, or has another id or generation. From the index alone.
SELECT DISTINCT events.run, events.generation FROM everstep.events
WHERE NOT EXISTS (
    SELECT 1 FROM everstep.runs WHERE runs.id = events.run AND runs.generation >= events.generation AND events.generation > 0
)
ORDER BY events.run, events.generation;

-- name: payload
-- A large value that is stored outside its event.
SELECT value FROM everstep.payloads WHERE run = $1 AND digest = $2;

-- name: inbox
-- Only pending deliveries, however many were delivered before.
SELECT number, run, kind, name, id, value, at, state FROM everstep.signals
WHERE run = $1 AND state = 'pending' ORDER BY number;

-- name: signals
-- All deliveries, for a reader and for recovery.
SELECT number, run, kind, name, id, value, at, state FROM everstep.signals WHERE run = $1 ORDER BY number;

-- --------------------------------------------------------------------------------------------------- schedules

-- name: create_schedule
-- Only if no schedule has this name; the number of changes tells.
INSERT INTO everstep.schedules (name, workflow, revision, next_at, waits, definition, state, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING;

-- name: change_schedule
-- Only with the newest revision: of several workers that start one tick, one succeeds.
UPDATE everstep.schedules SET
    workflow = $2, revision = $3, next_at = $4, waits = $5, definition = $6, state = $7, created_at = $8
WHERE name = $1 AND revision = $9;

-- name: delete_schedule
-- The runs that it has started stay.
DELETE FROM everstep.schedules WHERE name = $1 AND revision = $2;

-- name: schedule_revision
-- Read back after an unknown commit.
SELECT revision FROM everstep.schedules WHERE name = $1;

-- name: schedules
-- For people.
SELECT name, workflow, revision, next_at, waits, definition, state, created_at FROM everstep.schedules ORDER BY name;

-- name: schedule
-- One of them.
SELECT name, workflow, revision, next_at, waits, definition, state, created_at FROM everstep.schedules WHERE name = $1;

-- name: due_schedules
-- What a worker reads when its timer fires, or another process has written.
SELECT name, workflow, revision, next_at, waits, definition, state, created_at FROM everstep.schedules
WHERE next_at IS NOT NULL AND next_at <= $1 AND workflow = ANY ($2::text[]) ORDER BY next_at, name LIMIT $3;

-- name: waiting_schedules
-- Schedules with a tick that waits for the end of a run: few.
SELECT name, workflow, revision, next_at, waits, definition, state, created_at FROM everstep.schedules
WHERE waits <> 0 AND (next_at IS NULL OR next_at > $1) AND workflow = ANY ($2::text[]) ORDER BY name LIMIT $3;

-- name: next_schedule
-- When the worker must look again. Schedules of workflows that it does not know are left out.
SELECT next_at FROM everstep.schedules
WHERE next_at IS NOT NULL AND workflow = ANY ($1::text[]) ORDER BY next_at LIMIT 1;
