-- Handlers that are procedures and COMMIT as they go: by drain, in a session
-- that is somebody else's.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE regress_ruststream_other;
RESET client_min_messages;

CREATE SCHEMA rs_procedures;
SET search_path = rs_procedures;
GRANT USAGE ON SCHEMA rs_procedures TO regress_ruststream_other;

CREATE TABLE keyed (id bigint PRIMARY KEY, attempt int NOT NULL DEFAULT 1, retry_after timestamptz, payload jsonb NOT NULL DEFAULT '{}');
CREATE INDEX ON keyed (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('keyed', 'id', attempt_column => 'attempt', retry_after_column => 'retry_after',
	payload_column => 'payload', lock_key => 'keyed-{id}');
CREATE TABLE ran (id text, attempt int, what text, work_mem text DEFAULT current_setting('work_mem'), role name DEFAULT current_user);
GRANT ALL ON ran TO regress_ruststream_other;

CREATE PROCEDURE in_steps(job jsonb, d ruststream.delivery) LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	INSERT INTO rs_procedures.ran VALUES (d.id, ruststream.attempt(), 'first');
	SET work_mem = '7MB';
	SET rs_procedures.own = 'left behind';
	SET search_path = pg_catalog;
	SET ROLE regress_ruststream_other;
	PREPARE left_behind AS SELECT 1;
	PERFORM pg_advisory_lock(9);
	COMMIT;
	INSERT INTO rs_procedures.ran VALUES (d.id, (ruststream.delivery()).attempt, 'second');
	-- an open cursor at the time of an error
	FOR r IN SELECT * FROM generate_series(1, 3) LOOP
		IF job ? 'fail' AND d.attempt < 3 THEN
			RAISE EXCEPTION 'not yet';
		END IF;
	END LOOP;
	ROLLBACK;
	INSERT INTO rs_procedures.ran VALUES (d.id, d.attempt, 'third');
	PERFORM 1 / (job->>'divisor')::int;
END $$;
SELECT ruststream.subscribe('in steps', 'keyed', 'in_steps', workers => 0, transactional => false, retry_delay => '0');

-- what the caller has stays as it was, and nothing of the procedure's is left
SET work_mem = '5MB';
SET rs_procedures.mine = 'mine';
SELECT pg_advisory_lock(10);
BEGIN;
DECLARE held CURSOR WITH HOLD FOR SELECT 42 AS answer;
COMMIT;
INSERT INTO keyed (id, payload) VALUES (1, '{}'), (2, '{"fail": true}'), (3, '{}');
SET ruststream.trace = on;
CALL ruststream.drain('in steps');
RESET ruststream.trace;
SELECT * FROM ran ORDER BY id, attempt, what;
SELECT count(*) FROM keyed;
SHOW work_mem;
SHOW search_path;
SELECT current_user = session_user AS same, current_setting('rs_procedures.own') AS own, current_setting('rs_procedures.mine') AS mine;
FETCH held;
SELECT classid, objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT pg_advisory_unlock(10);
SELECT count(*) FROM pg_prepared_statements;
SELECT attempt, message FROM ruststream.failure WHERE subscription = 'in steps';
CLOSE held;

-- an error after its last COMMIT, and its outcome
INSERT INTO keyed (id, payload) VALUES (4, '{"divisor": 0}');
SELECT ruststream.alter_subscription('in steps', retry_delay => '1 h');
CALL ruststream.drain('in steps');
SELECT attempt, retry_after > now() + '40 min' AS delayed FROM keyed;
DELETE FROM keyed;
CREATE PROCEDURE answers(job keyed, OUT answer ruststream.outcome) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ran VALUES (job.id, job.attempt, 'answered');
	COMMIT;
	answer := CASE WHEN job.payload ? 'null' THEN NULL ELSE ruststream.retry_after('2 h', 'later') END;
END $$;
SELECT ruststream.alter_subscription('in steps', handler => 'answers');
INSERT INTO keyed (id, payload) VALUES (5, '{}'), (6, '{"null": true}');
CALL ruststream.drain('in steps');
SELECT id, attempt, retry_after > now() + '90 min' AS answered FROM keyed ORDER BY id;
SELECT * FROM ran WHERE what = 'answered' ORDER BY id;

-- one that drops its key
DELETE FROM keyed;
CREATE PROCEDURE drops(job jsonb) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_unlock_all(); COMMIT; END $$;
SELECT ruststream.alter_subscription('in steps', handler => 'drops');
INSERT INTO keyed (id) VALUES (7);
CALL ruststream.drain('in steps', 1);
SELECT id, attempt FROM keyed;

-- memory of the connections that failures have ended does not pile up
DELETE FROM keyed;
CREATE TABLE spi_context (id int, count int);
CREATE PROCEDURE counts(job keyed) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO spi_context SELECT job.id, count(*) FROM pg_backend_memory_contexts WHERE name IN ('SPI Proc', 'SPI Exec');
	COMMIT;
	RAISE EXCEPTION 'no';
END $$;
SELECT ruststream.alter_subscription('in steps', handler => 'counts', on_error => 'discard');
INSERT INTO keyed (id) SELECT generate_series(8, 20);
SET client_min_messages = error;
CALL ruststream.drain('in steps');
RESET client_min_messages;
SELECT count(*), count(DISTINCT count) FROM spi_context;

-- not from within another: a failure would take its connection, too
DO $$ BEGIN CALL ruststream.drain('in steps'); END $$;
-- not where it could not keep its promise
\set VERBOSITY default
SELECT ruststream.alter_subscription('in steps', transactional => true);
\set VERBOSITY terse
SELECT ruststream.create_queue('row_locks');
SELECT ruststream.subscribe('row locks', 'row_locks', 'drops', transactional => false);
CREATE PROCEDURE gives_two(job jsonb, OUT a int, OUT b int) LANGUAGE sql AS 'SELECT 1, 2';
SELECT ruststream.subscribe('gives two', 'keyed', 'gives_two', transactional => false);

SET client_min_messages = error;
DROP SCHEMA rs_procedures CASCADE;
DROP ROLE regress_ruststream_other;
