-- The advisory lock lane, outcome by outcome, transactional and not: each
-- delivery's trace beside the plan it must follow, then what is in the tables.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_keys;
SET search_path = rs_keys;

-- every role, finished rows go; a dead letter is another group
CREATE TABLE "full" (id bigint PRIMARY KEY, group_name text NOT NULL, priority int, retry_after timestamptz,
	attempt int NOT NULL DEFAULT 1, headers jsonb, payload jsonb);
CREATE INDEX ON "full" (group_name, priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('full', 'id', group_column => 'group_name', priority_column => 'priority',
	retry_after_column => 'retry_after', attempt_column => 'attempt', headers_column => 'headers',
	payload_column => 'payload', lock_key => 'keys-{id}');

-- finished rows stay; a dead letter is a row of another table
CREATE TABLE kept (id bigint PRIMARY KEY, retry_after timestamptz, attempt int,
	processed_at timestamptz, payload jsonb);
CREATE INDEX ON kept (retry_after NULLS FIRST, id) WHERE processed_at IS NULL;
SELECT ruststream.attach_queue('kept', 'id', retry_after_column => 'retry_after',
	attempt_column => 'attempt', processed_at_column => 'processed_at', payload_column => 'payload', lock_key => 'keys-{id}');
CREATE TABLE dead (LIKE kept, note text DEFAULT 'moved');

-- nothing but an id and a payload
CREATE TABLE bare (id bigint PRIMARY KEY, payload jsonb);
SELECT ruststream.attach_queue('bare', 'id', payload_column => 'payload', lock_key => 'keys-{id}');

-- what handlers write
CREATE TABLE effect (id text, attempt int);

-- a handler that does as its payload says, once it has written
CREATE FUNCTION handle(job jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_keys.effect VALUES (d.id, d.attempt);
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
	DELETE FROM rs_keys.dead;
	DELETE FROM rs_keys.effect;
	DELETE FROM ruststream.failure_history;
	EXECUTE format('INSERT INTO %s SELECT (jsonb_populate_record(NULL::%s, $1)).*', s.queue, s.queue)
		USING jsonb_build_object('id', 1, 'group_name', 'work', 'attempt', attempt, 'payload', job);
	RAISE NOTICE '== % %: % attempt %', s.queue, subscription, job, attempt;
	RAISE NOTICE 'plan of %: %', wanted, (SELECT string_agg(p.action, ', ' ORDER BY p.step)
		FROM ruststream.transaction_plan p
		WHERE p.form = 'advisory_lock' AND p.transactional = coalesce(s.transactional, true) AND p.outcome = wanted);

	CALL ruststream.drain(subscription, 1);

	FOR r IN EXECUTE format('SELECT rs_keys.in_words(to_jsonb(q)) FROM %s q ORDER BY id', s.queue) LOOP
		RAISE NOTICE 'row %', r;
	END LOOP;
	FOR r IN SELECT rs_keys.in_words(to_jsonb(d)) FROM rs_keys.dead d ORDER BY id LOOP
		RAISE NOTICE 'dead row %', r;
	END LOOP;
	FOR r IN SELECT to_jsonb(e) FROM rs_keys.effect e ORDER BY id LOOP
		RAISE NOTICE 'effect %', r;
	END LOOP;
	FOR f IN SELECT * FROM ruststream.failure WHERE failure.subscription = try.subscription LOOP
		RAISE NOTICE 'failure % of attempt %: %', f.sqlstate, f.attempt, f.message;
	END LOOP;
END $$;

SET ruststream.trace = on;

-- every outcome, transactional
SELECT ruststream.subscribe('full', 'full', 'handle', group_name => 'work', transactional => true, workers => 0,
	dead_letter => 'graveyard', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
SELECT ruststream.subscribe('kept', 'kept', 'handle', transactional => true, workers => 0,
	dead_letter => 'rs_keys.dead', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
SELECT ruststream.subscribe('bare', 'bare', 'handle', transactional => true, workers => 0, retry_delay => '0');
CALL try('full', '{"do": "ack"}', 'ack');
CALL try('full', '{"do": "retry", "reason": "not yet"}', 'retry', 2);
CALL try('full', '{"do": "retry_after", "delay": "1 hour"}', 'retry_after');
CALL try('full', '{"do": "discard"}', 'discard', 2);
CALL try('full', '{"do": "dead_letter"}', 'dead_letter', 2);
CALL try('full', '{"do": "error"}', 'retry_after', 2);
CALL try('full', '{"do": "error"}', 'dead_letter', 3);
CALL try('kept', '{"do": "ack"}', 'ack');
CALL try('kept', '{"do": "retry", "reason": "not yet"}', 'retry', 2);
CALL try('kept', '{"do": "retry_after", "delay": "1 hour"}', 'retry_after');
CALL try('kept', '{"do": "discard"}', 'discard', 2);
CALL try('kept', '{"do": "dead_letter"}', 'dead_letter', 2);
CALL try('kept', '{"do": "error"}', 'retry_after', 2);
CALL try('kept', '{"do": "error"}', 'dead_letter', 3);
CALL try('bare', '{"do": "ack"}', 'ack', NULL);
CALL try('bare', '{"do": "retry"}', 'retry', NULL);
CALL try('bare', '{"do": "retry_after", "delay": "1 hour"}', 'retry', NULL);
CALL try('bare', '{"do": "discard"}', 'discard', NULL);
CALL try('bare', '{"do": "error"}', 'retry', NULL);

-- the same, not transactional: what the handler writes stays
SELECT ruststream.subscribe('full apart', 'full', 'handle', group_name => 'work', transactional => false, workers => 0,
	dead_letter => 'graveyard', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
SELECT ruststream.subscribe('kept apart', 'kept', 'handle', transactional => false, workers => 0,
	dead_letter => 'rs_keys.dead', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
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

-- the key is held while the handler runs, and by nobody afterwards
CREATE FUNCTION key_of(key text) RETURNS bigint LANGUAGE sql RETURN hashtextextended(key, 0);
CREATE VIEW held AS SELECT count(*) AS held FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
CALL try('full', '{"do": "ack", "sql": "DO $d$ BEGIN ASSERT (SELECT (classid::bigint << 32) | objid::bigint = rs_keys.key_of($$keys-1$$) FROM pg_locks WHERE locktype = $$advisory$$ AND pid = pg_backend_pid()); END $d$"}', 'ack');
SELECT held FROM held;

-- a handler that unlocks it has lost the row, unless it holds it otherwise
CALL try('kept', '{"do": "ack", "sql": "SELECT pg_advisory_unlock_all()"}', 'ack');
CALL try('kept', '{"do": "ack", "sql": "SELECT pg_advisory_unlock(rs_keys.key_of($$keys-1$$))"}', 'ack');
CALL try('kept', '{"do": "retry_after", "delay": "1 hour", "sql": "SELECT pg_advisory_unlock_all()"}', 'retry_after');
CALL try('kept apart', '{"do": "ack", "sql": "SELECT pg_advisory_unlock_all()"}', 'ack');
CALL try('kept', '{"do": "ack", "sql": "SELECT pg_advisory_lock(rs_keys.key_of($$keys-1$$))"}', 'ack');
CALL try('kept', '{"do": "ack", "sql": "SELECT pg_advisory_xact_lock(rs_keys.key_of($$keys-1$$)), pg_advisory_unlock(rs_keys.key_of($$keys-1$$))"}', 'ack');
SELECT held FROM held;

-- a handler that has ended its own row has ended it
CALL try('full', '{"do": "ack", "sql": "DELETE FROM rs_keys.full"}', 'ack');
CALL try('full', '{"do": "retry_after", "delay": "1 hour", "sql": "DELETE FROM rs_keys.full"}', 'retry_after');
CALL try('full apart', '{"do": "retry_after", "delay": "1 hour", "sql": "DELETE FROM rs_keys.full"}', 'retry_after');

-- a deferred constraint is the handler's error; what fails to settle is tried again
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
CALL try('full', '{"do": "ack", "sql": "INSERT INTO rs_keys.child VALUES (1)"}', 'retry_after');
CREATE TABLE referrer (id bigint REFERENCES "full");
CALL try('full', '{"do": "ack", "sql": "INSERT INTO rs_keys.referrer VALUES (1)"}', 'retry_after');
DROP TABLE referrer;
SELECT held FROM held;

-- transient failures: the row is taken anew, and failed after ten
RESET ruststream.trace;
DELETE FROM kept;
DELETE FROM effect;
DELETE FROM ruststream.failure_history;
CREATE FUNCTION conflict(until int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF ruststream.attempt() < until THEN
		RAISE serialization_failure USING MESSAGE = 'could not serialize';
	END IF;
END $$;
INSERT INTO kept (id, attempt, payload) VALUES (1, 1, '{"do": "ack", "sql": "SELECT rs_keys.conflict(4)"}');
SELECT ruststream.alter_subscription('kept', reset => '{max_attempts}');
CALL ruststream.drain('kept', 1);
SELECT in_words(to_jsonb(k)) FROM kept AS k;
SELECT * FROM effect;
INSERT INTO kept (id, attempt, payload) VALUES (2, 1, '{"do": "ack", "sql": "SELECT rs_keys.conflict(99)"}');
CALL ruststream.drain('kept', 1);
SELECT in_words(to_jsonb(k)) FROM kept AS k WHERE id = 2;
SELECT sqlstate, attempt, message FROM ruststream.failure;
SELECT held FROM held;

-- a key of several columns, one of them null, and text that needs quoting
CREATE TABLE odd (id bigint PRIMARY KEY, "a ""b""" text COLLATE "C", c boolean, payload jsonb);
SELECT ruststream.attach_queue('odd', 'id', payload_column => 'payload',
	lock_key => '{{it''s}} \{a "b"}/{c}{id}');
SELECT ruststream.subscribe('odd', 'odd', 'handle', workers => 0, retry_delay => '0');
INSERT INTO odd VALUES (1, NULL, true, '{}');
UPDATE odd SET payload = jsonb_build_object('do', 'ack', 'sql', format('SELECT 1 / pg_advisory_unlock(rs_keys.key_of(%L))::int',
	concat('{it''s} \', "a ""b""", '/', c, id)));
\set VERBOSITY default
CALL ruststream.drain('odd', 1);
\set VERBOSITY terse

-- the caller's own locks stay
SELECT pg_advisory_lock(key_of('keys-1')), pg_advisory_lock(5);
CALL try('full', '{"do": "ack"}', 'ack');
SELECT held FROM held;
SELECT pg_advisory_unlock_all();

-- any level may be declared; the next holder of a key sees what the one before it has committed
CREATE TABLE account (id int PRIMARY KEY, balance int);
INSERT INTO account VALUES (7, 100);
CREATE TABLE strict (id bigint PRIMARY KEY, account int, payload jsonb);
SELECT ruststream.attach_queue('strict', 'id', payload_column => 'payload', lock_key => 'accounts-{account}',
	isolation => 'serializable');
CREATE FUNCTION withdraw(job strict) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	ASSERT current_setting('transaction_isolation') = 'serializable';
	UPDATE rs_keys.account SET balance = balance - 10 WHERE id = job.account;
	RETURN ruststream.ack();
END $$;
SET client_min_messages = error;
SELECT ruststream.subscribe('strict', 'strict', 'withdraw', workers => 0);
RESET client_min_messages;
INSERT INTO strict SELECT i, 7 FROM generate_series(1, 5) AS i;
CALL ruststream.drain('strict');
SELECT * FROM account;

-- also where it is a trigger that does, and one that is deferred
CREATE FUNCTION unlock() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_unlock_all(); RETURN NULL; END $$;
CREATE TABLE unlocking (id int PRIMARY KEY, attempt int, payload jsonb);
SELECT ruststream.attach_queue('unlocking', 'id', attempt_column => 'attempt', payload_column => 'payload', lock_key => 'unlocking-{id}');
CREATE CONSTRAINT TRIGGER unlock AFTER DELETE ON unlocking INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION unlock();
SELECT ruststream.subscribe('unlocking', 'unlocking', 'handle', workers => 0);
DELETE FROM effect;
INSERT INTO unlocking VALUES (1, 1, '{"do": "ack"}');
CALL ruststream.drain('unlocking', 1);
SELECT id, attempt FROM unlocking;
SELECT * FROM effect;

-- values that are stored apart from their rows, ids among them: with each delivery
CREATE TABLE apart (id text PRIMARY KEY, payload text, headers jsonb);
ALTER TABLE apart ALTER id SET STORAGE EXTERNAL, ALTER payload SET STORAGE EXTERNAL, ALTER headers SET STORAGE EXTERNAL;
SELECT ruststream.attach_queue('apart', 'id', payload_column => 'payload', headers_column => 'headers', lock_key => 'apart-{id}');
CREATE FUNCTION handle_apart(job text, d ruststream.delivery) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_keys.effect VALUES (left(d.id, 1) || length(d.id) || ' ' || length(job) || ' ' || length(d.headers->>'a'), 1);
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('apart', 'apart', 'handle_apart', workers => 0);
DELETE FROM effect;
INSERT INTO apart SELECT i || repeat('i', 2100), repeat('p', 10000 * i), jsonb_build_object('a', repeat('h', 3000 * i)) FROM generate_series(1, 4) AS i;
CALL ruststream.drain('apart');
SELECT id FROM effect ORDER BY id;
-- A handler that releases its key each time has had its attempts, too.
CREATE TABLE loses (LIKE strict INCLUDING ALL);
ALTER TABLE loses ADD attempt int NOT NULL DEFAULT 1;
CREATE TABLE lost (LIKE loses);
SELECT ruststream.attach_queue('loses', 'id', attempt_column => 'attempt', lock_key => 'loses-{id}');
CREATE FUNCTION lose(job loses) RETURNS void LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_unlock_all(); END';
SELECT ruststream.subscribe('loses', 'loses', 'lose', workers => 0, retry_delay => '0', max_attempts => 3, dead_letter => 'lost');
INSERT INTO loses VALUES (1, 7);
CALL ruststream.drain('loses', 10);
SELECT * FROM loses;
SELECT id, attempt FROM lost;

SET client_min_messages = error;
DROP SCHEMA rs_keys CASCADE;
