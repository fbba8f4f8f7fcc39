-- FIFO groups in the row lock form: of a group one row at a time, the head alone,
-- and the rows behind it wait for it.  What several sessions do to each other is in
-- the isolation tests, leases are in lines_lease.sql.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_fifo;
SET search_path = rs_fifo;

SELECT ruststream.create_queue('jobs', groups => true, fifo => true);

-- notes what it is given, and does what the payload says: until attempt "until"
CREATE TABLE noted (n int GENERATED ALWAYS AS IDENTITY, grp text, job text, attempt int);
CREATE FUNCTION work(j jobs, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_fifo.noted (grp, job, attempt) VALUES (j.group_name, j.payload->>'job', d.attempt);
	IF j.payload ? 'sql' THEN
		EXECUTE j.payload->>'sql';
	END IF;
	IF d.attempt > coalesce((j.payload->>'until')::int, 1000) THEN
		RETURN ruststream.ack();
	END IF;
	CASE j.payload->>'do'
		WHEN 'fail' THEN RAISE EXCEPTION 'failed';
		WHEN 'retry' THEN RETURN ruststream.retry();
		WHEN 'retry_after' THEN RETURN ruststream.retry_after(coalesce(j.payload->>'delay', '1 hour')::interval);
		WHEN 'discard' THEN RETURN ruststream.discard();
		WHEN 'dead_letter' THEN RETURN ruststream.dead_letter();
		ELSE RETURN ruststream.ack();
	END CASE;
END $$;
-- an answer that keeps its place leaves no trace of the handler's, so a sequence notes those
CREATE SEQUENCE calls;

-- what was handled, in order; and what is left
CREATE FUNCTION handled() RETURNS text
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM rs_fifo.noted RETURNING *)
	SELECT string_agg(grp || job || CASE attempt WHEN 1 THEN '' ELSE '#' || attempt END, ' ' ORDER BY n) FROM gone $$;
CREATE FUNCTION handled_by_group() RETURNS text
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM rs_fifo.noted RETURNING *)
	SELECT string_agg(grp || job || CASE attempt WHEN 1 THEN '' ELSE '#' || attempt END, ' ' ORDER BY grp, n) FROM gone $$;
CREATE FUNCTION waiting() RETURNS text
LANGUAGE sql AS $$ SELECT string_agg(group_name || (payload->>'job'), ' ' ORDER BY group_name, priority NULLS FIRST, retry_after NULLS FIRST, id) FROM rs_fifo.jobs $$;
CREATE FUNCTION add(grp text, job text, payload jsonb DEFAULT '{}', priority int DEFAULT NULL, delay interval DEFAULT NULL) RETURNS void
LANGUAGE sql AS $$ SELECT ruststream.publish('rs_fifo.jobs', payload || jsonb_build_object('job', job), grp, priority, delay) $$;

SELECT ruststream.subscribe('a', 'jobs', 'work', workers => 0, retry_delay => '0');
SELECT ruststream.subscribe('b', 'jobs', 'work', workers => 0);

-- the order within the group is the queue's; other groups are other subscriptions'
SELECT add(g, i::text, priority => 3 - i / 3) FROM generate_series(1, 5) AS i, unnest('{a,b}'::text[]) AS g;
CALL ruststream.drain('a');
SELECT handled(), waiting();
CALL ruststream.drain('b');
SELECT handled(), waiting();

-- a head that is not due: the rows behind it wait, be they due themselves; other groups do not
SELECT add('a', '1', priority => 1, delay => '1 hour'), add('a', '2', priority => 2), add('b', '1');
CALL ruststream.drain('a');
SELECT handled(), waiting();
CALL ruststream.drain('b');
SELECT handled(), waiting();
-- a row that enters ahead is the head
SELECT add('a', '0', priority => 0);
CALL ruststream.drain('a');
SELECT handled(), waiting();
UPDATE jobs SET retry_after = now();
CALL ruststream.drain('a');
SELECT handled(), waiting();

-- what the handler enters ahead comes next, however soon; what it enters behind does not
SELECT add('a', '2', jsonb_build_object('sql', $$SELECT rs_fifo.add('a', '1', priority => -1), rs_fifo.add('a', '4', priority => 1)$$)), add('a', '3');
CALL ruststream.drain('a');
SELECT handled(), waiting();

-- retry keeps its place: nothing of the group goes ahead
SELECT add('a', '1', '{"do": "retry", "until": 3, "sql": "SELECT nextval(''rs_fifo.calls'')"}'), add('a', '2');
CALL ruststream.drain('a');
SELECT handled(), waiting(), currval('calls') AS calls;
-- .. nor while it is left alone after an error
SELECT ruststream.alter_subscription('a', on_error => 'retry', retry_delay => '50 ms');
SELECT add('a', '1', '{"do": "fail", "until": 2}'), add('a', '2');
SET client_min_messages = error;
CALL ruststream.drain('a');
RESET client_min_messages;
SELECT handled(), waiting();
SELECT ruststream.alter_subscription('a', reset => '{on_error,retry_delay}');

-- retry_after moves it behind the rows that are due earlier, and those behind it wait
SELECT add('a', '1', '{"do": "retry_after", "until": 1}'), add('a', '2'), add('a', '4', priority => 1);
CALL ruststream.drain('a');
SELECT handled(), waiting();
-- .. also behind one that comes due before it
SELECT add('a', '3', delay => '30 min');
CALL ruststream.drain('a');
SELECT handled(), waiting();
UPDATE jobs SET retry_after = retry_after - interval '2 hours';
CALL ruststream.drain('a');
SELECT handled(), waiting();

-- discard, and a row that does not decode, end the head
CREATE FUNCTION number(p jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO rs_fifo.noted (grp, job, attempt) VALUES ('n', p, 1) $$;
CREATE TABLE numbers (id int PRIMARY KEY, grp text, payload text);
CREATE INDEX ON numbers (grp, id);
SELECT ruststream.attach_queue('numbers', 'id', group_column => 'grp', fifo => true, payload_column => 'payload');
SELECT ruststream.subscribe('n', 'numbers', 'number', workers => 0, on_decode_error => 'discard');
INSERT INTO numbers VALUES (1, 'n', '1'), (2, 'n', 'two'), (3, 'n', '3');
SET client_min_messages = error;
CALL ruststream.drain('n');
RESET client_min_messages;
SELECT handled(), (SELECT count(*) FROM numbers) AS left;
SELECT add('a', '1', '{"do": "discard"}'), add('a', '2');
CALL ruststream.drain('a');
SELECT handled(), waiting();

-- at its cap the head moves out, and the next one is the head; the group it moves to is
-- another subscription's
SELECT ruststream.subscribe('dead', 'jobs', 'work', workers => 0);
SELECT ruststream.alter_subscription('a', dead_letter => 'dead', max_attempts => 2, retry_delay => '0', on_error => 'retry');
SELECT add('a', '1', '{"do": "fail", "until": 2}'), add('a', '2', '{"do": "dead_letter", "until": 1}'), add('a', '3');
SET client_min_messages = error;
CALL ruststream.drain('a');
RESET client_min_messages;
SELECT handled(), waiting();
SELECT subscription, ready, dead FROM ruststream.status WHERE subscription IN ('a', 'dead') ORDER BY 1;
CALL ruststream.drain('dead', 1);
SELECT handled(), waiting();
DELETE FROM jobs;
-- out of the table as well
CREATE TABLE dead_numbers (LIKE numbers INCLUDING ALL);
SELECT ruststream.alter_subscription('n', dead_letter => 'dead_numbers', reset => '{on_decode_error}');
INSERT INTO numbers VALUES (1, 'n', 'one'), (2, 'n', '2');
SET client_min_messages = error;
CALL ruststream.drain('n');
RESET client_min_messages;
SELECT handled(), (SELECT string_agg(id::text, ' ') FROM dead_numbers) AS dead;

-- a settlement that fails is an error that delays, wherever there are delays
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON jobs FOR EACH ROW WHEN (old.payload->>'job' = '1' AND old.attempt < 2) EXECUTE FUNCTION refuse();
SELECT add('a', '1'), add('a', '2');
SET client_min_messages = error;
CALL ruststream.drain('a');
RESET client_min_messages;
SELECT handled(), waiting();
DROP TRIGGER refuse ON jobs;

-- while its handler runs the delivery holds the guard, under both of its names, and not behind it
SELECT add('a', '1', jsonb_build_object('sql', $$
	INSERT INTO rs_fifo.noted (grp, job, attempt)
	SELECT 'guards', count(*), 1 FROM pg_locks
	WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND objsubid = 1 AND classid::bigint << 32 | objid::bigint IN (
		hashtextextended('jobs:a', 0), hashtextextended('rs_fifo.jobs:a', 0))$$));
CALL ruststream.drain('a');
SELECT handled(), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) AS guards;

-- processed rows that are kept hold back nothing
SELECT ruststream.create_queue('kept', groups => true, fifo => true, keep_processed => true);
CREATE FUNCTION work_kept(p jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO rs_fifo.noted (grp, job, attempt) VALUES ('k', p->>'job', 1) $$;
SELECT ruststream.subscribe('kept', 'kept', 'work_kept', workers => 0);
SELECT count(ruststream.publish('kept', jsonb_build_object('job', i), 'kept')) FROM generate_series(1, 3) AS i;
CALL ruststream.drain('kept', 2);
CALL ruststream.drain('kept');
SELECT handled(), (SELECT count(*) FROM kept WHERE processed_at IS NOT NULL) AS processed;

-- repeatable read and serializable: each head as the one before it has left it
SELECT ruststream.create_queue('strict', groups => true, fifo => true, isolation => 'serializable');
SELECT ruststream.subscribe('strict', 'strict', 'work_kept', workers => 0, group_name => '*');
SELECT count(ruststream.publish('strict', jsonb_build_object('job', g || i), g)) FROM generate_series(1, 2) AS i, unnest('{x,y}'::text[]) AS g;
SET ruststream.trace = on;
CALL ruststream.drain('strict', 1);
RESET ruststream.trace;
CALL ruststream.drain('strict');
SELECT handled(), (SELECT count(*) FROM strict) AS left;

--
-- One subscription for every group
--
SELECT ruststream.subscribe('all', 'jobs', 'work', workers => 0, group_name => '*', dead_letter => 'dead', retry_delay => '50 ms', on_error => 'retry');
-- each group in its own order, the groups in turn
SELECT add(g, i::text, priority => CASE g WHEN 'c' THEN -i ELSE i END) FROM generate_series(1, 3) AS i, unnest('{a,b,c}'::text[]) AS g;
CALL ruststream.drain('all', 4);
SELECT handled(), waiting();
SELECT add('d', '1');
CALL ruststream.drain('all');
SELECT handled(), waiting();
-- heads that are not due, that fail, or that are dead letters, and those that go on
SELECT add('a', '1', priority => 0, delay => '1 hour'), add('a', '2', priority => 1),
	add('b', '1', '{"do": "fail", "until": 1}'), add('b', '2'),
	add('c', '1', '{"do": "dead_letter"}'), add('c', '2'), add('d', '1'), add('d', '2');
SET client_min_messages = error;
CALL ruststream.drain('all');
RESET client_min_messages;
SELECT handled_by_group(), waiting();
-- what is counted: every group but that of dead letters
SELECT subscription, ready, waiting, dead FROM ruststream.status WHERE subscription = 'all';
SELECT ruststream.alter_subscription('all', reset => '{dead_letter}');
SELECT subscription, ready, waiting, dead FROM ruststream.status WHERE subscription = 'all';
CALL ruststream.drain('all', 1);
SELECT handled(), waiting();
DELETE FROM jobs;
-- more groups than a portion of the walk has, ready, not ready and ready again
SELECT count(add('g' || lpad(i::text, 4, '0'), '', delay => CASE i % 50 WHEN 0 THEN NULL ELSE interval '1 hour' END)) FROM generate_series(1, 1000) AS i;
CALL ruststream.drain('all');
SELECT handled(), (SELECT count(*) FROM jobs) AS left;
UPDATE jobs SET retry_after = NULL WHERE group_name ~ '99$';
CALL ruststream.drain('all');
SELECT handled(), (SELECT count(*) FROM jobs) AS left;
UPDATE jobs SET retry_after = NULL;
CALL ruststream.drain('all');
SELECT (SELECT array_agg(grp ORDER BY n) = array_agg(grp ORDER BY grp) FROM noted) AS one_after_the_other, count(*) FROM noted;
SELECT handled() IS NOT NULL AS handled, (SELECT count(*) FROM jobs) AS left;
-- a row without a group is nobody's; groups may be of other types of text
CREATE DOMAIN label AS varchar(20);
CREATE TABLE labels (id int PRIMARY KEY, grp label);
CREATE INDEX ON labels (grp, id);
SELECT ruststream.attach_queue('labels', 'id', group_column => 'grp', fifo => true);
CREATE FUNCTION work_labels(l labels) RETURNS void LANGUAGE sql AS $$ INSERT INTO rs_fifo.noted (grp, job, attempt) VALUES (l.grp, l.id, 1) $$;
SELECT ruststream.subscribe('labels', 'labels', 'work_labels', workers => 0, group_name => '*');
INSERT INTO labels SELECT i, (ARRAY['x', 'y', 'it''s "odd": é', NULL])[i % 4 + 1] FROM generate_series(0, 7) AS i;
CALL ruststream.drain('labels');
SELECT handled(), (SELECT string_agg(id::text, ' ') FROM labels) AS left;

--
-- What is refused
--
CREATE FUNCTION refused(sql text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	state text; message text; hint text;
BEGIN
	EXECUTE sql;
	RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
	RETURN state || ' ' || message || E'\n -> ' || hint;
END $$;
SELECT ruststream.create_queue('plain', groups => true);
SELECT refused($$SELECT ruststream.subscribe('plain', 'plain', 'work_kept', group_name => '*')$$);
SELECT refused($$SELECT ruststream.subscribe('plain', 'jobs', 'work', group_name => 'x', dead_letter => 'x')$$);
SELECT refused($$SELECT ruststream.subscribe('plain', 'plain', 'work_kept', dead_letter => '*')$$);
CREATE TABLE bare (id int PRIMARY KEY, grp text, until timestamptz);
SET client_min_messages = error;
SELECT ruststream.attach_queue('bare', 'id', group_column => 'grp', fifo => true);
RESET client_min_messages;
CREATE FUNCTION work_bare(bare) RETURNS void LANGUAGE sql AS '';
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare')$$);
-- groups are walked through, so their order counts
CREATE INDEX ON bare (grp DESC, id);
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare')$$);
CREATE INDEX ON bare (grp, id);
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare', workers => 0)$$);
-- a row without a group is nobody's: it is not delivered, and does not count
INSERT INTO bare VALUES (1, 'a'), (2, NULL);
SELECT ruststream.subscribe('bare', 'bare', 'work_bare', group_name => '*', workers => 0);
SELECT ready FROM ruststream.status WHERE subscription = 'bare';
CALL ruststream.drain('bare');
SELECT ready, (SELECT count(*) FROM bare) FROM ruststream.status WHERE subscription = 'bare';
SELECT ruststream.detach_queue('bare');
SET client_min_messages = error;
SELECT ruststream.attach_queue('bare', 'id', group_column => 'grp', locked_until_column => 'until', fifo => true);
RESET client_min_messages;
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare')$$);
CREATE INDEX ON bare (grp, until);
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare')$$);
CREATE INDEX ON bare (grp, until) WHERE until IS NOT NULL;
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare', workers => 0)$$);
-- the name of a group is the name of its guard
CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
CREATE TABLE cased (id int PRIMARY KEY, grp text COLLATE any_case);
SELECT refused($$SELECT ruststream.attach_queue('cased', 'id', group_column => 'grp', fifo => true)$$);
SELECT refused($$SELECT ruststream.attach_queue('cased', 'id', partition_key_column => 'grp')$$);
SELECT refused($$SELECT ruststream.attach_queue('cased', 'id', group_column => 'grp')$$);

SET client_min_messages = error;
DROP SCHEMA rs_fifo CASCADE;
