-- The lease lane, outcome by outcome, transactional and not: each delivery's
-- trace beside the plan it must follow, then what is in the tables.  Leases are
-- extended by a background process, so where the library is not preloaded a
-- drain is refused (lease_1.out).
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_lease;
SET search_path = rs_lease;

-- every role, finished rows go; a dead letter is another group
CREATE TABLE "full" (id bigint PRIMARY KEY, group_name text NOT NULL, priority int, retry_after timestamptz,
	attempt int NOT NULL DEFAULT 1, headers jsonb, payload jsonb, locked_until timestamptz);
CREATE INDEX ON "full" (group_name, priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('full', 'id', group_column => 'group_name', priority_column => 'priority',
	retry_after_column => 'retry_after', attempt_column => 'attempt', headers_column => 'headers',
	payload_column => 'payload', locked_until_column => 'locked_until');

-- finished rows stay; a dead letter is a row of another table
CREATE TABLE kept (id bigint PRIMARY KEY, retry_after timestamptz, attempt int,
	processed_at timestamptz, payload jsonb, locked_until timestamptz);
CREATE INDEX ON kept (retry_after NULLS FIRST, id) WHERE processed_at IS NULL;
SELECT ruststream.attach_queue('kept', 'id', retry_after_column => 'retry_after',
	attempt_column => 'attempt', processed_at_column => 'processed_at', payload_column => 'payload', locked_until_column => 'locked_until');
CREATE TABLE dead (LIKE kept, note text DEFAULT 'moved');

-- nothing but an id and a payload
CREATE TABLE bare (id bigint PRIMARY KEY, payload jsonb, locked_until timestamptz);
SELECT ruststream.attach_queue('bare', 'id', payload_column => 'payload', locked_until_column => 'locked_until');

-- what handlers write
CREATE TABLE effect (id text, attempt int);

-- a handler that does as its payload says, once it has written
CREATE FUNCTION handle(job jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_lease.effect VALUES (d.id, d.attempt);
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
	DELETE FROM rs_lease.dead;
	DELETE FROM rs_lease.effect;
	DELETE FROM ruststream.failure_history;
	EXECUTE format('INSERT INTO %s SELECT (jsonb_populate_record(NULL::%s, $1)).*', s.queue, s.queue)
		USING jsonb_build_object('id', 1, 'group_name', 'work', 'attempt', attempt, 'payload', job);
	RAISE NOTICE '== % %: % attempt %', s.queue, subscription, job, attempt;
	RAISE NOTICE 'plan of %: %', wanted, (SELECT string_agg(p.action, ', ' ORDER BY p.step)
		FROM ruststream.transaction_plan p
		WHERE p.form = 'lease' AND p.transactional = coalesce(s.transactional, true) AND p.outcome = wanted);

	CALL ruststream.drain(subscription, 1);

	FOR r IN EXECUTE format('SELECT rs_lease.in_words(to_jsonb(q)) FROM %s q ORDER BY id', s.queue) LOOP
		RAISE NOTICE 'row %', r;
	END LOOP;
	FOR r IN SELECT rs_lease.in_words(to_jsonb(d)) FROM rs_lease.dead d ORDER BY id LOOP
		RAISE NOTICE 'dead row %', r;
	END LOOP;
	FOR r IN SELECT to_jsonb(e) FROM rs_lease.effect e ORDER BY id LOOP
		RAISE NOTICE 'effect %', r;
	END LOOP;
	FOR f IN SELECT * FROM ruststream.failure WHERE failure.subscription = try.subscription LOOP
		RAISE NOTICE 'failure % of attempt %: %', f.sqlstate, f.attempt, f.message;
	END LOOP;
END $$;

-- extensions are possible, or not
SELECT ruststream.subscribe('first', 'bare', 'handle', workers => 0);
\set VERBOSITY default
CALL ruststream.drain('first');
\set VERBOSITY terse
SELECT current_setting('shared_preload_libraries') !~ 'ruststream' AS plain \gset
\if :plain
SET client_min_messages = error;
DROP SCHEMA rs_lease CASCADE;
\quit
\endif
SELECT ruststream.unsubscribe('first');

SET ruststream.trace = on;

-- every outcome, transactional
SELECT ruststream.subscribe('full', 'full', 'handle', group_name => 'work', transactional => true, workers => 0,
	dead_letter => 'graveyard', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
SELECT ruststream.subscribe('kept', 'kept', 'handle', transactional => true, workers => 0,
	dead_letter => 'rs_lease.dead', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
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
	dead_letter => 'rs_lease.dead', max_attempts => 3, retry_delay => '10 min', backoff => 'constant');
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

-- the lease is in the row while the handler runs, and the handler is told
CALL try('full', '{"do": "ack", "sql": "DO $d$ BEGIN ASSERT (SELECT locked_until = (ruststream.delivery()).lease_until AND attempt = 2 AND ruststream.attempt() = 1 AND locked_until > clock_timestamp() FROM rs_lease.full); END $d$"}', 'ack');

-- a handler may write its own row; what it does to the lease is a lease lost
CALL try('kept', '{"do": "ack", "sql": "UPDATE rs_lease.kept SET payload = $$1$$"}', 'ack');
CALL try('kept', '{"do": "ack", "sql": "UPDATE rs_lease.kept SET locked_until = NULL"}', 'ack');
CALL try('kept', '{"do": "ack", "sql": "DELETE FROM rs_lease.kept"}', 'ack');
CALL try('kept', '{"do": "retry", "sql": "DELETE FROM rs_lease.kept"}', 'retry');
CALL try('kept apart', '{"do": "ack", "sql": "UPDATE rs_lease.kept SET locked_until = $$2099-01-01$$"}', 'ack');
CALL try('kept apart', '{"do": "dead_letter", "sql": "DELETE FROM rs_lease.kept"}', 'dead_letter');

-- a deferred constraint is the handler's error; what fails to settle is tried again
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
CALL try('full', '{"do": "ack", "sql": "INSERT INTO rs_lease.child VALUES (1)"}', 'retry_after');
CALL try('full apart', '{"do": "discard", "sql": "INSERT INTO rs_lease.child VALUES (1)"}', 'retry_after');
CREATE TABLE referrer (id bigint REFERENCES "full");
CALL try('full', '{"do": "ack", "sql": "INSERT INTO rs_lease.referrer VALUES (1)"}', 'retry_after');
CALL try('full apart', '{"do": "ack", "sql": "INSERT INTO rs_lease.referrer VALUES (1)"}', 'retry_after');
DROP TABLE referrer;
-- a dead letter that is there already
INSERT INTO dead VALUES (1);
CREATE FUNCTION keep_one() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE unique_violation; END';
CREATE TRIGGER keep_one BEFORE INSERT ON dead FOR EACH ROW EXECUTE FUNCTION keep_one();
CALL try('kept', '{"do": "dead_letter"}', 'dead_letter', 2);
DROP TRIGGER keep_one ON dead;

-- a payload that does not decode
CREATE FUNCTION handle_text(job jsonb) RETURNS void LANGUAGE sql AS '';
CREATE TABLE texts (id bigint PRIMARY KEY, payload text, attempt int, locked_until timestamptz);
SELECT ruststream.attach_queue('texts', 'id', payload_column => 'payload', attempt_column => 'attempt',
	locked_until_column => 'locked_until');
CREATE TABLE texts_dead (LIKE texts);
SELECT ruststream.subscribe('texts', 'texts', 'handle_text', workers => 0, dead_letter => 'rs_lease.texts_dead');
INSERT INTO texts VALUES (1, '{', 1), (2, '{}', 1);
CALL ruststream.drain('texts');
SELECT * FROM texts_dead;

-- leased rows are passed over; ended leases are not
RESET ruststream.trace;
DELETE FROM bare;
DELETE FROM effect;
INSERT INTO bare VALUES (1, '{"do": "ack"}', now() + '1 min'), (2, '{"do": "ack"}', now() - '1 us'::interval), (3, '{"do": "ack"}', NULL);
CALL ruststream.drain('bare');
SELECT id FROM bare;
SELECT id FROM effect ORDER BY id;

-- transient failures give the row back for the next claim, and end after ten
DELETE FROM kept;
DELETE FROM effect;
DELETE FROM ruststream.failure_history;
CREATE FUNCTION conflict(until int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF ruststream.attempt() < until THEN
		RAISE serialization_failure USING MESSAGE = 'could not serialize';
	END IF;
END $$;
INSERT INTO kept (id, attempt, payload) VALUES (1, 1, '{"do": "ack", "sql": "SELECT rs_lease.conflict(4)"}');
SELECT ruststream.alter_subscription('kept', reset => '{max_attempts}');
CALL ruststream.drain('kept', 1);
SELECT in_words(to_jsonb(k)) FROM kept AS k;
SELECT * FROM effect;
INSERT INTO kept (id, attempt, payload) VALUES (2, 1, '{"do": "ack", "sql": "SELECT rs_lease.conflict(99)"}');
CALL ruststream.drain('kept', 1);
SELECT in_words(to_jsonb(k)) FROM kept AS k WHERE id = 2;
SELECT sqlstate, attempt, message FROM ruststream.failure;

-- also where the settlement is what fails
CREATE SEQUENCE settlements;
CREATE FUNCTION conflict_twice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF nextval('rs_lease.settlements') <= 2 THEN
		RAISE serialization_failure USING MESSAGE = 'could not serialize';
	END IF;
	RETURN OLD;
END $$;
CREATE TRIGGER conflict BEFORE DELETE ON bare FOR EACH ROW EXECUTE FUNCTION conflict_twice();
DELETE FROM effect;
SELECT ruststream.alter_subscription('bare', lease => '1 hour');
UPDATE bare SET payload = '{"do": "ack"}', locked_until = NULL;
CALL ruststream.drain('bare');
SELECT in_words(to_jsonb(b)) FROM bare AS b;
SELECT * FROM effect;
DROP TRIGGER conflict ON bare;

-- values that are stored apart from their rows, ids among them: with each delivery
CREATE TABLE apart (id text PRIMARY KEY, payload text, headers jsonb, locked_until timestamptz);
ALTER TABLE apart ALTER id SET STORAGE EXTERNAL, ALTER payload SET STORAGE EXTERNAL, ALTER headers SET STORAGE EXTERNAL;
SELECT ruststream.attach_queue('apart', 'id', payload_column => 'payload', headers_column => 'headers', locked_until_column => 'locked_until');
CREATE FUNCTION handle_apart(job text, d ruststream.delivery) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_lease.effect VALUES (left(d.id, 1) || length(d.id) || ' ' || length(job) || ' ' || length(d.headers->>'a'), 1);
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('apart', 'apart', 'handle_apart', workers => 0);
DELETE FROM effect;
INSERT INTO apart SELECT i || repeat('i', 2100), repeat('p', 10000 * i), jsonb_build_object('a', repeat('h', 3000 * i)) FROM generate_series(1, 4) AS i;
CALL ruststream.drain('apart');
SELECT id FROM effect ORDER BY id;

-- counters
SELECT subscription, lease_lost FROM ruststream.stat_subscription WHERE lease_lost > 0 ORDER BY 1;

-- A token that the column rounds would never be found again.
CREATE TABLE rounded (id bigint PRIMARY KEY, locked_until timestamptz(3));
SELECT ruststream.attach_queue('rounded', 'id', locked_until_column => 'locked_until');

-- At these levels a delivery does not see its lease extended.
CREATE FUNCTION nothing(jsonb) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.create_queue('rr', form => 'lease', isolation => 'repeatable read');
\set VERBOSITY default
SELECT ruststream.subscribe('rr', 'rr', 'nothing', workers => 0);
SELECT ruststream.subscribe('rr', 'rr', 'nothing', workers => 0, transactional => false);
SELECT ruststream.alter_subscription('rr', transactional => true);
SET default_transaction_isolation = 'serializable';
SELECT ruststream.subscribe('texts', 'texts', 'handle_text', workers => 0);
CALL ruststream.drain('texts');
RESET default_transaction_isolation;
\set VERBOSITY terse
SELECT ruststream.publish('rr', '1');
SET ruststream.trace = on;
CALL ruststream.drain('rr');
RESET ruststream.trace;

SET client_min_messages = error;
DROP SCHEMA rs_lease CASCADE;
