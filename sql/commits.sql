-- Deliveries that share a commit: each keeps its own attempt, outcome and order,
-- and notices nothing of the others but what they have done.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
DROP ROLE IF EXISTS regress_rs_commits;
RESET client_min_messages;

CREATE SCHEMA rs_commits;
SET search_path = rs_commits;

CREATE TABLE jobs (id bigint PRIMARY KEY, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb);
CREATE INDEX ON jobs (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload');
CREATE TABLE dead (LIKE jobs);

-- What handlers write, and in which transaction.
CREATE TABLE effect (id text, attempt int, note text, xact xid8 DEFAULT pg_current_xact_id());

-- A handler that does as its payload says, once it has written.
CREATE FUNCTION handle(job jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_commits.effect VALUES (d.id, d.attempt, job->>'note');
	IF job ? 'sql' THEN
		EXECUTE job->>'sql';
	END IF;
	CASE job->>'do'
		WHEN 'retry' THEN RETURN ruststream.retry('once more');
		WHEN 'retry_after' THEN RETURN ruststream.retry_after('1 h', 'later');
		WHEN 'discard' THEN RETURN ruststream.discard('not wanted');
		WHEN 'dead_letter' THEN RETURN ruststream.dead_letter('hopeless');
		WHEN 'error' THEN RAISE EXCEPTION 'no good' USING ERRCODE = 'RS001';
		ELSE RETURN ruststream.ack();
	END CASE;
END $$;

SELECT ruststream.subscribe('work', 'jobs', 'handle', workers => 0, deliveries_per_commit => 10,
	max_commit_wait => '60 s', dead_letter => 'dead', retry_delay => '1 h');

-- One transaction a line: what was delivered in it, in this order.
CREATE VIEW commits AS
	SELECT row_number() OVER (ORDER BY min(n)) AS commit, string_agg(id || coalesce(': ' || note, ''), ', ' ORDER BY n) AS deliveries
	FROM (SELECT row_number() OVER (ORDER BY ctid) AS n, * FROM effect) AS e GROUP BY xact ORDER BY 1;
CREATE VIEW rows AS
	SELECT 'jobs' AS what, id, attempt, retry_after > clock_timestamp() AS delayed FROM jobs
	UNION ALL SELECT 'dead', id, attempt, retry_after > clock_timestamp() FROM dead ORDER BY 1 DESC, 2;
CREATE VIEW failures AS
	SELECT id, attempt, sqlstate, message FROM ruststream.failure WHERE subscription = 'work' ORDER BY at, id;

CREATE SEQUENCE tries;

-- Begin anew.
CREATE PROCEDURE fill(VARIADIC payloads jsonb[])
LANGUAGE sql AS $$
	TRUNCATE dead, effect;
	DELETE FROM jobs;
	ALTER SEQUENCE tries RESTART;
	INSERT INTO jobs (id, payload) SELECT n, p FROM unnest(payloads) WITH ORDINALITY AS u (p, n);
$$;

--
-- Order, outcomes, attempts
--
-- Every outcome in one commit.  A failing delivery undoes its own writes alone.
CALL fill('{}', '{"do": "error"}', '{"do": "retry_after"}', '{}', '{"do": "discard"}', '{"do": "dead_letter"}', '{}');
SET ruststream.trace = on;
CALL ruststream.drain('work');
RESET ruststream.trace;
TABLE commits;
TABLE rows;
TABLE failures;

-- So it is at a level at which all of them read one snapshot.
CREATE TABLE strict (LIKE jobs INCLUDING ALL);
SELECT ruststream.attach_queue('strict', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload', isolation => 'serializable');
SELECT ruststream.subscribe('strict', 'strict', 'handle', workers => 0, deliveries_per_commit => 10,
	max_commit_wait => '60 s', retry_delay => '1 h');
TRUNCATE effect;
INSERT INTO strict (id, payload) VALUES (1, '{}'), (2, '{"do": "error"}'), (3, '{}');
CALL ruststream.drain('strict');
TABLE commits;
SELECT id, attempt FROM strict;

-- So it is where the writes of a handler are kept whatever it answers.
SELECT ruststream.alter_subscription('work', transactional => false);
CALL fill('{}', '{"do": "error"}', '{"do": "retry_after"}', '{}');
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;
SELECT ruststream.alter_subscription('work', reset => '{transactional}');

-- A row that comes back at once is the next to be delivered, so the commit does not
-- wait for those behind it.
CALL fill('{}', '{}', '{}');
CREATE FUNCTION handle_twice(job jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_commits.effect VALUES (d.id, d.attempt);
	RETURN CASE WHEN d.id = '2' AND d.attempt < 3 THEN ruststream.retry() ELSE ruststream.ack() END;
END $$;
SELECT ruststream.alter_subscription('work', handler => 'handle_twice');
SET ruststream.trace = on;
CALL ruststream.drain('work');
RESET ruststream.trace;
SELECT id, attempt FROM effect ORDER BY ctid;
SELECT ruststream.alter_subscription('work', handler => 'handle');

-- At its last attempt a row moves, wherever it stands among the others.
SELECT ruststream.alter_subscription('work', max_attempts => 3);
CALL fill('{}', '{"do": "error"}', '{"do": "error"}', '{}');
UPDATE jobs SET attempt = 3 WHERE id = 2;
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;
SELECT ruststream.alter_subscription('work', reset => '{max_attempts}');

-- A payload that the handler does not take.
CREATE TABLE texts (id bigint PRIMARY KEY, payload text);
SELECT ruststream.attach_queue('texts', 'id', payload_column => 'payload');
SELECT ruststream.subscribe('texts', 'texts', 'handle', workers => 0, deliveries_per_commit => 10,
	max_commit_wait => '60 s', on_decode_error => 'discard');
TRUNCATE effect;
INSERT INTO texts VALUES (1, '{}'), (2, 'not JSON'), (3, '{}');
CALL ruststream.drain('texts');
TABLE commits;
SELECT count(*) FROM texts;

--
-- How many
--
-- No more than are asked for; no more than share a commit.
CALL fill('{}', '{}', '{}', '{}', '{}', '{}', '{}');
SELECT ruststream.alter_subscription('work', deliveries_per_commit => 3);
CALL ruststream.drain('work', 5);
TABLE commits;
TABLE rows;
CALL ruststream.drain('work', 0);
CALL ruststream.drain('work', 1);
TABLE commits;

-- Nothing is shared where there is no time for it; and rows that were claimed
-- behind a slow handler are released as they were.
SELECT ruststream.alter_subscription('work', deliveries_per_commit => 10, max_commit_wait => '0');
CALL fill('{}', '{}', '{}');
CALL ruststream.drain('work');
TABLE commits;
SELECT ruststream.alter_subscription('work', max_commit_wait => '1 ms');
CALL fill('{"sql": "SELECT pg_sleep(0.02)"}', '{"sql": "SELECT pg_sleep(0.02)"}', '{}');
SET ruststream.trace = on;
CALL ruststream.drain('work', 2);
RESET ruststream.trace;
TABLE commits;
TABLE rows;
SELECT ruststream.alter_subscription('work', max_commit_wait => '60 s');

-- A row that is not due is not waited for.
CALL fill('{}', '{}', '{}');
UPDATE jobs SET retry_after = clock_timestamp() + '1 h' WHERE id = 2;
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;

--
-- What fails outside of a handler
--
-- A settlement: nothing of any of them is left, and then they go one at a time.
-- That of the row at fault counts its attempt, and no other.
CREATE TABLE keeps (job bigint REFERENCES jobs);
CALL fill('{"note": "a"}', '{"note": "b"}', '{"note": "c"}');
INSERT INTO keeps VALUES (2);
SET ruststream.trace = on;
CALL ruststream.drain('work');
RESET ruststream.trace;
TABLE commits;
TABLE rows;
SELECT * FROM failures WHERE sqlstate = '23503';
DROP TABLE keeps;

-- The same where a settlement queues a trigger that is deferred: it is fired
-- before the next delivery, and the row that it belongs to is at fault.
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF nextval('rs_commits.tries') <= 2 THEN
		RAISE EXCEPTION 'row % may not wait', OLD.id;
	END IF;
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
	WHEN (OLD.id = 1) EXECUTE FUNCTION refuse();
CALL fill('{"do": "retry_after"}', '{}', '{}');
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;
DROP TRIGGER refuse ON jobs;

-- What is transient, wherever among them: everything is rolled back, nothing is counted.
CALL fill('{}', '{"sql": "DO $_$ BEGIN IF nextval(''rs_commits.tries'') <= 3 THEN RAISE ''not now'' USING ERRCODE = ''40001''; END IF; END $_$"}', '{}');
SET ruststream.trace = on;
CALL ruststream.drain('work');
RESET ruststream.trace;
SELECT id, attempt FROM effect ORDER BY ctid;
TABLE rows;

-- The COMMIT.
CREATE TABLE once (id bigint);
CREATE FUNCTION refuse_second() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT count(*) FROM rs_commits.once) > 1 THEN
		RAISE EXCEPTION 'no more than one';
	END IF;
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER once AFTER INSERT ON once DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse_second();
CALL fill('{"note": "a"}', '{"note": "b", "sql": "INSERT INTO rs_commits.once VALUES (1)"}',
	'{"note": "c", "sql": "INSERT INTO rs_commits.once VALUES (2)"}', '{"note": "d"}');
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;
DROP TABLE once;

-- Nothing loops hot, however many rows fail that cannot be delayed: none is tried
-- again before the retry delay has passed, whether they share commits or not.
CREATE TABLE hot (id bigint PRIMARY KEY, attempt int, payload jsonb);
SELECT ruststream.attach_queue('hot', 'id', attempt_column => 'attempt', payload_column => 'payload');
CREATE TABLE tried (id text, attempt int, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION handle_hot(job jsonb, d ruststream.delivery) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF d.attempt = 1 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	INSERT INTO rs_commits.tried VALUES (d.id, d.attempt);
END $$;
SELECT ruststream.subscribe('hot', 'hot', 'handle_hot', workers => 0, retry_delay => '200 ms', max_commit_wait => '60 s');
CREATE PROCEDURE drain_hot(size int) LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE tried;
	PERFORM ruststream.alter_subscription('hot', deliveries_per_commit => size);
	INSERT INTO hot SELECT n, 1, '{}' FROM generate_series(size * 10000 + 1, size * 10000 + greatest(size, 50)) AS n;
	COMMIT;
	CALL ruststream.drain('hot');
END $$;
SET client_min_messages = error;
CALL drain_hot(1);
SELECT count(*), max(t.attempt), bool_and(t.at >= f.at + interval '200 ms') FROM tried AS t JOIN ruststream.failure AS f USING (id);
CALL drain_hot(50);
SELECT count(*), max(t.attempt), bool_and(t.at >= f.at + interval '200 ms') FROM tried AS t JOIN ruststream.failure AS f USING (id);
-- It remembers 1,000 rows, so no more of them share a commit.  (Of those the history has 900 left, beside the other 100.)
CALL drain_hot(1100);
SELECT count(*), max(t.attempt), bool_and(t.at >= f.at + interval '200 ms') FROM tried AS t JOIN ruststream.failure AS f USING (id);
SELECT max(n) FROM (SELECT count(*) AS n FROM ruststream.failure_history WHERE subscription = 'hot' GROUP BY xmin) AS commits;
RESET client_min_messages;

--
-- What they see of each other
--
-- What a handler changes among the rows behind it holds.
CALL fill('{"sql": "DELETE FROM rs_commits.jobs WHERE id = 3"}', '{"note": "old", "sql": "UPDATE rs_commits.jobs SET retry_after = ''infinity'' WHERE id = 5"}',
	'{}', '{"sql": "UPDATE rs_commits.jobs SET payload = ''{\"note\": \"new\"}'' WHERE id = 6"}', '{}', '{"note": "old"}', '{}');
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;

-- Not what it changes and then fails.
CALL fill('{"do": "error", "sql": "DELETE FROM rs_commits.jobs WHERE id = 2"}', '{}', '{}');
CALL ruststream.drain('work');
TABLE commits;

-- What changes the subscription ends the transaction, too.
CALL fill('{}', '{"sql": "SELECT ruststream.pause(''work'')"}', '{}');
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;
SELECT ruststream.resume('work');
CALL ruststream.drain('work');

-- A constraint that is deferred is so for each of them, though firing one's makes
-- it immediate for those that follow in the transaction.  One that is not
-- deferrable fails at once.
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
CALL fill('{"note": "a"}',
	'{"note": "b", "sql": "INSERT INTO rs_commits.child VALUES (1); INSERT INTO rs_commits.parent VALUES (1)"}',
	'{"note": "c", "sql": "INSERT INTO rs_commits.child VALUES (2)"}',
	'{"note": "d", "sql": "INSERT INTO rs_commits.parent VALUES (1)"}',
	'{"note": "e"}');
CALL ruststream.drain('work');
TABLE commits;
TABLE rows;
SELECT id, message FROM failures WHERE message ~ 'child|parent';

-- Whatever a handler leaves behind is gone before the next.
CREATE ROLE regress_rs_commits;
CREATE FUNCTION leave(what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE CASE what
		WHEN 'setting' THEN 'SELECT set_config(''rs_commits.own'', ''left'', false), set_config(''work_mem'', ''7MB'', true)'
		WHEN 'path' THEN 'SET LOCAL search_path = pg_catalog'
		WHEN 'role' THEN 'SET ROLE regress_rs_commits'
		WHEN 'prepared' THEN 'PREPARE rs_commits_p AS SELECT 1'
		WHEN 'cursor' THEN 'DECLARE rs_commits_c CURSOR FOR SELECT 1'
		WHEN 'hold' THEN 'DECLARE rs_commits_h CURSOR WITH HOLD FOR SELECT 1'
		WHEN 'table' THEN 'CREATE TEMP TABLE rs_commits_t ()'
		WHEN 'lock' THEN 'SELECT pg_advisory_lock(7, 42)'
		WHEN 'listen' THEN 'LISTEN rs_commits_l'
	END;
END $$;
CREATE FUNCTION look() RETURNS text LANGUAGE sql AS $$
	SELECT concat_ws(' ', NULLIF(current_setting('rs_commits.own', true), ''), current_setting('work_mem'),
		NULLIF(current_setting('search_path'), 'rs_commits'), NULLIF(current_user, session_user),
		(SELECT string_agg(name, ' ') FROM pg_prepared_statements), (SELECT string_agg(name, ' ') FROM pg_cursors WHERE name ~ 'rs_commits'),
		(SELECT string_agg(relname, ' ') FROM pg_class WHERE relnamespace = pg_my_temp_schema()),
		(SELECT string_agg('lock', ' ') FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
		(SELECT string_agg(l, ' ') FROM pg_listening_channels() AS l))
$$;
CREATE FUNCTION handle_leave(job jsonb, d ruststream.delivery) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_commits.effect VALUES (d.id, d.attempt, rs_commits.look());
	PERFORM rs_commits.leave(job->>'leave');
	-- Nor does it stay where its writes are undone.
	RETURN CASE WHEN job ? 'do' THEN ruststream.discard() ELSE ruststream.ack() END;
END $$;
SET work_mem = '4MB';
SELECT ruststream.alter_subscription('work', handler => 'handle_leave');
TRUNCATE jobs, effect;
INSERT INTO jobs (id, payload)
	SELECT row_number() OVER (ORDER BY k.n, w.n), jsonb_build_object('leave', what) || kept
	FROM unnest('{setting,path,role,prepared,cursor,hold,table,lock,listen}'::text[]) WITH ORDINALITY AS w (what, n),
		unnest('{"{}", "{\"do\": \"discard\"}"}'::jsonb[]) WITH ORDINALITY AS k (kept, n);
INSERT INTO jobs VALUES (100, NULL, 1, '{"leave": "setting"}');
CALL ruststream.drain('work');
-- What was acked is here, with what it has seen when it began; all alike.
SELECT count(*), note FROM effect GROUP BY note;
SELECT look();
SELECT string_agg(id, ' ' ORDER BY id::int) AS share_a_commit FROM effect GROUP BY xact ORDER BY min(id::int);

-- Nor what a trigger of a settlement has set.
CREATE FUNCTION set_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM set_config('work_mem', '9MB', false), set_config('rs_commits.own', 'trigger', true);
	RETURN OLD;
END $$;
CREATE TRIGGER set_trigger BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION set_trigger();
TRUNCATE jobs, effect;
INSERT INTO jobs (id, payload) SELECT n, '{"leave": "setting"}' FROM generate_series(1, 3) AS n;
CALL ruststream.drain('work');
TABLE commits;
DROP TRIGGER set_trigger ON jobs;
RESET work_mem;

--
-- Subtransactions
--
-- Each that writes is advertised to every other session, and there is room for 64:
-- a commit comes before one more delivery could need more.
CREATE FUNCTION handle_blocks(job jsonb, d ruststream.delivery) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. (job->>'blocks')::int LOOP
		BEGIN
			INSERT INTO rs_commits.effect VALUES (d.id, i);
		EXCEPTION WHEN division_by_zero THEN NULL;
		END;
	END LOOP;
END $$;
SELECT ruststream.alter_subscription('work', handler => 'handle_blocks', deliveries_per_commit => 1000);
CREATE VIEW sharing AS SELECT count(DISTINCT id) AS deliveries, count(*) AS blocks FROM effect GROUP BY xact ORDER BY min(id::int);
TRUNCATE jobs, effect;
INSERT INTO jobs (id, payload) SELECT n, '{"blocks": 1}' FROM generate_series(1, 70) AS n;
CALL ruststream.drain('work');
TABLE sharing;
TRUNCATE effect;
INSERT INTO jobs (id, payload) SELECT n, '{"blocks": 10}' FROM generate_series(1, 12) AS n;
CALL ruststream.drain('work');
TABLE sharing;
-- One that needs more than there is room for has its commit to itself; and what
-- does not fit into a commit is not claimed for long.
TRUNCATE effect;
INSERT INTO jobs (id, payload) SELECT n, '{"blocks": 80}' FROM generate_series(1, 4) AS n;
SET ruststream.trace = on;
CALL ruststream.drain('work');
RESET ruststream.trace;
TABLE sharing;
-- Where nothing is written there are none.
CREATE FUNCTION handle_nothing(job jsonb) RETURNS ruststream.outcome LANGUAGE sql AS 'SELECT ruststream.ack()';
SELECT ruststream.alter_subscription('work', handler => 'handle_nothing');
INSERT INTO jobs (id, payload) SELECT n, '{}' FROM generate_series(1, 1001) AS n;
CREATE FUNCTION count_commits() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_commits.effect VALUES (OLD.id);
	RETURN OLD;
END $$;
CREATE TRIGGER count_commits BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION count_commits();
TRUNCATE effect;
CALL ruststream.drain('work');
TABLE sharing;

SET client_min_messages = error;
SELECT ruststream.unsubscribe(s) FROM unnest('{work,texts,strict,hot}'::text[]) AS s;
DROP SCHEMA rs_commits CASCADE;
DROP ROLE regress_rs_commits;
