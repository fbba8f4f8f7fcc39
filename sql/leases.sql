-- Several leases in one claim: each row is then delivered as if it had been claimed
-- alone, and what is not begun in time is let go as if it had not been claimed.  Where the
-- library is not preloaded a drain is refused (leases_1.out).
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_leases;
SET search_path = rs_leases;

CREATE TABLE jobs (id bigint PRIMARY KEY, priority int, retry_after timestamptz, attempt int NOT NULL DEFAULT 1,
	headers json, payload jsonb, locked_until timestamptz);
CREATE INDEX ON jobs (priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', headers_column => 'headers', payload_column => 'payload', locked_until_column => 'locked_until');
CREATE TABLE dead (LIKE jobs);
CREATE TABLE effect (n serial, id bigint);

-- Says what it is given and what is leased meanwhile, does what its task asks for, and answers.
CREATE FUNCTION handle(job jobs, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
DECLARE
	leased text := (SELECT string_agg(j.id || ' at ' || j.attempt, ', ' ORDER BY j.id) FROM rs_leases.jobs AS j
		WHERE j.locked_until > clock_timestamp());
BEGIN
	RAISE NOTICE 'the handler has %, attempt % (%), free: %, leased: %', job.id, d.attempt, job.attempt,
		job.locked_until IS NULL, leased;
	INSERT INTO rs_leases.effect (id) VALUES (job.id);
	IF job.payload ? 'sql' THEN
		EXECUTE job.payload->>'sql';
	END IF;
	RETURN CASE job.payload->>'do'
			WHEN 'retry' THEN CASE WHEN d.attempt < 3 THEN ruststream.retry() ELSE ruststream.ack() END
			WHEN 'retry_after' THEN ruststream.retry_after('1 hour')
			WHEN 'discard' THEN ruststream.discard('of no use')
			WHEN 'dead_letter' THEN ruststream.dead_letter('beyond help')
			ELSE ruststream.ack() END;
END $$;
SELECT ruststream.subscribe('l', 'jobs', 'handle', workers => 0, dead_letter => 'dead', deliveries_per_commit => 4,
	max_commit_wait => '60 s', retry_delay => '1 hour');
CREATE VIEW state AS SELECT 'jobs' AS t, id, attempt, retry_after IS NOT NULL AS delayed, locked_until IS NOT NULL AS leased FROM jobs
	UNION ALL SELECT 'dead', id, attempt, retry_after IS NOT NULL, locked_until IS NOT NULL FROM dead ORDER BY 1 DESC, 2;
CREATE FUNCTION failures() RETURNS TABLE (id text, attempt bigint, sqlstate text, message text)
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM ruststream.failure_history RETURNING *)
	SELECT row_id, attempt, sqlstate, message FROM gone ORDER BY gone.id
$$;
CREATE FUNCTION effects() RETURNS text LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM rs_leases.effect RETURNING *) SELECT string_agg(gone.id::text, ' ' ORDER BY n) FROM gone
$$;

-- a crash counts attempts of rows that no handler has seen: no cap on them, in whatever order it is asked for
SELECT ruststream.alter_subscription('l', max_attempts => 5);
SELECT ruststream.alter_subscription('l', max_attempts => 5, deliveries_per_commit => 1);
SELECT ruststream.alter_subscription('l', deliveries_per_commit => 4);
SELECT ruststream.alter_subscription('l', deliveries_per_commit => 4, reset => '{max_attempts}');

-- one claim, and each delivery by itself; as many as are asked for, and no other row is touched
INSERT INTO jobs (id, payload) SELECT i, '{}' FROM generate_series(1, 6) AS i;
SET ruststream.trace = on;
CALL ruststream.drain('l', 3);
RESET ruststream.trace;
SELECT * FROM state;
CALL ruststream.drain('l');
SELECT effects(), (SELECT count(*) FROM jobs);

-- every outcome, in claim order
INSERT INTO jobs (id, priority, retry_after, attempt, payload) VALUES
	(1, 2, NULL, 1, '{"do": "ack"}'), (2, 1, '2020-01-01', 3, '{"do": "retry_after"}'),
	(3, 1, NULL, 1, '{"do": "discard"}'), (4, NULL, NULL, 1, '{"do": "dead_letter"}'),
	(5, 1, NULL, 2, '{"sql": "SELECT 1/0"}');
SET ruststream.trace = on;
CALL ruststream.drain('l', 5);
RESET ruststream.trace;
SELECT * FROM state;
SELECT effects();
SELECT * FROM failures();
TRUNCATE jobs, dead;

-- a row that comes back at once is the next one; it is claimed alone from then on
INSERT INTO jobs (id, payload) VALUES (1, '{}'), (2, '{"do": "retry"}'), (3, '{}'), (4, '{}'), (5, '{}');
SET ruststream.trace = on;
CALL ruststream.drain('l');
RESET ruststream.trace;
SELECT effects(), (SELECT count(*) FROM jobs);

-- a handler that takes longer than the rest is to wait for it: what follows is let go, as it was
SELECT ruststream.alter_subscription('l', max_commit_wait => '250 ms');
INSERT INTO jobs (id, payload) VALUES (1, '{}'), (2, '{"sql": "SELECT pg_sleep(2.1)"}'), (3, '{}'), (4, '{}');
SET ruststream.trace = on;
CALL ruststream.drain('l');
RESET ruststream.trace;
SELECT effects(), (SELECT count(*) FROM jobs);

-- no sharing
SELECT ruststream.alter_subscription('l', max_commit_wait => '0');
INSERT INTO jobs (id, payload) SELECT i, '{}' FROM generate_series(1, 2) AS i;
CALL ruststream.drain('l');
SELECT effects();
SELECT ruststream.alter_subscription('l', max_commit_wait => '60 s');

-- what a handler does to the rows behind it is seen by their deliveries: changed, ended, delayed
INSERT INTO jobs (id, payload) VALUES (1, jsonb_build_object('sql',
	$$UPDATE rs_leases.jobs SET payload = '{"do": "discard", "sql": "INSERT INTO rs_leases.effect (id) VALUES (1002)"}' WHERE id = 2$$)),
	(2, '{}'), (3, '{}'), (4, '{}');
UPDATE jobs SET payload = jsonb_build_object('sql',
	$$DELETE FROM rs_leases.jobs WHERE id = 4$$) WHERE id = 3;
CALL ruststream.drain('l');
SELECT effects(), (SELECT count(*) FROM jobs);
SELECT * FROM failures();
INSERT INTO jobs (id, payload) VALUES (1, jsonb_build_object('sql',
	$$UPDATE rs_leases.jobs SET retry_after = 'infinity' WHERE id = 2$$)), (2, '{}'), (3, '{}');
CALL ruststream.drain('l');
SELECT effects();
SELECT * FROM state;
TRUNCATE jobs;

-- a lease that is lost concerns its row alone
SELECT ruststream.alter_subscription('l', retry_delay => '1 ms');
INSERT INTO jobs (id, payload) VALUES (1, jsonb_build_object('sql',
	$$UPDATE rs_leases.jobs SET locked_until = clock_timestamp() + '1 hour' WHERE id = 2$$)), (2, '{}'), (3, '{}');
CALL ruststream.drain('l');
SELECT ruststream.alter_subscription('l', retry_delay => '1 hour');
SELECT effects();
SELECT * FROM state;
SELECT * FROM failures();
TRUNCATE jobs;

-- what takes effect before the next delivery: another handler, a pause, and another table
CREATE FUNCTION other(job jobs) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'the other handler has %', job.id;
END $$;
INSERT INTO jobs (id, payload) VALUES (1, '{"sql": "SELECT ruststream.alter_subscription(''l'', handler => ''rs_leases.other'')"}'), (2, '{}'), (3, '{}');
CALL ruststream.drain('l');
SELECT ruststream.alter_subscription('l', handler => 'handle');
INSERT INTO jobs (id, payload) VALUES (1, '{"sql": "SELECT ruststream.pause(''l'')"}'), (2, '{}'), (3, '{}');
CALL ruststream.drain('l');
SELECT * FROM state;
SELECT ruststream.resume('l');
CALL ruststream.drain('l');
SELECT effects();

-- a transient failure: its neighbours are let go, and it is claimed alone
CREATE SEQUENCE tries;
CREATE FUNCTION fail_twice() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF nextval('rs_leases.tries') < 3 THEN
		RAISE SQLSTATE '40001' USING MESSAGE = 'once more';
	END IF;
END $$;
INSERT INTO jobs (id, payload) VALUES (1, '{}'), (2, '{"sql": "SELECT rs_leases.fail_twice()"}'), (3, '{}'), (4, '{}');
SET ruststream.trace = on;
CALL ruststream.drain('l');
RESET ruststream.trace;
SELECT effects(), (SELECT count(*) FROM jobs);

-- a settlement that fails is settled afresh, and its neighbours are claimed again
CREATE TABLE keeps (job bigint REFERENCES jobs);
INSERT INTO jobs (id, payload) VALUES (1, '{}'), (2, '{}'), (3, '{}');
INSERT INTO keeps VALUES (2);
CALL ruststream.drain('l');
SELECT effects();
SELECT * FROM state;
SELECT * FROM failures();
DROP TABLE keeps;
TRUNCATE jobs;

-- a cancel of the session lets go of what is not begun
SET statement_timeout = '2 s';
INSERT INTO jobs (id, payload) VALUES (1, '{}'), (2, '{"sql": "SELECT pg_sleep(60)"}'), (3, '{}'), (4, '{}');
CALL ruststream.drain('l');
RESET statement_timeout;
SELECT * FROM state;
TRUNCATE jobs, effect;

-- not transactional, and procedures
CREATE PROCEDURE proceed(job jobs) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_leases.effect (id) VALUES (job.id);
	COMMIT;
	IF job.id = 2 THEN
		RAISE EXCEPTION 'not this one';
	END IF;
	INSERT INTO rs_leases.effect (id) VALUES (job.id);
END $$;
SELECT ruststream.alter_subscription('l', handler => 'proceed', transactional => false);
INSERT INTO jobs (id, payload) SELECT i, '{}' FROM generate_series(1, 3) AS i;
SET ruststream.trace = on;
CALL ruststream.drain('l');
RESET ruststream.trace;
SELECT effects();
SELECT * FROM state;
SELECT * FROM failures();
TRUNCATE jobs;

-- a table that counts nothing and takes the payload alone
CREATE TABLE bare (id text PRIMARY KEY, payload text, locked_until timestamptz);
SELECT ruststream.attach_queue('bare', 'id', payload_column => 'payload', locked_until_column => 'locked_until');
CREATE FUNCTION handle_text(task text) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'the handler has %, leased: %', task, (SELECT count(*) FROM rs_leases.bare WHERE locked_until > clock_timestamp());
	IF task = 'slow' THEN
		PERFORM pg_sleep(0.1);
		UPDATE rs_leases.bare SET payload = 'changed' WHERE id = 'c';
	END IF;
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('bare', 'bare', 'handle_text', workers => 0, deliveries_per_commit => 10, max_commit_wait => '1 ms');
INSERT INTO bare VALUES ('a', 'slow'), ('b', 'b'), ('c', 'c');
CALL ruststream.drain('bare', 2);
SELECT * FROM bare;
CALL ruststream.drain('bare');

-- lines: one row of each
CREATE TABLE lines (id bigint PRIMARY KEY, grp text NOT NULL, payload text, locked_until timestamptz);
CREATE INDEX ON lines (grp, id);
CREATE INDEX ON lines (grp, locked_until) WHERE locked_until IS NOT NULL;
SELECT ruststream.attach_queue('lines', 'id', group_column => 'grp', payload_column => 'payload', locked_until_column => 'locked_until', fifo => true);
CREATE FUNCTION handle_line(task text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'the handler has %, leased: %', task, (SELECT string_agg(payload, ' ' ORDER BY id) FROM rs_leases.lines WHERE locked_until > clock_timestamp());
END $$;
SELECT ruststream.subscribe('lines', 'lines', 'handle_line', group_name => '*', workers => 0, deliveries_per_commit => 10, max_commit_wait => '60 s');
INSERT INTO lines SELECT i, chr(97 + i % 3), chr(97 + i % 3) || i FROM generate_series(1, 6) AS i;
CALL ruststream.drain('lines');
SELECT count(*) FROM lines;

SET client_min_messages = warning;
DROP SCHEMA rs_leases CASCADE;
