-- The tables of the first release, in the schema `everstep` (or another one, whose name replaces this).
--
-- Texts are compared byte by byte (COLLATE "C"), as everywhere else. A text with a NUL, which PostgreSQL refuses, is
-- escaped by the store, see adapters.py. Payloads are bytes, never jsonb, and PostgreSQL does not
-- compress them: what is large was compressed before. There are no foreign keys, on purpose: a unit is accepted or
-- refused by its epoch and head, and histories are deleted run by run.

CREATE TABLE everstep.meta (
    name text COLLATE "C" PRIMARY KEY,
    value text NOT NULL
);

-- What the keys of shared actions derive from, so that no two stores share one.
INSERT INTO everstep.meta (name, value) VALUES
    ('entropy', pg_catalog.substr(pg_catalog.encode(pg_catalog.sha256(pg_catalog.decode(pg_catalog.replace(
        pg_catalog.gen_random_uuid()::text || pg_catalog.gen_random_uuid()::text, '-', ''), 'hex')), 'hex'), 1, 32));

-- Each step changes its run's row: there is room in each page for the next version, beside the last one.
CREATE TABLE everstep.runs (
    id text COLLATE "C" PRIMARY KEY,
    workflow text COLLATE "C" NOT NULL,
    version text COLLATE "C" NOT NULL,
    semantics bigint NOT NULL,
    status text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    head_seq bigint NOT NULL,
    head_digest bytea NOT NULL,
    epoch bigint NOT NULL,
    owner text COLLATE "C",
    wake_at bigint,
    queue text COLLATE "C" NOT NULL,
    priority bigint NOT NULL,
    tags text COLLATE "C" NOT NULL,
    parent text COLLATE "C",
    arguments text COLLATE "C" NOT NULL,
    current_step text COLLATE "C" NOT NULL,
    deaths bigint NOT NULL,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    ended_at bigint,
    preview text COLLATE "C" NOT NULL,
    published bytea,
    outcome bytea,
    budget bytea
) WITH (fillfactor = 70);

ALTER TABLE everstep.runs
    ALTER COLUMN published SET STORAGE EXTERNAL, ALTER COLUMN outcome SET STORAGE EXTERNAL;

-- A run that needs a driver is in exactly one of the next five indexes, an ended one in none: an idle worker reads only these.
CREATE INDEX runs_free ON everstep.runs (priority DESC, created_at, id)
    WHERE owner IS NULL AND (status = 'running' OR (status = 'queued' AND queue = 'default'));
-- Those that wait in a queue: for a slot, and if there is a wake_at, first for their time.
CREATE INDEX runs_in_line ON everstep.runs (queue, priority DESC, created_at, id)
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NULL;
CREATE INDEX runs_delayed ON everstep.runs (queue, wake_at, id)
    WHERE owner IS NULL AND status = 'queued' AND queue <> 'default' AND wake_at IS NOT NULL;
CREATE INDEX runs_waking ON everstep.runs (wake_at, id)
    WHERE owner IS NULL AND status = 'waiting' AND wake_at IS NOT NULL;
CREATE INDEX runs_owned ON everstep.runs (owner, status, wake_at) WHERE owner IS NOT NULL;
-- Those that have a slot of their queue.
CREATE INDEX runs_begun ON everstep.runs (queue, owner)
    WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL));

-- For people: lists (newest first), counts, the children of a run.
CREATE INDEX runs_created ON everstep.runs (created_at, id);
CREATE INDEX runs_status ON everstep.runs (status, created_at, id);
CREATE INDEX runs_parent ON everstep.runs (parent, created_at, id) WHERE parent IS NOT NULL;

CREATE TABLE everstep.events (
    run text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    seq bigint NOT NULL,
    kind text COLLATE "C" NOT NULL,
    step text COLLATE "C" NOT NULL,
    at bigint NOT NULL,
    body bytea NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (run, generation, seq)
);

-- For lists of approvals: few events are of this kind.
CREATE INDEX events_asking ON everstep.events (run, generation) WHERE kind = 'approval_asked';

ALTER TABLE everstep.events ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE everstep.payloads (
    run text COLLATE "C" NOT NULL,
    digest text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (run, digest)
);

ALTER TABLE everstep.payloads ALTER COLUMN value SET STORAGE EXTERNAL;

-- Where recovery may start instead of at the beginning: the newest few of each run. Each is written in one transaction
-- with its event, which has its digest. `previous` is the digest of the event before that one.
CREATE TABLE everstep.checkpoints (
    run text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    seq bigint NOT NULL,
    previous bytea NOT NULL,
    engine bytea NOT NULL,
    state bytea NOT NULL,
    digest bytea NOT NULL,
    complete bigint NOT NULL,
    PRIMARY KEY (run, generation, seq)
);

ALTER TABLE everstep.checkpoints
    ALTER COLUMN engine SET STORAGE EXTERNAL, ALTER COLUMN state SET STORAGE EXTERNAL;

-- Histories name consumed numbers, so a number must never be used for another delivery. A sender has the lock
-- on the run's row, so that the numbers of one run are in the order of their commits.
CREATE TABLE everstep.signals (
    number bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    at bigint NOT NULL,
    state text COLLATE "C" NOT NULL
);

ALTER TABLE everstep.signals ALTER COLUMN value SET STORAGE EXTERNAL;

CREATE INDEX signals_run ON everstep.signals (run, number);
CREATE INDEX signals_pending ON everstep.signals (run, number) WHERE state = 'pending';
-- A `child` or `key` delivery has its call as id, which comes again, so it is not meant here.
CREATE UNIQUE INDEX signals_id ON everstep.signals (run, kind, id) WHERE id <> '' AND kind NOT IN ('child', 'key');

-- Which events hold the answers to requests: an index, the events are what counts. The first answer to a request stays.
CREATE TABLE everstep.answers (
    run text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    generation bigint NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (run, number)
);

-- What runs append for others to read while they run. The digest covers the entry before it.
CREATE TABLE everstep.streams (
    run text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    position bigint NOT NULL,
    seq bigint NOT NULL,
    step text COLLATE "C" NOT NULL,
    attempt bigint NOT NULL,
    first bigint NOT NULL,
    secret bigint NOT NULL,
    at bigint NOT NULL,
    value bytea NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (run, generation, name, position)
);

ALTER TABLE everstep.streams ALTER COLUMN value SET STORAGE EXTERNAL;

-- The followers of runs. A follower receives the end once: then its row is deleted.
CREATE TABLE everstep.followers (
    run text COLLATE "C" NOT NULL,
    follower text COLLATE "C" NOT NULL,
    call bigint NOT NULL,
    PRIMARY KEY (run, follower, call)
);

CREATE INDEX followers_follower ON everstep.followers (follower);

-- The keys of effects: their owners, and the outcomes that other steps share. They outlive their runs.
CREATE TABLE everstep.effects (
    key text COLLATE "C" PRIMARY KEY,
    state text COLLATE "C" NOT NULL,
    run text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    call bigint NOT NULL,
    seq bigint NOT NULL,
    step text COLLATE "C" NOT NULL,
    effect text COLLATE "C" NOT NULL,
    arguments text COLLATE "C" NOT NULL,
    round bigint NOT NULL,
    begun_at bigint NOT NULL,
    changed_at bigint NOT NULL,
    by text COLLATE "C" NOT NULL,
    note text COLLATE "C" NOT NULL,
    digest text COLLATE "C" NOT NULL,
    outcome bytea,
    secret bigint NOT NULL
);

ALTER TABLE everstep.effects ALTER COLUMN outcome SET STORAGE EXTERNAL;

CREATE INDEX effects_run ON everstep.effects (run, state);
CREATE INDEX effects_changed ON everstep.effects (changed_at, key);

-- The steps that wait for a key. A waiter receives its change once: then its row is deleted.
CREATE TABLE everstep.waiters (
    key text COLLATE "C" NOT NULL,
    run text COLLATE "C" NOT NULL,
    call bigint NOT NULL,
    PRIMARY KEY (key, run, call)
);

CREATE INDEX waiters_run ON everstep.waiters (run);

CREATE TABLE everstep.holds (
    id text COLLATE "C" PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    reason text COLLATE "C" NOT NULL,
    step text COLLATE "C" NOT NULL,
    summary text COLLATE "C" NOT NULL,
    report bytea NOT NULL,
    resolutions text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL,
    resolved_at bigint,
    resolution text COLLATE "C" NOT NULL,
    by text COLLATE "C" NOT NULL,
    note text COLLATE "C" NOT NULL
);

CREATE INDEX holds_run ON everstep.holds (run);
CREATE INDEX holds_open ON everstep.holds (created_at, id) WHERE resolved_at IS NULL;
CREATE INDEX holds_diverged ON everstep.holds (created_at) WHERE resolved_at IS NULL AND reason = 'diverged';

-- What was taken out of the other tables because it is damaged: each row whole, as MessagePack. `what` is the kind of
-- thing that it was: an event, a run (its row), a payload, a checkpoint. Nothing here is ever changed.
CREATE TABLE everstep.archive (
    id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    what text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    row bytea NOT NULL,
    why text COLLATE "C" NOT NULL,
    at bigint NOT NULL
);

CREATE INDEX archive_run ON everstep.archive (run, id);

-- The notifications of a hold, written with it. `target` is a name; addresses and secrets are never stored.
CREATE TABLE everstep.notifications (
    id text COLLATE "C" PRIMARY KEY,
    hold text COLLATE "C" NOT NULL,
    run text COLLATE "C" NOT NULL,
    target text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    attempts bigint NOT NULL,
    next_at bigint NOT NULL,
    claimed_by text COLLATE "C",
    last_error text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL
);

CREATE INDEX notifications_run ON everstep.notifications (run);
CREATE INDEX notifications_hold ON everstep.notifications (hold) WHERE state = 'pending';
CREATE INDEX notifications_due ON everstep.notifications (target, next_at, id) WHERE state = 'pending';
CREATE INDEX notifications_claimed ON everstep.notifications (target, next_at)
    WHERE state = 'pending' AND claimed_by IS NOT NULL;
CREATE INDEX notifications_undelivered ON everstep.notifications (created_at) WHERE state IN ('pending', 'given up');

-- `place` is the number of the worker's liveness lock. One whose session cannot keep a lock has `has_lock` 0: then only
-- its lease counts. `about` is JSON: what it serves, and how busy it is. `machine` says where its pid is one.
CREATE TABLE everstep.workers (
    id text COLLATE "C" PRIMARY KEY,
    place bigint NOT NULL UNIQUE,
    pid bigint NOT NULL,
    host text COLLATE "C" NOT NULL,
    started_at bigint NOT NULL,
    lease_until bigint NOT NULL,
    targets text COLLATE "C" NOT NULL DEFAULT '[]',
    about bytea NOT NULL DEFAULT '{}',
    has_lock bigint NOT NULL DEFAULT 1,
    machine text COLLATE "C" NOT NULL DEFAULT ''
);

ALTER TABLE everstep.workers ALTER COLUMN about SET STORAGE EXTERNAL;

-- Named as in any other database that atomic steps write to, and perhaps made by one of them. While a transaction is open
-- the guard of its marker refers to one that is never there, so that nothing can commit it before the marker is complete.
CREATE TABLE IF NOT EXISTS everstep.everstep_markers (
    key text COLLATE "C" PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    step text COLLATE "C" NOT NULL,
    attempt bigint NOT NULL,
    outcome bytea,
    at bigint NOT NULL,
    guard text COLLATE "C" CONSTRAINT everstep_only_the_step_commits
        REFERENCES everstep.everstep_markers (key) DEFERRABLE INITIALLY DEFERRED
);

CREATE INDEX IF NOT EXISTS everstep_markers_run ON everstep.everstep_markers (run);

CREATE INDEX IF NOT EXISTS everstep_markers_guard ON everstep.everstep_markers (guard) WHERE guard IS NOT NULL;

-- Runs of which a part was deleted, because their deletion takes more than one transaction, or was cut off.
CREATE TABLE everstep.deletions (
    run text COLLATE "C" PRIMARY KEY,
    generation bigint NOT NULL,
    at bigint NOT NULL
);

-- Runs by their tags, newest last. A statement that writes a run's row writes these, too.
CREATE TABLE everstep.tagged (
    name text COLLATE "C" NOT NULL,
    value text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL,
    run text COLLATE "C" NOT NULL,
    PRIMARY KEY (name, value, created_at, run)
);

CREATE INDEX tagged_run ON everstep.tagged (run, name);

-- Schedules. `definition` and `state` are JSON that only the engine reads; every change of a row
-- raises its revision.
CREATE TABLE everstep.schedules (
    name text COLLATE "C" PRIMARY KEY,
    workflow text COLLATE "C" NOT NULL,
    revision bigint NOT NULL,
    next_at bigint,
    waits bigint NOT NULL,
    definition bytea NOT NULL,
    state bytea NOT NULL,
    created_at bigint NOT NULL
);

ALTER TABLE everstep.schedules
    ALTER COLUMN definition SET STORAGE EXTERNAL, ALTER COLUMN state SET STORAGE EXTERNAL;

CREATE INDEX schedules_due ON everstep.schedules (next_at, name, workflow) WHERE next_at IS NOT NULL;
CREATE INDEX schedules_waiting ON everstep.schedules (name) WHERE waits <> 0;

-- The settings of queues of runs (kind `queue`) and named limits of steps (`limit`). One that was never configured
-- needs no row. `full_at` is when the bucket of its rate will be full.
CREATE TABLE everstep.queues (
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    concurrency bigint,
    per_worker bigint,
    per_key bigint,
    rate bigint,
    seconds double precision NOT NULL,
    paused bigint NOT NULL,
    full_at bigint NOT NULL,
    changed_at bigint NOT NULL,
    PRIMARY KEY (kind, name)
);

-- Attempts at steps that have a slot of a named limit, while they have it. A slot of a worker that is gone does not count.
CREATE TABLE everstep.slots (
    name text COLLATE "C" NOT NULL,
    run text COLLATE "C" NOT NULL,
    call bigint NOT NULL,
    worker text COLLATE "C" NOT NULL,
    since bigint NOT NULL,
    PRIMARY KEY (name, run, call)
);

-- Threads that frameworks save here, with the worker that runs one, or did last.
CREATE TABLE everstep.saved_threads (
    thread text COLLATE "C" PRIMARY KEY,
    owner text COLLATE "C",
    epoch bigint NOT NULL,
    since bigint NOT NULL,
    born bigint NOT NULL
);

-- The states of threads. `origin` is what the framework calls the run that made one.
CREATE TABLE everstep.saved_states (
    thread text COLLATE "C" NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    parent text COLLATE "C" NOT NULL,
    origin text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    digest bytea NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (thread, namespace, id)
);

CREATE INDEX saved_states_origin ON everstep.saved_states (origin) WHERE origin <> '';

-- Values of states in parts: what was appended to a value is one more part of its series.
CREATE TABLE everstep.saved_parts (
    thread text COLLATE "C" NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    channel text COLLATE "C" NOT NULL,
    series text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    value bytea NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (thread, namespace, channel, series, number)
);

ALTER TABLE everstep.saved_parts ALTER COLUMN value SET STORAGE EXTERNAL;

-- The results of calls in a state. They may arrive before their state.
CREATE TABLE everstep.saved_writes (
    thread text COLLATE "C" NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    call text COLLATE "C" NOT NULL,
    place bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    channel text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (thread, namespace, state, call, place)
);

ALTER TABLE everstep.saved_writes ALTER COLUMN body SET STORAGE EXTERNAL;

-- What frameworks remember outside of threads.
CREATE TABLE everstep.saved_items (
    namespace text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    expires_at bigint,
    seconds double precision,
    PRIMARY KEY (namespace, key)
);

CREATE INDEX saved_items_dying ON everstep.saved_items (expires_at) WHERE expires_at IS NOT NULL;
