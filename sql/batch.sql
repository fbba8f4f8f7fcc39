-- Batches in the row lock form: one claim, one call of the handler, one commit.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_batch;
SET search_path = rs_batch;

-- what a batch handler may look like ---------------------------------------------------

CREATE TABLE jobs (id bigint PRIMARY KEY, priority int, retry_after timestamptz, attempt int NOT NULL DEFAULT 1,
	headers jsonb, payload jsonb);
CREATE INDEX ON jobs (priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', headers_column => 'headers', payload_column => 'payload');
CREATE TABLE dead (LIKE jobs);
CREATE TABLE effect (n serial, did text);

CREATE FUNCTION one(jobs) RETURNS ruststream.outcome LANGUAGE sql AS $$ SELECT ruststream.ack() $$;
CREATE FUNCTION many(jobs[]) RETURNS ruststream.outcome LANGUAGE sql AS $$ SELECT ruststream.ack() $$;
CREATE FUNCTION each(jobs[]) RETURNS ruststream.outcome[] LANGUAGE sql AS $$ SELECT array_fill(ruststream.ack(), ARRAY[cardinality($1)]) $$;
CREATE FUNCTION payloads(jsonb[]) RETURNS ruststream.outcome LANGUAGE sql AS $$ SELECT ruststream.ack() $$;
CREATE FUNCTION texts(jobs[]) RETURNS text[] LANGUAGE sql AS $$ SELECT ARRAY['ack'] $$;
CREATE FUNCTION second(jobs[], text) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION told(jobs[], ruststream.delivery) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION either(jobs) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION either(jobs[]) RETURNS void LANGUAGE sql AS '';
CREATE PROCEDURE proc(jobs[]) LANGUAGE sql AS '';
CREATE FUNCTION single_of_many(jobs) RETURNS ruststream.outcome[] LANGUAGE sql AS $$ SELECT ARRAY[ruststream.ack()] $$;

-- what an attempt is answered: SQLSTATE, message, detail, hint
CREATE FUNCTION answer(call text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	state text; message text; detail text; hint text;
BEGIN
	EXECUTE 'SELECT ' || call;
	RETURN 'accepted';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN format(E'%s %s\n-> %s\n-> %s', state, message, detail, hint);
END $$;
CREATE FUNCTION subscribing(arguments text) RETURNS text
LANGUAGE sql AS $$ SELECT rs_batch.answer('ruststream.subscribe(''x'', ''jobs'', ' || arguments || ', workers => 0)') $$;

\pset format unaligned
\pset tuples_only on
SELECT arguments || ': ' || subscribing(arguments) FROM unnest(ARRAY[
	$$'many'$$,
	$$'each'$$,
	$$'one', batch_size => 10$$,
	$$'payloads', batch_size => 10$$,
	$$'texts', batch_size => 10$$,
	$$'second', batch_size => 10$$,
	$$'single_of_many'$$,
	$$'proc', batch_size => 10$$,
	$$'many', batch_size => 0$$,
	$$'many', batch_size => 10001$$,
	$$'many', batch_size => 10, transactional => true$$,
	$$'many', batch_size => 10, deliveries_per_commit => 5$$,
	-- and what is accepted
	$$'many', batch_size => 10, transactional => false$$,
	$$'told', batch_size => 1$$,
	$$'either'$$,
	$$'either', batch_size => 10000$$]) AS arguments;
-- the mode and the handler are checked whatever changes
SELECT call || ': ' || answer('ruststream.alter_subscription(''x'', ' || call || ')') FROM unnest(ARRAY[
	$$transactional => true$$,
	$$deliveries_per_commit => 2$$,
	$$reset => '{batch_size}'$$,
	$$handler => 'one'$$,
	$$handler => 'one', reset => '{batch_size}'$$,
	$$batch_size => 10$$,
	$$transactional => true$$,
	$$handler => 'many', batch_size => 10$$,
	$$handler => 'many', batch_size => 10, reset => '{transactional}'$$]) AS call;
\pset format aligned
\pset tuples_only off
SELECT ruststream.unsubscribe('x');

-- one claim, in claim order, one outcome for each row ----------------------------------

-- does as the payloads say
CREATE FUNCTION handle(jobs jobs[], d ruststream.delivery[]) RETURNS ruststream.outcome[]
LANGUAGE plpgsql AS $$
DECLARE
	answers ruststream.outcome[];
BEGIN
	INSERT INTO rs_batch.effect (did) SELECT format('%s: attempt %s, %s', j.id, t.attempt, t.headers)
		FROM unnest(jobs) WITH ORDINALITY AS j JOIN unnest(d) WITH ORDINALITY AS t USING (ordinality) ORDER BY ordinality;
	RAISE NOTICE 'the handler has %; attempt %, delivery of %', (SELECT string_agg(j.id::text, ' ') FROM unnest(jobs) AS j),
		ruststream.attempt(), (ruststream.delivery()).id;
	SELECT array_agg(CASE j.payload->>'do'
			WHEN 'retry' THEN ruststream.retry()
			WHEN 'retry_after' THEN ruststream.retry_after('1 hour')
			WHEN 'discard' THEN ruststream.discard('of no use')
			WHEN 'dead_letter' THEN ruststream.dead_letter('beyond help')
			WHEN 'null' THEN NULL
			ELSE ruststream.ack() END ORDER BY ordinality)
		INTO answers FROM unnest(jobs) WITH ORDINALITY AS j;
	CASE jobs[1].payload->>'batch'
		WHEN 'error' THEN RAISE EXCEPTION 'no good' USING ERRCODE = 'RS001';
		WHEN 'short' THEN RETURN answers[2:];
		WHEN 'long' THEN RETURN answers || ruststream.ack();
		WHEN 'empty' THEN RETURN '{}';
		WHEN 'null' THEN RETURN NULL;
		WHEN 'matrix' THEN RETURN ARRAY[answers];
		WHEN 'shifted' THEN RETURN ('[0:1]=' || answers[1:2]::text)::ruststream.outcome[];
		WHEN 'deferred' THEN INSERT INTO rs_batch.deferred VALUES (1);
		ELSE NULL;
	END CASE;
	RETURN answers;
END $$;
CREATE TABLE deferred (i int UNIQUE, other int DEFAULT 7 REFERENCES deferred (i) DEFERRABLE INITIALLY DEFERRED);
SELECT ruststream.subscribe('s', 'jobs', 'handle', workers => 0, batch_size => 4, max_attempts => 5, dead_letter => 'dead');

CREATE VIEW state AS SELECT 'jobs' AS t, id, attempt, retry_after IS NOT NULL AS delayed, payload FROM jobs
	UNION ALL SELECT 'dead', id, attempt, retry_after IS NOT NULL, payload FROM dead ORDER BY 1 DESC, 2;
CREATE FUNCTION failures() RETURNS TABLE (id text, attempt bigint, sqlstate text, message text, hint text)
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM ruststream.failure_history RETURNING *)
	SELECT row_id, attempt, sqlstate, message, hint FROM gone ORDER BY gone.id
$$;

INSERT INTO jobs (id, priority, retry_after, attempt, headers, payload) VALUES
	(1, 2, NULL, 1, NULL, '{"do": "ack"}'), (2, 1, '2020-01-01', 3, '{"n": "2"}', '{"do": "retry_after"}'),
	(3, 1, NULL, 1, NULL, '{"do": "discard"}'), (4, NULL, NULL, 1, NULL, '{"do": "dead_letter"}'),
	(5, 1, NULL, 2, NULL, '{"do": "ack"}'), (6, 1, '2019-01-01', 5, NULL, '{"do": "retry_after"}');
SET ruststream.trace = on;
CALL ruststream.drain('s', 4);
SELECT * FROM state;
SELECT did FROM effect ORDER BY n;
SELECT * FROM failures();
-- no more than are due; the two that are left
CALL ruststream.drain('s');
SELECT * FROM state;
SELECT * FROM failures();

-- max_deliveries counts rows, and no more are claimed
TRUNCATE jobs, dead, effect;
INSERT INTO jobs (id) SELECT generate_series(1, 7);
CALL ruststream.drain('s', 2);
CALL ruststream.drain('s', 0);
CALL ruststream.drain('s', 5);
RESET ruststream.trace;
SELECT count(*) FROM jobs;

-- retry: due at once, in the next batch
INSERT INTO jobs (id, payload) VALUES (1, '{"do": "ack"}'), (2, '{"do": "retry"}'), (3, '{"do": "ack"}');
CALL ruststream.drain('s', 4);
SELECT * FROM state;
CALL ruststream.drain('s');
SELECT * FROM state;
TRUNCATE jobs, dead, effect;

-- what is a failure of the batch ---------------------------------------------------------

CREATE PROCEDURE fail(how text)
LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE jobs, dead, effect;
	INSERT INTO jobs (id, attempt, payload) VALUES (1, 1, jsonb_build_object('batch', how)), (2, 5, NULL), (3, 2, '{}');
	COMMIT;
	CALL ruststream.drain('s', 3);
END $$;
SET ruststream.trace = on;
CALL fail('error');
RESET ruststream.trace;
-- each row by its policy: the second was at its last attempt; nothing that was written is left
SELECT * FROM state;
SELECT count(*) AS effects FROM effect;
SELECT * FROM failures();
SET client_min_messages = error;
CALL fail('short');
SELECT * FROM failures();
CALL fail('long');
SELECT * FROM failures();
CALL fail('empty');
SELECT * FROM failures();
CALL fail('null');
SELECT * FROM failures();
CALL fail('matrix');
SELECT * FROM failures();
CALL fail('deferred');
SELECT * FROM failures();
SELECT * FROM state;
TRUNCATE jobs, dead, effect;
INSERT INTO jobs (id, payload) VALUES (1, NULL), (2, '{"do": "null"}');
CALL ruststream.drain('s', 2);
SELECT * FROM failures();
-- bounds of an array say nothing
TRUNCATE jobs, dead, effect;
INSERT INTO jobs (id, payload) VALUES (1, '{"batch": "shifted"}'), (2, '{"do": "discard"}');
CALL ruststream.drain('s', 2);
SELECT * FROM failures();
SELECT * FROM state;
RESET client_min_messages;

-- one outcome for all, and void -----------------------------------------------------------

CREATE FUNCTION all_later(jobs jobs[], d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_batch.effect (did) VALUES (format('%s rows from %s on, %s', cardinality(jobs), d.id, d.queue));
	RETURN CASE jobs[1].payload->>'do' WHEN 'later' THEN ruststream.retry_after('1 hour', 'not today') WHEN 'null' THEN NULL
		ELSE ruststream.ack() END;
END $$;
SELECT ruststream.alter_subscription('s', handler => 'all_later');
INSERT INTO jobs (id, payload) VALUES (1, '{"do": "later"}'), (2, NULL), (3, NULL);
CALL ruststream.drain('s');
-- what a batch handler has written is kept
SELECT did FROM effect;
SELECT * FROM state;
SELECT * FROM failures();
TRUNCATE jobs, effect;
INSERT INTO jobs (id, payload) VALUES (1, '{"do": "null"}'), (2, NULL);
SET client_min_messages = error;
CALL ruststream.drain('s');
RESET client_min_messages;
SELECT did FROM effect;
SELECT * FROM state;
SELECT * FROM failures();
TRUNCATE jobs;
CREATE FUNCTION nothing_to_say(jobs jobs[]) RETURNS void
LANGUAGE sql AS $$ INSERT INTO rs_batch.effect (did) SELECT j.id FROM unnest(jobs) AS j $$;
SELECT ruststream.alter_subscription('s', handler => 'nothing_to_say');
INSERT INTO jobs (id) SELECT generate_series(1, 5);
CALL ruststream.drain('s');
SELECT string_agg(did, ' ' ORDER BY n) FROM effect;
SELECT * FROM state;
TRUNCATE effect;

-- a row that cannot be settled -------------------------------------------------------------

-- 3 and 6 are held by a foreign key
CREATE TABLE holds (job bigint REFERENCES jobs);
CREATE FUNCTION count_calls(jobs jobs[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_batch.effect (did) SELECT j.id FROM unnest(jobs) AS j;
	RAISE NOTICE 'the handler has %', (SELECT string_agg(j.id::text, ' ') FROM unnest(jobs) AS j);
END $$;
SELECT ruststream.alter_subscription('s', handler => 'count_calls', batch_size => 8);
INSERT INTO jobs (id) SELECT generate_series(1, 9);
INSERT INTO holds VALUES (3), (6);
SET ruststream.trace = on;
CALL ruststream.drain('s');
RESET ruststream.trace;
-- each of its neighbours has ended, exactly once; the two come back, counted
SELECT string_agg(did, ' ' ORDER BY did) FROM effect;
SELECT * FROM state;
SELECT * FROM failures();
-- at the cap they move, once nothing holds them
UPDATE jobs SET attempt = 5, retry_after = NULL;
SET client_min_messages = error;
CALL ruststream.drain('s');
RESET client_min_messages;
SELECT * FROM state;
TRUNCATE holds, effect;
UPDATE jobs SET retry_after = NULL;
CALL ruststream.drain('s');
SELECT * FROM state;
SELECT count(*) FROM failures();
DROP TABLE holds;
TRUNCATE jobs, dead, effect;

-- all of them are
CREATE TABLE holds (job bigint REFERENCES jobs);
INSERT INTO jobs (id) SELECT generate_series(1, 40);
INSERT INTO holds SELECT generate_series(1, 40);
SET client_min_messages = error;
SELECT ruststream.alter_subscription('s', batch_size => 40);
CALL ruststream.drain('s');
RESET client_min_messages;
SELECT count(*), min(attempt), max(attempt), count(retry_after) AS delayed FROM jobs;
SELECT count(*) AS failures, count(DISTINCT id) AS rows FROM failures();
DROP TABLE holds;
TRUNCATE jobs, dead, effect;

-- a constraint that is deferred to the commit is the row's all the same
CREATE FUNCTION refuse_to_end() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'row % stays', OLD.id; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER DELETE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
	WHEN (OLD.id = 2) EXECUTE FUNCTION refuse_to_end();
INSERT INTO jobs (id) SELECT generate_series(1, 3);
CALL ruststream.drain('s');
SELECT * FROM state;
SELECT * FROM failures();
DROP TRIGGER refuse ON jobs;
TRUNCATE jobs, dead, effect;

-- a transient failure in the middle: all of the batch, anew -----------------------------

CREATE SEQUENCE tries;
CREATE FUNCTION transient(jobs jobs[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_batch.effect (did) SELECT j.id FROM unnest(jobs) AS j;
	IF nextval('rs_batch.tries') % 20 IN (1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13) THEN
		RAISE EXCEPTION 'not now' USING ERRCODE = 'serialization_failure';
	END IF;
END $$;
SELECT ruststream.alter_subscription('s', handler => 'transient');
INSERT INTO jobs (id) SELECT generate_series(1, 3);
CALL ruststream.drain('s');
SELECT string_agg(did, ' ' ORDER BY n) FROM effect;
SELECT * FROM state;
-- the tenth in a row is a failure like any other
INSERT INTO jobs (id) SELECT generate_series(1, 3);
CALL ruststream.drain('s');
SELECT * FROM state;
SELECT id, attempt, sqlstate, message FROM failures();
TRUNCATE jobs, dead, effect;

-- rows that do not decode ----------------------------------------------------------------

CREATE TABLE told (id bigint PRIMARY KEY, headers json, attempt int);
SELECT ruststream.attach_queue('told', 'id', headers_column => 'headers', attempt_column => 'attempt');
CREATE FUNCTION headers(jobs told[], d ruststream.delivery[]) RETURNS void
LANGUAGE sql AS $$ INSERT INTO rs_batch.effect (did) SELECT format('%s %s', t.id, t.headers) FROM unnest(d) AS t $$;
SELECT ruststream.subscribe('t', 'told', 'headers', workers => 0, batch_size => 3, on_decode_error => 'discard');
INSERT INTO told (id, headers) VALUES (1, '{"a": "\u0000"}'), (2, '{"a": "2"}'), (3, '{"a": "\u0000"}'), (4, NULL), (5, '{"a": "\u0000"}');
SET ruststream.trace = on;
CALL ruststream.drain('t');
RESET ruststream.trace;
SELECT string_agg(did, ', ' ORDER BY n) FROM effect;
SELECT count(*) FROM told;
SELECT id, sqlstate FROM failures();
TRUNCATE effect;

-- groups: a batch is of one, and its dead letters go to another -------------------------

CREATE TABLE grouped (id bigint PRIMARY KEY, grp text NOT NULL, attempt int DEFAULT 1, payload jsonb);
CREATE INDEX ON grouped (grp, id);
SELECT ruststream.attach_queue('grouped', 'id', group_column => 'grp', attempt_column => 'attempt', payload_column => 'payload');
CREATE FUNCTION of_group(jobs grouped[]) RETURNS ruststream.outcome[]
LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'the handler has %', (SELECT string_agg(format('%s %s', j.grp, j.id), ', ') FROM unnest(jobs) AS j);
	RETURN (SELECT array_agg(CASE WHEN j.payload IS NULL THEN ruststream.retry() ELSE ruststream.ack() END ORDER BY ordinality)
		FROM unnest(jobs) WITH ORDINALITY AS j);
END $$;
SELECT ruststream.subscribe('a', 'grouped', 'of_group', workers => 0, batch_size => 3, max_attempts => 2, dead_letter => 'b');
INSERT INTO grouped (id, grp, payload) VALUES (1, 'b', NULL), (2, 'a', NULL), (3, 'c', NULL), (4, 'a', '{}'), (5, 'a', NULL), (6, 'a', '{}');
CALL ruststream.drain('a');
SELECT id, grp, attempt FROM grouped ORDER BY id;

-- rows that come back at once are left alone, however many ------------------------------

CREATE TABLE bare (id bigint PRIMARY KEY, payload int);
SELECT ruststream.attach_queue('bare', 'id', payload_column => 'payload');
CREATE FUNCTION fussy(jobs bare[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_batch.effect (did) SELECT j.id FROM unnest(jobs) AS j;
	PERFORM 1 / j.payload FROM unnest(jobs) AS j;
END $$;
SELECT ruststream.subscribe('b', 'bare', 'fussy', workers => 0, batch_size => 100, retry_delay => '1 hour');
INSERT INTO bare SELECT i, CASE WHEN i > 100 THEN 1 ELSE 0 END FROM generate_series(1, 150) AS i;
-- those behind them are not kept waiting
SET client_min_messages = error;
CALL ruststream.drain('b', 150);
RESET client_min_messages;
SELECT count(*) AS effects FROM effect;
SELECT count(*), min(id), max(id) FROM bare;

SET client_min_messages = error;
DROP SCHEMA rs_batch CASCADE;
