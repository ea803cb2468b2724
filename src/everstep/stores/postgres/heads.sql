-- What a server still has of what it promised.

-- name: server_process
-- Another server process may be a copy that lacks the last moment; this one lacks nothing as long as it runs.
SELECT (extract(epoch FROM pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint;

-- name: epochs
-- Whether runs are still driven by the worker that has just written to them.
SELECT id, epoch FROM everstep.runs WHERE id = ANY ($1::text[]);

-- name: heads_behind
-- Runs whose history lacks an event that was seen durable: run, generation, number, digest, time. Unless a person who
-- knew that something was lost has repaired the history since.
SELECT seen.run, runs.generation, runs.head_seq, runs.updated_at, runs.status,
    (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint
FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bytea[], $5::bigint[])
    AS seen (run, generation, seq, digest, at)
LEFT JOIN everstep.runs ON runs.id = seen.run
LEFT JOIN everstep.events AS kept
    ON kept.run = seen.run AND kept.generation = seen.generation AND kept.seq = seen.seq
WHERE kept.digest IS DISTINCT FROM seen.digest
    AND NOT EXISTS (
        SELECT 1 FROM everstep.events AS known
        WHERE known.run = seen.run AND known.generation = runs.generation AND known.at > seen.at
            AND known.kind IN ('run_repaired', 'run_restored')
    );
