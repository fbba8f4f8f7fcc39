-- The timeout of a subscription: a handler past it is cancelled, its writes are
-- undone, and it counts as a failure.  Nothing here depends on how long anything
-- takes: what is to be cancelled would go on for an hour, and what is not has an
-- hour's time.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_timeout;
SET search_path = rs_timeout;

CREATE TABLE notes (id bigint, attempt int, note text);
CREATE VIEW failures AS
SELECT id, attempt, sqlstate, message, detail, hint FROM ruststream.failure ORDER BY at;

-- Sleeps an hour where it is told to, in one of several ways, and notes what it does.
CREATE FUNCTION serve(payload jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO notes VALUES (d.id::bigint, d.attempt, 'began');
	IF d.attempt > 1 THEN
		RETURN ruststream.ack();
	END IF;
	CASE payload->>'how'
		WHEN 'sleep' THEN PERFORM pg_sleep(3600);
		WHEN 'loop' THEN
			LOOP
				NULL;
			END LOOP;
		WHEN 'swallow' THEN
			BEGIN
				PERFORM pg_sleep(3600);
			EXCEPTION WHEN query_canceled THEN
				INSERT INTO notes VALUES (d.id::bigint, d.attempt, 'swallowed');
			END;
		WHEN 'turn' THEN
			BEGIN
				PERFORM pg_sleep(3600);
			EXCEPTION WHEN query_canceled THEN
				RAISE EXCEPTION 'I was not ready' USING ERRCODE = 'serialization_failure';
			END;
		WHEN 'others' THEN
			BEGIN
				PERFORM pg_sleep(3600);
			EXCEPTION WHEN OTHERS THEN
				NULL;
			END;
		WHEN 'raise' THEN RAISE query_canceled USING MESSAGE = 'by the handler itself';
		ELSE NULL;
	END CASE;
	RETURN ruststream.ack();
END $$;

-- row lock form
SELECT ruststream.create_queue('jobs');
SELECT ruststream.subscribe('jobs', 'jobs', 'serve', workers => 0, timeout => '500 ms', retry_delay => '0');
SELECT ruststream.publish('jobs', jsonb_build_object('how', how))
FROM unnest(ARRAY['sleep', 'loop', 'swallow', 'turn', 'others', 'raise', 'none']) AS how;
CALL ruststream.drain('jobs');
SELECT * FROM notes ORDER BY id, attempt, note;
SELECT * FROM failures;
SELECT count(*) FROM jobs;
TRUNCATE notes;

-- The deferred triggers of its writes belong to the handler, too.
CREATE TABLE slow (id bigint);
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_sleep(3600);
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION slow();
CREATE FUNCTION defer(payload jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF ruststream.attempt() = 1 THEN
		INSERT INTO slow VALUES (1);
	END IF;
END $$;
SELECT ruststream.alter_subscription('jobs', handler => 'defer');
SELECT ruststream.publish('jobs', '{}');
CALL ruststream.drain('jobs');
SELECT count(*) FROM slow;

-- The timeout is over with the handler: the settlement has all the time that it takes.
CREATE FUNCTION slow_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_sleep(1);
	RETURN OLD;
END $$;
CREATE TRIGGER slow_end BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION slow_end();
SELECT ruststream.publish('jobs', '{}');
SELECT ruststream.alter_subscription('jobs', handler => 'serve', timeout => '500 ms');
CALL ruststream.drain('jobs');
SELECT * FROM notes;
SELECT count(*) FROM jobs;
DROP TRIGGER slow_end ON jobs;
TRUNCATE notes;

-- The error policy and the cap hold for it as for any failure.
SELECT ruststream.alter_subscription('jobs', on_error => 'discard', timeout => '500 ms');
SELECT ruststream.publish('jobs', '{"how": "sleep"}');
CALL ruststream.drain('jobs');
SELECT count(*) FROM jobs;

-- No timeout any more; and a very long one.
SELECT ruststream.alter_subscription('jobs', reset => ARRAY['timeout', 'on_error']);
SELECT ruststream.publish('jobs', '{}');
CALL ruststream.drain('jobs');
SELECT ruststream.alter_subscription('jobs', timeout => '36500 days');
SELECT ruststream.publish('jobs', '{}');
CALL ruststream.drain('jobs');
SELECT ruststream.alter_subscription('jobs', timeout => '0');
SELECT * FROM notes ORDER BY id;
TRUNCATE notes;

-- A cancel of the session is nobody's failure, and ends the drain.
SELECT ruststream.alter_subscription('jobs', timeout => '1 hour');
SELECT ruststream.publish('jobs', '{"how": "sleep"}');
SET statement_timeout = '100ms';
CALL ruststream.drain('jobs');
RESET statement_timeout;
SELECT id, attempt FROM jobs;
SELECT count(*) FROM notes;
DELETE FROM jobs;

-- A subscription that is not transactional keeps nothing of what was cancelled.
SELECT ruststream.alter_subscription('jobs', transactional => false, timeout => '500 ms');
SELECT ruststream.publish('jobs', jsonb_build_object('how', how))
FROM unnest(ARRAY['sleep', 'swallow']) AS how;
CALL ruststream.drain('jobs');
SELECT attempt, note, count(*) FROM notes GROUP BY 1, 2;
TRUNCATE notes;

-- advisory lock form, and a procedure: what it has committed stays
SELECT ruststream.create_queue('keyed', form => 'advisory_lock', lock_key => 'k-{id}');
SELECT ruststream.subscribe('keyed', 'keyed', 'serve', workers => 0, timeout => '500 ms');
SELECT ruststream.publish('keyed', jsonb_build_object('how', how))
FROM unnest(ARRAY['sleep', 'swallow']) AS how;
CALL ruststream.drain('keyed', 2);
SELECT id, attempt FROM keyed ORDER BY id;
SELECT count(*) FROM notes;
DELETE FROM keyed;
CREATE PROCEDURE step(payload jsonb, d ruststream.delivery) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO notes VALUES (d.id::bigint, d.attempt, 'first');
	COMMIT;
	INSERT INTO notes VALUES (d.id::bigint, d.attempt, 'second');
	PERFORM pg_sleep(CASE WHEN d.attempt = 1 THEN 3600 ELSE 0 END);
END $$;
SELECT ruststream.alter_subscription('keyed', transactional => false, handler => 'step', retry_delay => '0');
SELECT ruststream.publish('keyed', '{}');
CALL ruststream.drain('keyed');
SELECT attempt, note FROM notes;
SELECT id, attempt, sqlstate, message FROM failures WHERE id = '3';

SET client_min_messages = error;
DROP SCHEMA rs_timeout CASCADE;
