-- Batches in the lease form: one claim, one call, and each row settles on its
-- own.  Where the library is not preloaded a drain is refused (batch_lease_1.out).
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_batch_lease;
SET search_path = rs_batch_lease;

CREATE TABLE jobs (id bigint PRIMARY KEY, priority int, retry_after timestamptz, attempt int NOT NULL DEFAULT 1,
	headers json, payload jsonb, locked_until timestamptz);
CREATE INDEX ON jobs (priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', headers_column => 'headers', payload_column => 'payload', locked_until_column => 'locked_until');
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
CREATE FUNCTION handle(jobs jobs[]) RETURNS ruststream.outcome[]
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_batch_lease.effect (did) SELECT j.id FROM unnest(jobs) AS j;
	RAISE NOTICE 'the handler has %, leased: %', (SELECT string_agg(j.id::text, ' ') FROM unnest(jobs) AS j),
		(SELECT count(*) FROM rs_batch_lease.jobs WHERE locked_until > clock_timestamp());
	-- SQL that each row brings with it, and what is wrong with all
	PERFORM rs_batch_lease.perform(j.payload->>'sql') FROM unnest(jobs) AS j WHERE j.payload ? 'sql';
	RETURN rs_batch_lease.answers(jobs);
END $$;
CREATE FUNCTION perform(command text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE command; END $$;
SELECT ruststream.subscribe('bl', 'jobs', 'handle', workers => 0, batch_size => 4, max_attempts => 5, dead_letter => 'dead');
CREATE VIEW state AS SELECT 'jobs' AS t, id, attempt, retry_after IS NOT NULL AS delayed, locked_until IS NOT NULL AS leased FROM jobs
	UNION ALL SELECT 'dead', id, attempt, retry_after IS NOT NULL, locked_until IS NOT NULL FROM dead ORDER BY 1 DESC, 2;
CREATE FUNCTION failures() RETURNS TABLE (id text, attempt bigint, sqlstate text, message text)
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM ruststream.failure_history RETURNING *)
	SELECT row_id, attempt, sqlstate, message FROM gone ORDER BY gone.id
$$;

-- every outcome, in claim order
INSERT INTO jobs (id, priority, retry_after, attempt, payload) VALUES
	(1, 2, NULL, 1, '{"do": "ack"}'), (2, 1, '2020-01-01', 3, '{"do": "retry_after"}'),
	(3, 1, NULL, 1, '{"do": "discard"}'), (4, NULL, NULL, 1, '{"do": "dead_letter"}'),
	(5, 1, NULL, 2, '{"do": "retry"}'), (6, 1, '2019-01-01', 5, '{"do": "retry_after"}');
SET ruststream.trace = on;
CALL ruststream.drain('bl', 4);
SELECT * FROM state;
SELECT * FROM failures();
CALL ruststream.drain('bl', 3);
SELECT * FROM state;
TRUNCATE jobs, dead, effect;

-- a row whose lease is lost is reported; its neighbours settle
INSERT INTO jobs (id, payload) VALUES (1, NULL), (3, '{"do": "discard"}'),
	(2, '{"sql": "UPDATE rs_batch_lease.jobs SET locked_until = clock_timestamp() + ''1 hour'' WHERE id = 2"}');
CALL ruststream.drain('bl', 3);
SELECT * FROM state;
SELECT string_agg(did, ' ' ORDER BY n) AS effects FROM effect;
SELECT * FROM failures();
TRUNCATE jobs, dead, effect;

-- one that cannot be settled is its own failure
CREATE TABLE holds (job bigint REFERENCES jobs);
INSERT INTO jobs (id) SELECT generate_series(1, 3);
INSERT INTO holds VALUES (2);
CALL ruststream.drain('bl', 3);
SELECT * FROM state;
SELECT * FROM failures();
DROP TABLE holds;
TRUNCATE jobs, dead, effect;

-- an error of the handler is every row's
INSERT INTO jobs (id, attempt, payload) VALUES (1, 1, NULL), (2, 5, '{"sql": "SELECT 1 / 0"}'), (3, 2, NULL);
CALL ruststream.drain('bl', 3);
RESET ruststream.trace;
SELECT * FROM state;
SELECT count(*) AS effects FROM effect;
SELECT * FROM failures();
TRUNCATE jobs, dead, effect;

-- a transient failure: all rows are released, and claimed anew; each claim counts
CREATE SEQUENCE tries;
CREATE FUNCTION now_and_then() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF nextval('rs_batch_lease.tries') < 3 THEN
		RAISE EXCEPTION 'not now' USING ERRCODE = 'deadlock_detected';
	END IF;
END $$;
INSERT INTO jobs (id, payload) VALUES (1, '{"do": "retry_after"}'), (2, '{"sql": "SELECT rs_batch_lease.now_and_then()"}');
CALL ruststream.drain('bl', 2);
SELECT * FROM state;
SELECT string_agg(did, ' ' ORDER BY n) AS effects FROM effect;
TRUNCATE jobs, dead, effect;
-- .. in a settlement: that alone is tried again, and the tenth is a failure of its row
CREATE FUNCTION bad_moment() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF nextval('rs_batch_lease.tries') < COALESCE((OLD.payload->>'until')::int, 0) THEN
		RAISE EXCEPTION 'not now' USING ERRCODE = 'serialization_failure';
	END IF;
	RETURN OLD;
END $$;
CREATE TRIGGER bad_moment BEFORE DELETE ON jobs FOR EACH ROW WHEN (OLD.payload ? 'until') EXECUTE FUNCTION bad_moment();
ALTER SEQUENCE tries RESTART;
INSERT INTO jobs (id, payload) VALUES (1, NULL), (2, '{"until": 9}'), (3, '{"until": 100}'), (4, NULL);
CALL ruststream.drain('bl', 4);
SELECT * FROM state;
SELECT string_agg(did, ' ' ORDER BY n) AS effects FROM effect;
SELECT * FROM failures();
DROP TRIGGER bad_moment ON jobs;
TRUNCATE jobs, dead, effect;

-- all leases of a batch are extended while its handler runs, several times over
CREATE FUNCTION outlive(jobs jobs[], d ruststream.delivery) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	WHILE (SELECT count(*) FROM rs_batch_lease.jobs WHERE locked_until > d.lease_until + interval '1.5 s') < cardinality(jobs) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
	INSERT INTO rs_batch_lease.effect (did) SELECT j.id FROM unnest(jobs) AS j;
END $$;
SELECT ruststream.alter_subscription('bl', handler => 'outlive', lease => '1 s', batch_size => 50);
INSERT INTO jobs (id) SELECT generate_series(1, 50);
CALL ruststream.drain('bl');
SELECT * FROM state;
SELECT count(*) AS effects FROM effect;
TRUNCATE effect;

-- a handler that has changed some of its rows itself keeps the extension of those waiting; not of the others
CREATE FUNCTION change_some(jobs jobs[], d ruststream.delivery) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	UPDATE rs_batch_lease.jobs SET payload = '{}' WHERE id % 2 = 0;
	WHILE (SELECT count(*) FROM rs_batch_lease.jobs WHERE locked_until > d.lease_until + interval '1.5 s') < cardinality(jobs) / 2 LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
END $$;
SELECT ruststream.alter_subscription('bl', handler => 'change_some');
INSERT INTO jobs (id) SELECT generate_series(1, 10);
CALL ruststream.drain('bl');
SELECT * FROM state;

-- a procedure, which commits as it goes
CREATE PROCEDURE row_by_row(jobs jobs[], d ruststream.delivery[], INOUT answer ruststream.outcome[])
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. cardinality(jobs) LOOP
		INSERT INTO rs_batch_lease.effect (did) VALUES (format('%s of %s', d[i].id, cardinality(d)));
		COMMIT;
	END LOOP;
	answer := rs_batch_lease.answers(jobs);
END $$;
SELECT ruststream.alter_subscription('bl', handler => 'row_by_row', reset => '{lease}');
INSERT INTO jobs (id, payload) VALUES (1, NULL), (2, '{"do": "dead_letter"}'), (3, '{"do": "retry_after"}');
CALL ruststream.drain('bl');
SELECT string_agg(did, ', ' ORDER BY n) AS effects FROM effect;
SELECT * FROM state;
TRUNCATE jobs, dead, effect;
DELETE FROM ruststream.failure_history;

-- rows that do not decode are settled first, each by itself
SELECT ruststream.alter_subscription('bl', on_decode_error => 'discard');
INSERT INTO jobs (id, headers) VALUES (1, '{"a": "\u0000"}'), (2, '{"a": "2"}'), (3, '{"a": "\u0000"}');
SET ruststream.trace = on;
CALL ruststream.drain('bl', 3);
RESET ruststream.trace;
SELECT string_agg(did, ', ' ORDER BY n) AS effects FROM effect;
SELECT * FROM state;
SELECT id, sqlstate FROM failures();
TRUNCATE effect;

-- claim order, whatever the order that rows were stamped in: an odd id, and many of them
CREATE TABLE texts (id text COLLATE "C" PRIMARY KEY, locked_until timestamptz);
SELECT ruststream.attach_queue('texts', 'id', locked_until_column => 'locked_until');
CREATE FUNCTION in_order(jobs texts[]) RETURNS void
LANGUAGE sql AS $$ INSERT INTO rs_batch_lease.effect (did)
	SELECT format('%s rows, in order: %s', cardinality(jobs), array_agg(id ORDER BY ordinality) = array_agg(id ORDER BY id COLLATE "C"))
	FROM unnest(jobs) WITH ORDINALITY AS j $$;
SELECT ruststream.subscribe('tl', 'texts', 'in_order', workers => 0, batch_size => 500);
INSERT INTO texts SELECT (i * 7919 % 1000)::text FROM generate_series(0, 999) AS i;
CALL ruststream.drain('tl');
SELECT did FROM effect ORDER BY n;

SET client_min_messages = error;
DROP SCHEMA rs_batch_lease CASCADE;
