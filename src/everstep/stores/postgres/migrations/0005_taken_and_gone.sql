-- Compatible with the version before.

-- Candidates for slots of a queue (kind `queue`) or of a named limit (`limit`): where to look, not what is true. Whether
-- an entry still has its slot is said by the run's row, or the row in `slots`.
--
-- An index on those would have an entry for every run that ever began, for as long as any transaction can see the past:
-- then nothing, not even a vacuum, may remove what is dead, and every count walks over all of it. Here nothing is
-- deleted one by one. What is begun is written behind the last entry; after a while the entries that still count are
-- copied to the next page, and the page before is never read again. So a count reads a few entries for each slot,
-- whatever has happened since.
CREATE TABLE everstep.taken (
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    page bigint NOT NULL,
    place bigint NOT NULL,
    run text COLLATE "C" NOT NULL,
    call bigint NOT NULL,
    PRIMARY KEY (kind, name, page, place)
);

-- Writes an entry, under the lock of the queue or limit that `lock_queues` takes. Copied ones have places below 0, so a page is full
-- when as many were added as were copied, and a few.
CREATE FUNCTION everstep.note_taken(of_schema text, of_kind text, of_name text, of_run text, of_call bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $note$
DECLARE
    last_page bigint;
    last_place bigint;
    first_place bigint;
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock(
        pg_catalog.hashtextextended(of_schema || '/' || of_kind || ' ' || of_name, 1));
    last_page := (SELECT pg_catalog.max(page) FROM everstep.taken WHERE kind = of_kind AND name = of_name);
    IF last_page IS NULL THEN
        last_page := 0;
        last_place := -1;
    ELSE
        last_place := (SELECT pg_catalog.max(place) FROM everstep.taken
            WHERE kind = of_kind AND name = of_name AND page = last_page);
        first_place := (SELECT pg_catalog.min(place) FROM everstep.taken
            WHERE kind = of_kind AND name = of_name AND page = last_page);
        IF last_place >= 16 - least(first_place, 0) THEN
            INSERT INTO everstep.taken (kind, name, page, place, run, call)
            SELECT of_kind, of_name, last_page + 1, -pg_catalog.row_number() OVER (), run, call FROM (
                SELECT DISTINCT run, call FROM everstep.taken AS entry
                WHERE kind = of_kind AND name = of_name AND page = last_page AND (
                    CASE WHEN of_kind = 'queue' THEN (
                        SELECT runs.queue = of_name AND (
                            runs.status IN ('running', 'waiting') OR (runs.status = 'queued' AND runs.owner IS NOT NULL)
                        ) FROM everstep.runs WHERE runs.id = entry.run
                    ) ELSE (
                        SELECT true FROM everstep.slots
                        WHERE slots.name = of_name AND slots.run = entry.run AND slots.call = entry.call
                    ) END
                )
            ) AS kept;
            DELETE FROM everstep.taken WHERE kind = of_kind AND name = of_name AND page = last_page;
            last_page := last_page + 1;
            last_place := -1;
        END IF;
    END IF;
    INSERT INTO everstep.taken (kind, name, page, place, run, call)
    VALUES (of_kind, of_name, last_page, last_place + 1, of_run, of_call);
END
$note$;

-- Triggers, so that starts by workers of the previous release have entries as well. They have the rights of the role that
-- migrated, because the role of such a worker may have none on a new table yet.
CREATE FUNCTION everstep.note_begun() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $note$
BEGIN
    PERFORM everstep.note_taken(TG_TABLE_SCHEMA, 'queue', NEW.queue, NEW.id, 0);
    RETURN NULL;
END
$note$;

CREATE FUNCTION everstep.note_slot() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $note$
BEGIN
    PERFORM everstep.note_taken(TG_TABLE_SCHEMA, 'limit', NEW.name, NEW.run, NEW.call);
    RETURN NULL;
END
$note$;

REVOKE EXECUTE ON FUNCTION everstep.note_taken(text, text, text, text, bigint) FROM PUBLIC;

CREATE TRIGGER runs_begin AFTER UPDATE ON everstep.runs FOR EACH ROW
WHEN (NEW.queue <> 'default' AND (NEW.status IN ('running', 'waiting') OR (NEW.status = 'queued' AND NEW.owner IS NOT NULL))
    AND NOT (OLD.queue = NEW.queue
        AND (OLD.status IN ('running', 'waiting') OR (OLD.status = 'queued' AND OLD.owner IS NOT NULL))))
EXECUTE FUNCTION everstep.note_begun();

CREATE TRIGGER runs_are_begun AFTER INSERT ON everstep.runs FOR EACH ROW
WHEN (NEW.queue <> 'default' AND (NEW.status IN ('running', 'waiting') OR (NEW.status = 'queued' AND NEW.owner IS NOT NULL)))
EXECUTE FUNCTION everstep.note_begun();

CREATE TRIGGER slots_are_taken AFTER INSERT OR UPDATE ON everstep.slots FOR EACH ROW EXECUTE FUNCTION everstep.note_slot();

-- Also for a role with session_replication_role = replica, whose claims would not be counted otherwise.
ALTER TABLE everstep.runs ENABLE ALWAYS TRIGGER runs_begin;
ALTER TABLE everstep.runs ENABLE ALWAYS TRIGGER runs_are_begun;
ALTER TABLE everstep.slots ENABLE ALWAYS TRIGGER slots_are_taken;

INSERT INTO everstep.taken (kind, name, page, place, run, call)
SELECT 'queue', queue, 0, pg_catalog.row_number() OVER (PARTITION BY queue ORDER BY id), id, 0 FROM everstep.runs
WHERE queue <> 'default' AND (status IN ('running', 'waiting') OR (status = 'queued' AND owner IS NOT NULL));

INSERT INTO everstep.taken (kind, name, page, place, run, call)
SELECT 'limit', name, 0, pg_catalog.row_number() OVER (PARTITION BY name ORDER BY run, call), run, call FROM everstep.slots;

-- Workers and hosts that a person has declared gone for good: who said so, when and why. `name` is the
-- id of a worker (kind `worker`), or of a host (`host`), on which everything that had begun before that time has ended.
CREATE TABLE everstep.gone_workers (
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    at bigint NOT NULL,
    by text COLLATE "C" NOT NULL,
    note text COLLATE "C" NOT NULL,
    PRIMARY KEY (kind, name, at)
);
