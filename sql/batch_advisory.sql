-- Batches in the advisory lock form: one row a key, and each settles on its own.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_batch_advisory;
SET search_path = rs_batch_advisory;

CREATE TABLE jobs (id bigint PRIMARY KEY, account int, priority int, retry_after timestamptz, attempt int NOT NULL DEFAULT 1,
	headers json, payload jsonb);
CREATE INDEX ON jobs (priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', headers_column => 'headers', payload_column => 'payload', lock_key => 'rs-batch-{account}');
CREATE TABLE dead (LIKE jobs);
CREATE TABLE effect (n serial, did text);

CREATE FUNCTION answers(jobs jobs[]) RETURNS ruststream.outcome[]
LANGUAGE sql AS $$
	SELECT array_agg(CASE j.payload->>'do'
			WHEN 'retry' THEN ruststream.retry()
			WHEN 'retry_after' THEN ruststream.retry_after('1 hour')
			WHEN 'discard' THEN ruststream.discard('of no use')
			WHEN 'dead_letter' THEN ruststream.dead_letter('beyond help')
			ELSE ruststream.ack() END ORDER BY ordinality)
	FROM unnest(jobs) WITH ORDINALITY AS j
$$;
CREATE FUNCTION perform(command text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE command; END $$;
CREATE FUNCTION keys_held() RETURNS bigint
LANGUAGE sql AS $$ SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() $$;
CREATE FUNCTION handle(jobs jobs[]) RETURNS ruststream.outcome[]
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_batch_advisory.effect (did) SELECT j.id FROM unnest(jobs) AS j;
	RAISE NOTICE 'the handler has %, keys held: %', (SELECT string_agg(j.id::text, ' ') FROM unnest(jobs) AS j), rs_batch_advisory.keys_held();
	PERFORM rs_batch_advisory.perform(j.payload->>'sql') FROM unnest(jobs) AS j WHERE j.payload ? 'sql';
	RETURN rs_batch_advisory.answers(jobs);
END $$;
SELECT ruststream.subscribe('ba', 'jobs', 'handle', workers => 0, batch_size => 3, max_attempts => 5, dead_letter => 'dead');
CREATE VIEW state AS SELECT 'jobs' AS t, id, account, attempt, retry_after IS NOT NULL AS delayed FROM jobs
	UNION ALL SELECT 'dead', id, account, attempt, retry_after IS NOT NULL FROM dead ORDER BY 1 DESC, 2;
CREATE FUNCTION failures() RETURNS TABLE (id text, attempt bigint, sqlstate text, message text)
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM ruststream.failure_history RETURNING *)
	SELECT row_id, attempt, sqlstate, message FROM gone ORDER BY gone.id
$$;

-- the first of each account, in claim order
INSERT INTO jobs (id, account, priority, payload) VALUES
	(1, 1, 1, '{"do": "retry_after"}'), (2, 1, 1, NULL), (3, 2, 1, '{"do": "discard"}'), (4, 3, NULL, '{"do": "dead_letter"}'),
	(5, 3, 1, NULL), (6, 4, 1, NULL), (7, 2, 1, NULL);
SET ruststream.trace = on;
CALL ruststream.drain('ba', 3);
SELECT * FROM state;
SELECT * FROM failures();
CALL ruststream.drain('ba');
RESET ruststream.trace;
SELECT * FROM state;
SELECT keys_held();
TRUNCATE jobs, dead, effect;

-- a key that the handler gives away: its row is lost, its neighbours settle
INSERT INTO jobs (id, account, payload) VALUES (1, 1, NULL), (3, 3, '{"do": "discard"}'),
	(2, 2, '{"sql": "SELECT pg_advisory_unlock(hashtextextended(''rs-batch-2'', 0))"}');
SET ruststream.trace = on;
CALL ruststream.drain('ba', 3);
SELECT * FROM state;
SELECT string_agg(did, ' ' ORDER BY n) AS effects FROM effect;
SELECT * FROM failures();
TRUNCATE jobs, dead, effect;

-- one that cannot be settled is its own failure
CREATE TABLE holds (job bigint REFERENCES jobs);
INSERT INTO jobs (id, account) SELECT i, i FROM generate_series(1, 3) AS i;
INSERT INTO holds VALUES (2);
CALL ruststream.drain('ba', 3);
SELECT * FROM state;
SELECT * FROM failures();
DROP TABLE holds;
TRUNCATE jobs, dead, effect;

-- an error of the handler is every row's
INSERT INTO jobs (id, account, attempt, payload) VALUES (1, 1, 1, NULL), (2, 2, 5, '{"sql": "SELECT 1 / 0"}'), (3, 3, 2, NULL);
CALL ruststream.drain('ba', 3);
RESET ruststream.trace;
SELECT * FROM state;
SELECT count(*) AS effects FROM effect;
SELECT * FROM failures();
TRUNCATE jobs, dead, effect;

-- a row that has been settled between the look and the lock
CREATE FUNCTION settle_another() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	DELETE FROM rs_batch_advisory.jobs WHERE id = 2;
	RETURN NEW;
END $$;
CREATE TRIGGER settle_another AFTER UPDATE ON jobs FOR EACH ROW WHEN (OLD.id = 1) EXECUTE FUNCTION settle_another();
INSERT INTO jobs (id, account) SELECT i, i FROM generate_series(1, 3) AS i;
SET ruststream.trace = on;
CALL ruststream.drain('ba', 3);
RESET ruststream.trace;
SELECT * FROM state;
SELECT keys_held();
DROP TRIGGER settle_another ON jobs;
TRUNCATE jobs, effect;

-- a hundred keys at once, and no more
SELECT ruststream.alter_subscription('ba', batch_size => 1000);
INSERT INTO jobs (id, account) SELECT i, i FROM generate_series(1, 150) AS i;
SELECT count(*) FROM jobs;
CALL ruststream.drain('ba', 1000);
SELECT count(*) AS effects FROM effect;
SELECT * FROM state;
TRUNCATE effect;

-- a procedure, and rows that do not decode
CREATE PROCEDURE row_by_row(jobs jobs[], d ruststream.delivery[], INOUT answer ruststream.outcome)
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. cardinality(jobs) LOOP
		INSERT INTO rs_batch_advisory.effect (did) VALUES (format('%s: %s', d[i].id, d[i].headers));
		COMMIT;
	END LOOP;
	answer := ruststream.ack();
END $$;
SELECT ruststream.alter_subscription('ba', handler => 'row_by_row', on_decode_error => 'dead_letter');
INSERT INTO jobs (id, account, headers) VALUES (1, 1, '{"a": "\u0000"}'), (2, 2, '{"a": "2"}'), (3, 3, NULL);
SET ruststream.trace = on;
CALL ruststream.drain('ba');
RESET ruststream.trace;
SELECT string_agg(did, ', ' ORDER BY n) AS effects FROM effect;
SELECT * FROM state;
SELECT id, sqlstate FROM failures();
SELECT keys_held();

SET client_min_messages = error;
DROP SCHEMA rs_batch_advisory CASCADE;
