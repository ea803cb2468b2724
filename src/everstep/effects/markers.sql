-- The statements about markers in PostgreSQL: in a store's schema, and in any other database. They are done beside a
-- user's own, with the user's search path. So everything has its schema, also each operator, type and collation:
-- nothing that others have made can be taken for what is meant. (IN, BETWEEN, IS DISTINCT FROM, LIKE and CASE … WHEN of a
-- value name an operator that cannot have one.) Casts are written as CAST(…), for some drivers take a colon for the
-- beginning of a parameter.
--
-- `guard` is not null only while the transaction is open that wrote the row. It refers to a marker that is never there,
-- and that is checked when the transaction is committed: so the server itself refuses each COMMIT before the marker is
-- complete, whoever sends it and in whatever way.

-- name: create_schema
CREATE SCHEMA everstep;

-- name: create_markers
-- In the transaction that needs the table first. Not STRICT: SQLite libraries before 3.37 read this file, too.
CREATE TABLE everstep.everstep_markers (
    key pg_catalog.text COLLATE pg_catalog."C" PRIMARY KEY,
    run pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
    step pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
    attempt bigint NOT NULL,
    outcome pg_catalog.bytea,
    at bigint NOT NULL,
    guard pg_catalog.text COLLATE pg_catalog."C" CONSTRAINT everstep_only_the_step_commits
        REFERENCES everstep.everstep_markers (key) DEFERRABLE INITIALLY DEFERRED
);

-- name: index_runs
CREATE INDEX everstep_markers_run ON everstep.everstep_markers (run);

-- name: index_guards
-- Always empty. Without it each marker that is deleted would be looked for among all guards.
CREATE INDEX everstep_markers_guard ON everstep.everstep_markers (guard) WHERE guard IS NOT NULL;

-- name: has_markers
SELECT 1 FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace
    ON pg_namespace.oid OPERATOR(pg_catalog.=) relnamespace
WHERE nspname OPERATOR(pg_catalog.=) $1 AND relname OPERATOR(pg_catalog.=) 'everstep_markers';

-- name: owned_by_strangers
-- Roles that own the schema, or one of these tables in it, and could make anything run with the rights of those who
-- write there. Not included: this role and the roles that it is a member of, the owner of the database and its members,
-- superusers.
SELECT DISTINCT owner.rolname FROM pg_catalog.pg_namespace AS place
    LEFT JOIN pg_catalog.pg_class AS markers ON markers.relnamespace OPERATOR(pg_catalog.=) place.oid
        AND markers.relname OPERATOR(pg_catalog.=) 'everstep_markers'
    JOIN pg_catalog.pg_roles AS owner ON owner.oid OPERATOR(pg_catalog.=) place.nspowner
        OR owner.oid OPERATOR(pg_catalog.=) markers.relowner
    JOIN pg_catalog.pg_database AS here ON here.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
WHERE place.nspname OPERATOR(pg_catalog.=) $1 AND NOT owner.rolsuper
    AND owner.rolname OPERATOR(pg_catalog.<>) 'pg_database_owner' AND NOT pg_catalog.pg_has_role(owner.oid, 'MEMBER')
    AND NOT pg_catalog.pg_has_role(owner.oid, here.datdba, 'MEMBER');

-- name: has_schema
-- Whether the schema exists: creating it needs a right, even if it exists.
SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) $1;

-- name: lock_schema
-- Only one process migrates at a time, until the transaction ends.
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(
    'everstep migration of ' OPERATOR(pg_catalog.||) CAST($1 AS pg_catalog.text), 0));

-- name: may_write
-- The first statement of a transaction, whatever the role's transactions are.
SET TRANSACTION READ WRITE;

-- name: may_write_from_here
-- The same for drivers that send both at once. The savepoint is in this transaction and in no other one: whoever rolls
-- back to it knows that it is still this one, also after an error. No body makes one of that name by accident. It has one
-- name for all, because some releases of the server would count each name as a statement of its own.
SET TRANSACTION READ WRITE;
SAVEPOINT everstep_begun_5f0c83d92ab7;

-- name: roll_back_to_here
-- If the savepoint is not there, nothing is rolled back. If it is, no transaction without a guard stays open.
ROLLBACK TO SAVEPOINT everstep_begun_5f0c83d92ab7;
ROLLBACK;

-- name: wait_at_most
-- Before the marker is read: others are waited for so long at a time. Returns what is set for the body, what may end its
-- session or cancel its statements, whether the guard is checked, and which server this is.
SELECT pg_catalog.current_setting('lock_timeout'),
    pg_catalog.current_setting('idle_in_transaction_session_timeout'),
    pg_catalog.current_setting('transaction_timeout', true),
    pg_catalog.current_setting('statement_timeout'),
    pg_catalog.current_setting('session_replication_role'),
    CAST(EXTRACT(EPOCH FROM pg_catalog.pg_postmaster_start_time()) AS pg_catalog.text),
    pg_catalog.set_config('lock_timeout', $1, true);

-- name: take_turn
-- Whoever else is in a transaction with this key is waited for: by the primary key, also while a row is not committed.
-- Returns the row, with attempt 0 if it is new, and gives the body its own patience back; or nothing, if there is an
-- outcome. Last but one is how many rows of this table the session has written so far.
INSERT INTO everstep.everstep_markers AS mine (key, run, step, attempt, outcome, at, guard)
VALUES ($1, '', '', 0, NULL, 0, '')
ON CONFLICT (key) DO UPDATE SET guard = '' WHERE mine.outcome IS NULL
RETURNING key, run, step, attempt, outcome, at,
    pg_catalog.pg_stat_get_xact_tuples_inserted(mine.tableoid)
        OPERATOR(pg_catalog.+) pg_catalog.pg_stat_get_xact_tuples_updated(mine.tableoid)
        OPERATOR(pg_catalog.+) pg_catalog.pg_stat_get_xact_tuples_deleted(mine.tableoid),
    pg_catalog.set_config('lock_timeout', $2, true);

-- name: read_marker
SELECT key, run, step, attempt, outcome, at, 0, '' FROM everstep.everstep_markers WHERE key OPERATOR(pg_catalog.=) $1;

-- name: write_marker
-- In the row that `take_turn` has left. If that is gone, this is another transaction. What the run will remember as done
-- must be as durable here, so a COMMIT that would not wait for the disk is made to. Returns the same number as
-- `take_turn`: if more than this one row was written since, the body has written to this table.
UPDATE everstep.everstep_markers
SET run = $2, step = $3, attempt = $4, outcome = $5, at = $6, guard = NULL
WHERE key OPERATOR(pg_catalog.=) $1 AND guard IS NOT NULL AND outcome IS NULL
RETURNING CASE
    WHEN CAST($7 AS pg_catalog.text) OPERATOR(pg_catalog.=) 'durable'
        AND pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off'
    THEN pg_catalog.set_config('synchronous_commit', 'on', true)
END,
    pg_catalog.pg_stat_get_xact_tuples_inserted(tableoid)
        OPERATOR(pg_catalog.+) pg_catalog.pg_stat_get_xact_tuples_updated(tableoid)
        OPERATOR(pg_catalog.+) pg_catalog.pg_stat_get_xact_tuples_deleted(tableoid);

-- name: marked_runs
-- The runs whose markers are all from before a time.
SELECT run FROM everstep.everstep_markers GROUP BY run HAVING pg_catalog.max(at) OPERATOR(pg_catalog.<) $1;

-- name: forget_markers
DELETE FROM everstep.everstep_markers
WHERE run OPERATOR(pg_catalog.=) $1 AND at OPERATOR(pg_catalog.<) $2 RETURNING 1;
