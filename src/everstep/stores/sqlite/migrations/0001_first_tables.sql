-- The tables of the first release. Types are checked (STRICT). There are no foreign keys, on purpose: a unit is accepted
-- or refused by its epoch and head, and histories are deleted run by run.

CREATE TABLE meta (
    name TEXT NOT NULL PRIMARY KEY,
    value ANY
) STRICT, WITHOUT ROWID;

-- What the keys of shared actions derive from, so that no two stores share one.
INSERT INTO meta (name, value) VALUES ('entropy', lower(hex(randomblob(16))));

-- The columns that grow large are last, so that reading the others does not follow their overflow pages.
CREATE TABLE runs (
    id TEXT NOT NULL PRIMARY KEY,
    workflow TEXT NOT NULL,
    version TEXT NOT NULL,
    semantics INTEGER NOT NULL,
    status TEXT NOT NULL,
    generation INTEGER NOT NULL,
    head_seq INTEGER NOT NULL,
    head_digest BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    owner TEXT,
    wake_at INTEGER,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    tags TEXT NOT NULL,
    parent TEXT,
    arguments TEXT NOT NULL,
    current_step TEXT NOT NULL,
    deaths INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    ended_at INTEGER,
    preview TEXT NOT NULL,
    published BLOB,
    outcome BLOB,
    budget BLOB
) STRICT;

-- A run that needs a driver is in exactly one of the next four indexes, an ended one in none: an idle worker reads only these.
CREATE INDEX runs_free ON runs (priority DESC, created_at, workflow, queue)
    WHERE owner IS NULL AND (status = 'running' OR (status = 'queued' AND queue = 'default'));
-- Those that wait in a queue: for a slot, and if there is a wake_at, first for their time. The tag `key` is what the limit
-- of a queue for each key counts by.
CREATE INDEX runs_queued ON runs (
    queue, wake_at, priority DESC, created_at, workflow, CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END
) WHERE owner IS NULL AND status = 'queued' AND queue <> 'default';
CREATE INDEX runs_waking ON runs (wake_at, workflow)
    WHERE owner IS NULL AND status = 'waiting' AND wake_at IS NOT NULL;
CREATE INDEX runs_owned ON runs (owner, status, wake_at) WHERE owner IS NOT NULL;
-- Those that have a slot of their queue.
CREATE INDEX runs_begun ON runs (
    queue, owner, status, CASE WHEN json_valid(tags) THEN json_extract(tags, '$.key') END
) WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL));

-- For people: lists (newest first), counts, the children of a run.
CREATE INDEX runs_created ON runs (created_at);
CREATE INDEX runs_status ON runs (status, created_at);
CREATE INDEX runs_parent ON runs (parent) WHERE parent IS NOT NULL;

-- With a rowid: events of runs that write together are adjacent, so a batch touches few pages; the key is an index of
-- its own. Clustered by the key instead, a batch of a hundred runs with long histories took twice the time.
CREATE TABLE events (
    run TEXT NOT NULL,
    generation INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,
    step TEXT NOT NULL,
    at INTEGER NOT NULL,
    body BLOB NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (run, generation, seq)
) STRICT;

-- For lists of approvals: few events are of this kind.
CREATE INDEX events_asking ON events (run, generation) WHERE kind = 'approval_asked';

-- The views `moves` and `starts` are for release 0.1, which writes through them and may use a store beside a newer release.
-- Newer ones write `runs` and `events` themselves. They can go with a migration that is not compatible with the version
-- before.
--
-- Each row that is inserted here moves the head of a run and appends its next one or two events. If a run is not as
-- expected, the statement is undone. Without a status the run stays `running` under the same owner: that leaves alone every
-- column of `runs` that an index has or tests. An end must concern no other run. A row without a run does nothing: it
-- fills a statement up to one of few lengths.
CREATE VIEW moves (
    run, generation, epoch, expected_seq, expected_digest, at, current_step, published, head_seq, head_digest,
    status, wake_at, outcome, ended_at, release, progress,
    seq_1, kind_1, step_1, at_1, body_1, digest_1, seq_2, kind_2, step_2, at_2, body_2, digest_2
) AS SELECT
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL;

CREATE TRIGGER moves_of_running_runs INSTEAD OF INSERT ON moves WHEN NEW.status IS NULL AND NEW.run IS NOT NULL
BEGIN
    UPDATE runs SET
        head_seq = NEW.head_seq, head_digest = NEW.head_digest, updated_at = NEW.at, current_step = NEW.current_step,
        published = coalesce(NEW.published, published), deaths = 0
    WHERE id = NEW.run AND generation = NEW.generation AND epoch = NEW.epoch AND head_seq = NEW.expected_seq
        AND head_digest = NEW.expected_digest AND status = 'running' AND wake_at IS NULL;
    SELECT RAISE(ABORT, 'a run is not as expected') WHERE changes() <> 1;
    INSERT INTO events (run, generation, seq, kind, step, at, body, digest)
        VALUES (NEW.run, NEW.generation, NEW.seq_1, NEW.kind_1, NEW.step_1, NEW.at_1, NEW.body_1, NEW.digest_1);
    INSERT INTO events (run, generation, seq, kind, step, at, body, digest)
        SELECT NEW.run, NEW.generation, NEW.seq_2, NEW.kind_2, NEW.step_2, NEW.at_2, NEW.body_2, NEW.digest_2
        WHERE NEW.seq_2 IS NOT NULL;
END;

CREATE TRIGGER moves_of_other_runs INSTEAD OF INSERT ON moves WHEN NEW.status IS NOT NULL
BEGIN
    SELECT RAISE(ABORT, 'the end of a run concerns others') WHERE NEW.ended_at IS NOT NULL AND (
        EXISTS (SELECT 1 FROM followers WHERE run = NEW.run)
        OR EXISTS (SELECT 1 FROM signals INDEXED BY signals_pending WHERE state = 'pending' AND run = NEW.run)
        OR EXISTS (SELECT 1 FROM effects INDEXED BY effects_run WHERE state = 'under-way' AND run = NEW.run)
    );
    UPDATE runs SET
        head_seq = NEW.head_seq, head_digest = NEW.head_digest, updated_at = NEW.at, current_step = NEW.current_step,
        published = coalesce(NEW.published, published), status = NEW.status, wake_at = NEW.wake_at,
        outcome = NEW.outcome, ended_at = NEW.ended_at, owner = CASE WHEN NEW.release THEN NULL ELSE owner END,
        deaths = CASE WHEN NEW.progress THEN 0 ELSE deaths END
    WHERE id = NEW.run AND generation = NEW.generation AND epoch = NEW.epoch AND head_seq = NEW.expected_seq
        AND head_digest = NEW.expected_digest;
    SELECT RAISE(ABORT, 'a run is not as expected') WHERE changes() <> 1;
    INSERT INTO events (run, generation, seq, kind, step, at, body, digest)
        VALUES (NEW.run, NEW.generation, NEW.seq_1, NEW.kind_1, NEW.step_1, NEW.at_1, NEW.body_1, NEW.digest_1);
    INSERT INTO events (run, generation, seq, kind, step, at, body, digest)
        SELECT NEW.run, NEW.generation, NEW.seq_2, NEW.kind_2, NEW.step_2, NEW.at_2, NEW.body_2, NEW.digest_2
        WHERE NEW.seq_2 IS NOT NULL;
END;

-- In the same way: each row that is inserted here creates a run with its first event. One that exists fails the statement.
CREATE VIEW starts (
    id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority, tags,
    parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget,
    seq, kind, step, at, body, digest
) AS SELECT
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL;

CREATE TRIGGER starts_of_runs INSTEAD OF INSERT ON starts WHEN NEW.id IS NOT NULL
BEGIN
    INSERT INTO runs (
    id, workflow, version, semantics, status, generation, head_seq, head_digest, epoch, owner, wake_at, queue, priority, tags,
    parent, arguments, current_step, deaths, created_at, updated_at, ended_at, preview, published, outcome, budget
    ) VALUES (
        NEW.id, NEW.workflow, NEW.version, NEW.semantics, NEW.status, NEW.generation, NEW.head_seq,
        NEW.head_digest, NEW.epoch, NEW.owner, NEW.wake_at, NEW.queue, NEW.priority, NEW.tags, NEW.parent,
        NEW.arguments, NEW.current_step, NEW.deaths, NEW.created_at, NEW.updated_at, NEW.ended_at,
        NEW.preview, NEW.published, NEW.outcome, NEW.budget
    );
    INSERT INTO events (run, generation, seq, kind, step, at, body, digest)
        VALUES (NEW.id, NEW.generation, NEW.seq, NEW.kind, NEW.step, NEW.at, NEW.body, NEW.digest);
END;

-- With a rowid: large rows in the tree of the key itself would make it deep.
CREATE TABLE payloads (
    run TEXT NOT NULL,
    digest TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (run, digest)
) STRICT;

-- Where recovery may start instead of at the beginning: the newest few of each run. Each is written in one transaction
-- with its event, which has its digest. `previous` is the digest of the event before that one.
CREATE TABLE checkpoints (
    run TEXT NOT NULL,
    generation INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    previous BLOB NOT NULL,
    engine BLOB NOT NULL,
    state BLOB NOT NULL,
    digest BLOB NOT NULL,
    complete INTEGER NOT NULL,
    PRIMARY KEY (run, generation, seq)
) STRICT;

-- AUTOINCREMENT: a number is in histories as consumed, so it must never come back for another delivery.
CREATE TABLE signals (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    id TEXT NOT NULL,
    value BLOB NOT NULL,
    at INTEGER NOT NULL,
    state TEXT NOT NULL
) STRICT;

CREATE INDEX signals_run ON signals (run);
CREATE INDEX signals_pending ON signals (run) WHERE state = 'pending';
-- A `child` or `key` delivery has its call as id, which comes again, so it is not meant here.
CREATE UNIQUE INDEX signals_id ON signals (run, kind, id) WHERE id <> '' AND kind NOT IN ('child', 'key');

-- Which events hold the answers to requests: an index, the events are what counts. The first answer to a request stays.
CREATE TABLE answers (
    run TEXT NOT NULL,
    number INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (run, number)
) STRICT, WITHOUT ROWID;

-- What runs append for others to read while they run. The digest covers the entry before it.
CREATE TABLE streams (
    run TEXT NOT NULL,
    generation INTEGER NOT NULL,
    name TEXT NOT NULL,
    position INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    step TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    first INTEGER NOT NULL,
    secret INTEGER NOT NULL,
    at INTEGER NOT NULL,
    value BLOB NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (run, generation, name, position)
) STRICT;

-- The followers of runs. A follower receives the end once: then its row is deleted.
CREATE TABLE followers (
    run TEXT NOT NULL,
    follower TEXT NOT NULL,
    call INTEGER NOT NULL,
    PRIMARY KEY (run, follower, call)
) STRICT, WITHOUT ROWID;

CREATE INDEX followers_follower ON followers (follower);

-- The keys of effects: their owners, and the outcomes that other steps share. They outlive their runs. With a rowid,
-- because an outcome may be large.
CREATE TABLE effects (
    key TEXT NOT NULL PRIMARY KEY,
    state TEXT NOT NULL,
    run TEXT NOT NULL,
    generation INTEGER NOT NULL,
    call INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    step TEXT NOT NULL,
    effect TEXT NOT NULL,
    arguments TEXT NOT NULL,
    round INTEGER NOT NULL,
    begun_at INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,
    by TEXT NOT NULL,
    note TEXT NOT NULL,
    digest TEXT NOT NULL,
    outcome BLOB,
    secret INTEGER NOT NULL
) STRICT;

CREATE INDEX effects_run ON effects (run, state);
CREATE INDEX effects_changed ON effects (changed_at, key);

-- The steps that wait for a key. A waiter receives its change once: then its row is deleted.
CREATE TABLE waiters (
    key TEXT NOT NULL,
    run TEXT NOT NULL,
    call INTEGER NOT NULL,
    PRIMARY KEY (key, run, call)
) STRICT, WITHOUT ROWID;

CREATE TABLE holds (
    id TEXT NOT NULL PRIMARY KEY,
    run TEXT NOT NULL,
    reason TEXT NOT NULL,
    step TEXT NOT NULL,
    summary TEXT NOT NULL,
    report BLOB NOT NULL,
    resolutions TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    resolved_at INTEGER,
    resolution TEXT NOT NULL,
    by TEXT NOT NULL,
    note TEXT NOT NULL
) STRICT;

CREATE INDEX holds_run ON holds (run);
CREATE INDEX holds_open ON holds (created_at) WHERE resolved_at IS NULL;
CREATE INDEX holds_diverged ON holds (created_at) WHERE resolved_at IS NULL AND reason = 'diverged';

-- What was taken out of the other tables because it is damaged: each row whole, as MessagePack. `what` is the kind of
-- thing that it was: an event, a run (its row), a payload, a checkpoint. Nothing here is ever changed.
CREATE TABLE archive (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    generation INTEGER NOT NULL,
    what TEXT NOT NULL,
    seq INTEGER NOT NULL,
    row BLOB NOT NULL,
    why TEXT NOT NULL,
    at INTEGER NOT NULL
) STRICT;

CREATE INDEX archive_run ON archive (run);

-- The notifications of a hold, written with it. `target` is a name; addresses and secrets are never stored.
CREATE TABLE notifications (
    id TEXT NOT NULL PRIMARY KEY,
    hold TEXT NOT NULL,
    run TEXT NOT NULL,
    target TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    next_at INTEGER NOT NULL,
    claimed_by TEXT,
    last_error TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE INDEX notifications_run ON notifications (run);
CREATE INDEX notifications_hold ON notifications (hold) WHERE state = 'pending';
CREATE INDEX notifications_due ON notifications (target, next_at) WHERE state = 'pending';
CREATE INDEX notifications_claimed ON notifications (target, next_at)
    WHERE state = 'pending' AND claimed_by IS NOT NULL;
CREATE INDEX notifications_undelivered ON notifications (created_at) WHERE state IN ('pending', 'given up');

-- Schedules. `definition` and `state` are JSON that only the engine reads; every change of a row
-- raises its revision.
CREATE TABLE schedules (
    name TEXT NOT NULL PRIMARY KEY,
    workflow TEXT NOT NULL,
    revision INTEGER NOT NULL,
    next_at INTEGER,
    waits INTEGER NOT NULL,
    definition BLOB NOT NULL,
    state BLOB NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE INDEX schedules_due ON schedules (next_at, name, workflow) WHERE next_at IS NOT NULL;
CREATE INDEX schedules_waiting ON schedules (name) WHERE waits;

-- `place` is the worker's byte in the file of liveness locks; `about` is JSON: what it serves, and how busy it is.
CREATE TABLE workers (
    id TEXT NOT NULL PRIMARY KEY,
    place INTEGER NOT NULL UNIQUE,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    targets TEXT NOT NULL DEFAULT '[]',
    about BLOB NOT NULL DEFAULT x'7b7d'
) STRICT;

-- Named as in any other database that atomic steps write to: one code serves all of them.
CREATE TABLE everstep_markers (
    key TEXT NOT NULL PRIMARY KEY,
    run TEXT NOT NULL,
    step TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    outcome BLOB,
    at INTEGER NOT NULL
) STRICT;

CREATE INDEX everstep_markers_run ON everstep_markers (run);

-- Runs of which a part was deleted, because their deletion takes more than one transaction, or was cut off.
CREATE TABLE deletions (
    run TEXT NOT NULL PRIMARY KEY,
    generation INTEGER NOT NULL,
    at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Runs by their tags, newest last. The operation that inserts a run inserts these: a trigger would cost every start.
-- The triggers keep them equal to the column when that changes.
CREATE TABLE tagged (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    run TEXT NOT NULL,
    PRIMARY KEY (name, value, created_at, run)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER runs_untagged_before BEFORE UPDATE OF tags, created_at ON runs WHEN OLD.tags <> '{}' AND json_valid(OLD.tags)
BEGIN
    DELETE FROM tagged WHERE run = OLD.id AND created_at = OLD.created_at
        AND (name, value) IN (SELECT key, value FROM json_each(OLD.tags));
END;

CREATE TRIGGER runs_retagged AFTER UPDATE OF tags, created_at ON runs WHEN NEW.tags <> '{}' AND json_valid(NEW.tags) BEGIN
    INSERT OR IGNORE INTO tagged SELECT key, value, NEW.created_at, NEW.id FROM json_each(NEW.tags);
END;

CREATE TRIGGER runs_untagged AFTER DELETE ON runs WHEN OLD.tags <> '{}' AND json_valid(OLD.tags) BEGIN
    DELETE FROM tagged WHERE run = OLD.id AND created_at = OLD.created_at
        AND (name, value) IN (SELECT key, value FROM json_each(OLD.tags));
END;

-- The settings of queues of runs (kind `queue`) and named limits of steps (`limit`). One that was never configured
-- needs no row. `full_at` is when the bucket of its rate will be full.
CREATE TABLE queues (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    concurrency INTEGER,
    per_worker INTEGER,
    per_key INTEGER,
    rate INTEGER,
    seconds REAL NOT NULL,
    paused INTEGER NOT NULL,
    full_at INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;

-- Attempts at steps that have a slot of a named limit, while they have it. A slot of a worker that is gone does not count.
CREATE TABLE slots (
    name TEXT NOT NULL,
    run TEXT NOT NULL,
    call INTEGER NOT NULL,
    worker TEXT NOT NULL,
    since INTEGER NOT NULL,
    PRIMARY KEY (name, run, call)
) STRICT, WITHOUT ROWID;

-- Threads that frameworks save here, with the worker that runs one, or did last.
CREATE TABLE saved_threads (
    thread TEXT NOT NULL PRIMARY KEY,
    owner TEXT,
    epoch INTEGER NOT NULL,
    since INTEGER NOT NULL,
    born INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The states of threads; like the next two with a rowid, because rows of about a kilobyte would each take a page in the
-- tree of a primary key. `origin` is what the framework calls the run that made one.
CREATE TABLE saved_states (
    thread TEXT NOT NULL,
    namespace TEXT NOT NULL,
    id TEXT NOT NULL,
    parent TEXT NOT NULL,
    origin TEXT NOT NULL,
    body BLOB NOT NULL,
    digest BLOB NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (thread, namespace, id)
) STRICT;

CREATE INDEX saved_states_origin ON saved_states (origin) WHERE origin <> '';

-- Values of states in parts: what was appended to a value is one more part of its series.
CREATE TABLE saved_parts (
    thread TEXT NOT NULL,
    namespace TEXT NOT NULL,
    channel TEXT NOT NULL,
    series TEXT NOT NULL,
    number INTEGER NOT NULL,
    value BLOB NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (thread, namespace, channel, series, number)
) STRICT;

-- The results of calls in a state. They may arrive before their state.
CREATE TABLE saved_writes (
    thread TEXT NOT NULL,
    namespace TEXT NOT NULL,
    state TEXT NOT NULL,
    call TEXT NOT NULL,
    place INTEGER NOT NULL,
    path TEXT NOT NULL,
    channel TEXT NOT NULL,
    body BLOB NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (thread, namespace, state, call, place)
) STRICT;

-- What frameworks remember outside of threads.
CREATE TABLE saved_items (
    namespace TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    expires_at INTEGER,
    seconds REAL,
    PRIMARY KEY (namespace, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX saved_items_dying ON saved_items (expires_at) WHERE expires_at IS NOT NULL;
