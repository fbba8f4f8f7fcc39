-- The row lock lane where the subscription is not transactional: what the
-- handler writes stays, whatever it answers; an error undoes it.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_apart;
SET search_path = rs_apart;

-- every role, finished rows go; a dead letter is another group
CREATE TABLE "full" (id bigint PRIMARY KEY, group_name text NOT NULL, priority int, retry_after timestamptz,
	attempt int NOT NULL DEFAULT 1, headers jsonb, payload jsonb);
CREATE INDEX ON "full" (group_name, priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('full', 'id', group_column => 'group_name', priority_column => 'priority',
	retry_after_column => 'retry_after', attempt_column => 'attempt', headers_column => 'headers',
	payload_column => 'payload');

-- finished rows stay; a dead letter is a row of another table
CREATE TABLE kept (id bigint PRIMARY KEY, retry_after timestamptz, attempt int,
	processed_at timestamptz, payload jsonb);
CREATE INDEX ON kept (retry_after NULLS FIRST, id) WHERE processed_at IS NULL;
SELECT ruststream.attach_queue('kept', 'id', retry_after_column => 'retry_after',
	attempt_column => 'attempt', processed_at_column => 'processed_at', payload_column => 'payload');
CREATE TABLE dead (LIKE kept, note text DEFAULT 'moved');

-- nothing but an id and a payload
CREATE TABLE bare (id bigint PRIMARY KEY, payload jsonb);
SELECT ruststream.attach_queue('bare', 'id', payload_column => 'payload');

-- what handlers write
CREATE TABLE effect (id text, attempt int);

-- a handler that does as its payload says, once it has written
CREATE FUNCTION handle(job jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_apart.effect VALUES (d.id, d.attempt);
	IF job ? 'sql' THEN
		EXECUTE job->>'sql';
	END IF;
	CASE job->>'do'
		WHEN 'ack' THEN RETURN ruststream.ack();
		WHEN 'retry' THEN RETURN ruststream.retry(job->>'reason');
		WHEN 'retry_after' THEN RETURN ruststream.retry_after((job->>'delay')::interval, job->>'reason');
		WHEN 'discard' THEN RETURN ruststream.discard(job->>'reason');
		WHEN 'dead_letter' THEN RETURN ruststream.dead_letter(job->>'reason');
		WHEN 'error' THEN RAISE EXCEPTION 'no good' USING ERRCODE = 'RS001';
	END CASE;
END $$;

-- A row of a table, with points in time in words.
CREATE FUNCTION in_words(r jsonb) RETURNS jsonb
LANGUAGE sql AS $$
	SELECT jsonb_object_agg(key, CASE
		WHEN value = 'null' THEN value
		WHEN key = 'processed_at' THEN to_jsonb('now'::text)
		WHEN key = 'headers' THEN value - 'ruststream-dead-lettered-at'
		WHEN key = 'locked_until' THEN to_jsonb(CASE
			WHEN (value #>> '{}')::timestamptz - clock_timestamp() BETWEEN '20 s' AND '30 s' THEN 'for a lease'
			ELSE 'some other time' END)
		WHEN key = 'retry_after' THEN to_jsonb(CASE
			WHEN (value #>> '{}')::timestamptz - clock_timestamp() BETWEEN '7 min' AND '10 min' THEN 'after the backoff'
			WHEN (value #>> '{}')::timestamptz - clock_timestamp() BETWEEN '58 min' AND '60 min' THEN 'in an hour'
			ELSE 'some other time' END)
		ELSE value END)
	FROM jsonb_each(r - 'payload')
$$;

/*
 * Deliver one row once, and say what has become of it.  wanted is the outcome
 * that should be settled; its plan is printed before the trace.
 */
CREATE PROCEDURE try(subscription text, job jsonb, wanted text, attempt int DEFAULT 1)
LANGUAGE plpgsql AS $$
DECLARE
	s record;
	r jsonb;
	f record;
BEGIN
	SELECT * INTO s FROM ruststream.subscription t WHERE t.name = subscription;
	EXECUTE format('DELETE FROM %s', s.queue);
	DELETE FROM rs_apart.dead;
	DELETE FROM rs_apart.effect;
	DELETE FROM ruststream.failure_history;
	EXECUTE format('INSERT INTO %s SELECT (jsonb_populate_record(NULL::%s, $1)).*', s.queue, s.queue)
		USING jsonb_build_object('id', 1, 'group_name', 'work', 'attempt', attempt, 'payload', job);
	RAISE NOTICE '== % %: % attempt %', s.queue, subscription, job, attempt;
	RAISE NOTICE 'plan of %: %', wanted, (SELECT string_agg(p.action, ', ' ORDER BY p.step)
		FROM ruststream.transaction_plan p
		WHERE p.form = 'row_lock' AND p.transactional = coalesce(s.transactional, true) AND p.outcome = wanted);

	CALL ruststream.drain(subscription, 1);

	FOR r IN EXECUTE format('SELECT rs_apart.in_words(to_jsonb(q)) FROM %s q ORDER BY id', s.queue) LOOP
		RAISE NOTICE 'row %', r;
	END LOOP;
	FOR r IN SELECT rs_apart.in_words(to_jsonb(d)) FROM rs_apart.dead d ORDER BY id LOOP
		RAISE NOTICE 'dead row %', r;
	END LOOP;
	FOR r IN SELECT to_jsonb(e) FROM rs_apart.effect e ORDER BY id LOOP
		RAISE NOTICE 'effect %', r;
	END LOOP;
	FOR f IN SELECT * FROM ruststream.failure WHERE failure.subscription = try.subscription LOOP
		RAISE NOTICE 'failure % of attempt %: %', f.sqlstate, f.attempt, f.message;
	END LOOP;
END $$;

SET ruststream.trace = on;

-- the same, not transactional: what the handler writes stays
SELECT ruststream.subscribe('full apart', 'full', 'handle', group_name => 'work', transactional => false, workers => 0,
	dead_letter => 'graveyard', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
SELECT ruststream.subscribe('kept apart', 'kept', 'handle', transactional => false, workers => 0,
	dead_letter => 'rs_apart.dead', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
SELECT ruststream.subscribe('bare apart', 'bare', 'handle', transactional => false, workers => 0, retry_delay => '0');
CALL try('full apart', '{"do": "ack"}', 'ack');
CALL try('full apart', '{"do": "retry", "reason": "not yet"}', 'retry', 2);
CALL try('full apart', '{"do": "retry_after", "delay": "1 hour"}', 'retry_after');
CALL try('full apart', '{"do": "discard"}', 'discard', 2);
CALL try('full apart', '{"do": "dead_letter"}', 'dead_letter', 2);
CALL try('full apart', '{"do": "error"}', 'retry_after', 2);
CALL try('full apart', '{"do": "error"}', 'dead_letter', 3);
CALL try('kept apart', '{"do": "ack"}', 'ack');
CALL try('kept apart', '{"do": "retry", "reason": "not yet"}', 'retry', 2);
CALL try('kept apart', '{"do": "retry_after", "delay": "1 hour"}', 'retry_after');
CALL try('kept apart', '{"do": "discard"}', 'discard', 2);
CALL try('kept apart', '{"do": "dead_letter"}', 'dead_letter', 2);
CALL try('kept apart', '{"do": "error"}', 'retry_after', 2);
CALL try('kept apart', '{"do": "error"}', 'dead_letter', 3);
CALL try('bare apart', '{"do": "ack"}', 'ack', NULL);
CALL try('bare apart', '{"do": "retry"}', 'retry', NULL);
CALL try('bare apart', '{"do": "retry_after", "delay": "1 hour"}', 'retry', NULL);
CALL try('bare apart', '{"do": "discard"}', 'discard', NULL);
CALL try('bare apart', '{"do": "error"}', 'retry', NULL);

-- a handler that has ended its own row has ended it
CALL try('full apart', '{"do": "discard", "sql": "DELETE FROM rs_apart.full"}', 'discard');
CALL try('full apart', '{"do": "retry", "sql": "DELETE FROM rs_apart.full"}', 'retry');
-- a deferred constraint is its error, whatever it answers
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
CALL try('full apart', '{"do": "retry", "sql": "INSERT INTO rs_apart.child VALUES (1)"}', 'retry_after');
-- it cannot commit
CALL try('full apart', '{"do": "ack", "sql": "COMMIT"}', 'retry_after');

SET client_min_messages = error;
DROP SCHEMA rs_apart CASCADE;
