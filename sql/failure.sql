-- What is remembered of failures, who sees it; and how long a row waits after one.
\set VERBOSITY terse
SELECT current_user AS superuser \gset
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
DROP ROLE IF EXISTS regress_rs_failure_owner, regress_rs_failure_member, regress_rs_failure_monitor, regress_rs_failure_nobody;
RESET client_min_messages;

CREATE SCHEMA rs_failure;
SET search_path = rs_failure;

CREATE TABLE jobs (id int PRIMARY KEY, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb);
CREATE INDEX ON jobs (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload');
CREATE TABLE numbers (n int CHECK (n > 0));
CREATE FUNCTION inner_function(p jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	CASE p->>'do'
		WHEN 'raise' THEN RAISE EXCEPTION 'no good' USING ERRCODE = 'RS001', DETAIL = 'It was bad.', HINT = 'Be better.';
		WHEN 'plain' THEN RAISE EXCEPTION 'only a message';
		WHEN 'check' THEN INSERT INTO rs_failure.numbers VALUES (0);
		WHEN 'empty' THEN RAISE EXCEPTION USING MESSAGE = '';
		WHEN 'long' THEN RAISE EXCEPTION '%', repeat('long ', 20000);
		WHEN 'commit' THEN COMMIT;
		WHEN 'warning' THEN RAISE WARNING 'a warning is no failure';
		WHEN 'percent' THEN RAISE EXCEPTION '%', '100%s of %d' USING DETAIL = '%n', HINT = '%m';
		ELSE NULL;
	END CASE;
END $$;
CREATE FUNCTION handle(p jsonb) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM rs_failure.inner_function(p);
	RETURN CASE p->>'answer' WHEN 'ack' THEN ROW('ack', NULL, 'a reason of an ack')::ruststream.outcome
		WHEN 'retry' THEN ruststream.retry('not yet') WHEN 'retry_after' THEN ruststream.retry_after('1 hour', 'later')
		WHEN 'discard' THEN ruststream.discard('useless') WHEN 'dead_letter' THEN ruststream.dead_letter('hopeless')
		WHEN 'silent' THEN ruststream.discard() ELSE ruststream.ack() END;
END $$;
SELECT ruststream.subscribe('failure', 'jobs', 'handle', workers => 0, on_error => 'discard');

-- everything about an error
INSERT INTO jobs (id, attempt, payload) VALUES (1, 1, '{"do": "raise"}'), (2, 4, '{"do": "plain"}'), (3, 1, '{"do": "check"}'),
	(4, 1, '{"do": "empty"}'), (5, 1, '{"do": "long"}'), (6, 1, '{"do": "commit"}'), (7, 1, '{"do": "warning"}'), (8, 1, '{"do": "percent"}');
\set VERBOSITY default
SET client_min_messages = error;
CALL ruststream.drain('failure');
RESET client_min_messages;
\x on
SELECT subscription, queue, id, attempt, sqlstate, left(message, 80) AS message, length(message), detail, hint,
	(SELECT string_agg(line, E'\n' ORDER BY n) FROM unnest(string_to_array(context, E'\n')) WITH ORDINALITY AS u(line, n) WHERE line !~ '^SQL') AS context,
	at BETWEEN now() - '1 min'::interval AND now() AS just_now FROM ruststream.failure WHERE subscription = 'failure';
\x off
-- as drain's caller sees it
INSERT INTO jobs (id, payload) VALUES (1, '{"do": "raise"}'), (8, '{"do": "percent"}');
CALL ruststream.drain('failure');
\set VERBOSITY terse

-- the reasons of answers; none for an ack, none where none was given
DELETE FROM ruststream.failure_history;
SELECT ruststream.alter_subscription('failure', on_error => 'retry_after');
INSERT INTO jobs (id, payload) SELECT n, jsonb_build_object('answer', a)
	FROM unnest('{ack,retry_after,discard,silent,dead_letter,retry}'::text[]) WITH ORDINALITY AS u(a, n);
CALL ruststream.drain('failure', 6);
SELECT id, attempt, sqlstate, message, detail, hint, context FROM ruststream.failure WHERE subscription = 'failure';

-- it is recorded with the settlement or not at all: once a failed delivery
DELETE FROM jobs;
DELETE FROM ruststream.failure_history;
SELECT ruststream.alter_subscription('failure', retry_delay => '0');
CREATE FUNCTION fail_twice(jsonb, d ruststream.delivery) RETURNS void
LANGUAGE plpgsql AS $$ BEGIN IF d.attempt < 3 THEN RAISE EXCEPTION 'attempt %', d.attempt; END IF; END $$;
SELECT ruststream.alter_subscription('failure', handler => 'fail_twice');
INSERT INTO jobs (id) VALUES (1), (2);
CALL ruststream.drain('failure');
SELECT id, attempt, message FROM ruststream.failure WHERE subscription = 'failure' ORDER BY id, attempt;

-- the newest thousand of each subscription
CREATE FUNCTION fail(jsonb) RETURNS void
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no good'; END $$;
SELECT ruststream.alter_subscription('failure', handler => 'fail', on_error => 'discard');
INSERT INTO jobs (id) SELECT generate_series(1, 1005);
SET client_min_messages = error;
CALL ruststream.drain('failure');
RESET client_min_messages;
SELECT count(*), min(id::int), max(id::int) FROM ruststream.failure WHERE subscription = 'failure';
SELECT ruststream.subscribe('failure too', 'jobs', 'fail', workers => 0, on_error => 'discard');
INSERT INTO jobs (id) SELECT generate_series(1, 3);
CALL ruststream.drain('failure too');
SELECT subscription, count(*), min(id::int), max(id::int) FROM ruststream.failure WHERE subscription ~ '^failure' GROUP BY 1 ORDER BY 1;
-- they go with their subscription
SELECT ruststream.unsubscribe('failure');
SELECT subscription, count(*) FROM ruststream.failure WHERE subscription ~ '^failure' GROUP BY 1 ORDER BY 1;
SELECT ruststream.unsubscribe('failure too');
SELECT count(*) FROM ruststream.failure_history WHERE subscription ~ '^failure';

------------------------------------------------------------------- who sees it

CREATE ROLE regress_rs_failure_owner LOGIN;
CREATE ROLE regress_rs_failure_member LOGIN IN ROLE regress_rs_failure_owner;
CREATE ROLE regress_rs_failure_monitor LOGIN IN ROLE pg_monitor;
CREATE ROLE regress_rs_failure_nobody LOGIN;
CREATE SCHEMA rs_failure_owned AUTHORIZATION regress_rs_failure_owner;
\connect - regress_rs_failure_owner
SET search_path = rs_failure_owned;
CREATE TABLE jobs (id int PRIMARY KEY, payload text);
CREATE FUNCTION fail(text) RETURNS void
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'secret'; END $$;
SELECT ruststream.attach_queue('jobs', 'id', payload_column => 'payload');
SELECT ruststream.subscribe('secrets', 'jobs', 'fail', workers => 0, on_error => 'discard');
INSERT INTO jobs VALUES (1, 'secret'), (2, 'secret');
CALL ruststream.drain('secrets', 1);

CREATE FUNCTION look() RETURNS TABLE (viewed text, n bigint, text text)
LANGUAGE sql AS $$
	SELECT 'failure', count(*), max(message) FROM ruststream.failure WHERE subscription = 'secrets'
	UNION ALL SELECT 'status', count(*), max(last_error) FROM ruststream.status WHERE subscription = 'secrets'
	UNION ALL SELECT 'stat_subscription', count(*), NULL FROM ruststream.stat_subscription WHERE subscription = 'secrets'
	UNION ALL SELECT 'stat_queue', count(*), max(ready)::text FROM ruststream.stat_queue WHERE queue = 'rs_failure_owned.jobs'::regclass
	UNION ALL SELECT 'stat_worker', count(*), NULL FROM ruststream.stat_worker WHERE subscription = 'secrets'
	UNION ALL SELECT 'delivery_in_work', count(*), NULL FROM ruststream.delivery_in_work WHERE subscription = 'secrets'
$$;
GRANT USAGE ON SCHEMA rs_failure_owned TO PUBLIC;
SELECT * FROM look();
\connect - regress_rs_failure_member
SELECT * FROM rs_failure_owned.look();
\connect - regress_rs_failure_monitor
SELECT * FROM rs_failure_owned.look();
\connect - regress_rs_failure_nobody
SELECT * FROM rs_failure_owned.look();
-- nor by the tables below
SELECT count(*) FROM ruststream.failure_history;
SELECT count(*) FROM ruststream.subscription;
SELECT count(*) FROM ruststream.queue;
DELETE FROM ruststream.failure_history;
\connect - regress_rs_failure_owner
SELECT count(*) FROM ruststream.failure_history;
INSERT INTO ruststream.failure_history (at, subscription_id, subscription, queue, sqlstate) VALUES (now(), 1, 'x', 1, '00000');
\connect - :superuser
SET search_path = rs_failure;

----------------------------------------------------------------------- backoff

CREATE TABLE waits (id int PRIMARY KEY, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb);
CREATE INDEX ON waits (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('waits', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt', payload_column => 'payload');
SELECT ruststream.subscribe('waits', 'waits', 'fail', workers => 0);

-- One row, failing again and again: its delay is the wanted one, less at most a quarter.
CREATE PROCEDURE backoff(kind text, delay interval, cap interval, VARIADIC wanted interval[])
LANGUAGE plpgsql AS $$
DECLARE
	before timestamptz;
	due timestamptz;
	said text := '';
BEGIN
	PERFORM ruststream.alter_subscription('waits', backoff => kind, retry_delay => delay, max_retry_delay => cap);
	DELETE FROM rs_failure.waits;
	INSERT INTO rs_failure.waits (id) VALUES (1);
	FOR i IN 1 .. array_length(wanted, 1) LOOP
		before := clock_timestamp();
		CALL ruststream.drain('waits', 1);
		due := (SELECT retry_after FROM rs_failure.waits WHERE attempt = i + 1);
		said := said || ' ' || CASE WHEN due BETWEEN before + 0.75 * wanted[i] AND clock_timestamp() + wanted[i]
			THEN 'as wanted' ELSE coalesce((due - before)::text, 'NULL') || ' instead of ' || wanted[i] END;
		UPDATE rs_failure.waits SET retry_after = NULL;
	END LOOP;
	RAISE INFO '% of %, at most %:%', kind, delay, cap, said;
END $$;
SET client_min_messages = error;
CALL backoff('constant', '10 min', '1 hour', '10 min', '10 min', '10 min');
CALL backoff('constant', '10 min', '1 min', '1 min', '1 min');
CALL backoff('linear', '10 min', '1 day', '10 min', '20 min', '30 min', '40 min');
CALL backoff('linear', '10 min', '25 min', '10 min', '20 min', '25 min', '25 min');
CALL backoff('exponential', '10 min', '1 day', '10 min', '20 min', '40 min', '80 min', '160 min');
CALL backoff('exponential', '10 min', '1 hour', '10 min', '20 min', '40 min', '60 min', '60 min');
CALL backoff('exponential', '0', '1 hour', '0', '0');
CALL backoff('exponential', '1 hour', '0', '0', '0');
CALL backoff('exponential', '1 mon', '100 years', '30 days', '60 days');
-- far beyond what can be doubled
DELETE FROM waits;
INSERT INTO waits VALUES (1, NULL, 2147483646), (2, NULL, 0), (3, NULL, -5);
SELECT ruststream.alter_subscription('waits', backoff => 'exponential', retry_delay => '10 min', max_retry_delay => '1 hour');
CALL ruststream.drain('waits');
SELECT id, attempt, retry_after - now() BETWEEN '7 min' AND '10 min' AS first, retry_after - now() BETWEEN '44 min' AND '1 hour' AS capped
	FROM waits ORDER BY id;
-- those that failed together do not come back together
DELETE FROM waits;
SELECT ruststream.alter_subscription('waits', backoff => 'constant', retry_delay => '4 hours', max_retry_delay => '1 day');
INSERT INTO waits (id) SELECT generate_series(1, 100);
CALL ruststream.drain('waits');
SELECT count(*), max(retry_after) - min(retry_after) BETWEEN '15 min' AND '1 hour 1 min' AS spread FROM waits;
-- an answer's own delay has no jitter; an answer without one has the backoff's
CREATE FUNCTION later(p jsonb) RETURNS ruststream.outcome
LANGUAGE sql AS $$ SELECT ruststream.retry_after((p->>'delay')::interval) $$;
SELECT ruststream.alter_subscription('waits', handler => 'later');
DELETE FROM waits;
INSERT INTO waits (id, payload) VALUES (1, '{"delay": "2 hours"}'), (2, '{"delay": "1 mon"}'), (3, '{}');
SELECT clock_timestamp() AS before \gset
CALL ruststream.drain('waits');
SELECT id, CASE id WHEN 1 THEN retry_after - '2 hours'::interval WHEN 2 THEN retry_after - '720 hours'::interval
		ELSE retry_after - '3 hours'::interval END BETWEEN :'before' AND clock_timestamp() + CASE id WHEN 3 THEN '1 hour' ELSE '0' END::interval AS as_wanted
	FROM waits ORDER BY id;
-- the attempt that cannot be counted further
DELETE FROM waits;
SELECT ruststream.alter_subscription('waits', handler => 'fail', retry_delay => '100 ms');
INSERT INTO waits VALUES (1, NULL, 2147483647);
CALL ruststream.drain('waits', 1);
SELECT id, attempt, retry_after FROM waits;

DROP SCHEMA rs_failure CASCADE;
DROP SCHEMA rs_failure_owned CASCADE;
DROP ROLE regress_rs_failure_member, regress_rs_failure_owner, regress_rs_failure_monitor, regress_rs_failure_nobody;
