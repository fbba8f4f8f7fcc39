-- Partition keys: the rows of one key go one at a time in claim order, different keys
-- side by side.  In the row lock and advisory lock forms; leases are in lines_lease.sql.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_partition;
SET search_path = rs_partition;

SELECT ruststream.create_queue('jobs', partition_key => true);
SELECT ruststream.create_queue('keyed', 'advisory_lock', partition_key => true, lock_key => 'job-{id}');

CREATE TABLE noted (n int GENERATED ALWAYS AS IDENTITY, key text, job text, attempt int);
CREATE FUNCTION work(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_partition.noted (key, job, attempt) VALUES (p->>'key', p->>'job', d.attempt);
	IF p ? 'sql' THEN
		EXECUTE p->>'sql';
	END IF;
	IF d.attempt > coalesce((p->>'until')::int, 1000) THEN
		RETURN ruststream.ack();
	END IF;
	CASE p->>'do'
		WHEN 'fail' THEN RAISE EXCEPTION 'failed';
		WHEN 'retry' THEN RETURN ruststream.retry();
		WHEN 'retry_after' THEN RETURN ruststream.retry_after('1 hour');
		WHEN 'dead_letter' THEN RETURN ruststream.dead_letter();
		ELSE RETURN ruststream.ack();
	END CASE;
END $$;
CREATE FUNCTION handled() RETURNS text
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM rs_partition.noted RETURNING *)
	SELECT string_agg(coalesce(key, '-') || job || CASE attempt WHEN 1 THEN '' ELSE '#' || attempt END, ' ' ORDER BY n) FROM gone $$;
CREATE FUNCTION handled_by_key() RETURNS text
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM rs_partition.noted RETURNING *)
	SELECT string_agg(coalesce(key, '-') || job || CASE attempt WHEN 1 THEN '' ELSE '#' || attempt END, ' ' ORDER BY key, n) FROM gone $$;
CREATE FUNCTION add(key text, job text, payload jsonb DEFAULT '{}', priority int DEFAULT NULL, delay interval DEFAULT NULL,
	queue regclass DEFAULT 'rs_partition.jobs') RETURNS void
LANGUAGE sql AS $$ SELECT ruststream.publish(queue, payload || jsonb_build_object('key', key, 'job', job), NULL, priority, delay, NULL, key) $$;

SELECT ruststream.subscribe('jobs', 'jobs', 'work', workers => 0, on_error => 'retry', retry_delay => '50 ms');

-- the queue's order holds within a key, and among keys as far as they are free
SELECT count(add(k, i::text, priority => 3 - i / 3)) FROM generate_series(1, 4) AS i, unnest('{a,b}'::text[]) AS k;
CALL ruststream.drain('jobs');
SELECT handled();
-- a row that is not due holds back no other of its key
SELECT add('a', '1', priority => 1, delay => '1 hour'), add('a', '2', priority => 2), add('a', '3', priority => 3), add('b', '1', priority => 4);
CALL ruststream.drain('jobs');
SELECT handled(), count(*) AS left FROM jobs;
UPDATE jobs SET retry_after = now();
CALL ruststream.drain('jobs');
SELECT handled(), count(*) AS left FROM jobs;
-- retry keeps its place before the others of its key, also while the row is left alone; other keys go on
SELECT add('a', '1', '{"do": "fail", "until": 2}'), add('a', '2'), add('b', '1'), add('b', '2');
SET client_min_messages = error;
CALL ruststream.drain('jobs');
RESET client_min_messages;
SELECT handled_by_key(), count(*) AS left FROM jobs;
-- a delay lets the others go
SELECT add('a', '1', '{"do": "retry_after"}'), add('a', '2'), add('a', '3');
CALL ruststream.drain('jobs');
SELECT handled(), count(*) AS left FROM jobs;
DELETE FROM jobs;
-- rows without a key stand in no line
SELECT add(NULL, '1', '{"do": "retry_after"}'), add(NULL, '2', priority => 2), add(NULL, '3', priority => 1), add('a', '1', priority => 1);
CALL ruststream.drain('jobs');
SELECT handled(), count(*) AS left FROM jobs;
DELETE FROM jobs;
-- what the handler enters ahead of its key comes first
SELECT add('a', '2', jsonb_build_object('sql', $$SELECT rs_partition.add('a', '1', priority => -1)$$), 0), add('a', '3', priority => 1);
CALL ruststream.drain('jobs');
SELECT handled(), count(*) AS left FROM jobs;

-- while its handler runs the delivery holds the guard, and not behind it
CREATE FUNCTION guards(name text) RETURNS bigint
LANGUAGE sql AS $$
	SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND objsubid = 1
		AND classid::bigint << 32 | objid::bigint = hashtextextended(name, 0) $$;
SELECT add('a', '1', jsonb_build_object('sql', $$INSERT INTO rs_partition.noted (key, job, attempt) SELECT 'guards', rs_partition.guards('rs_partition.jobs:key:a'), 1$$));
CALL ruststream.drain('jobs');
SELECT handled(), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) AS guards;

-- keys of every type, and what goes with groups
CREATE TABLE typed (id int PRIMARY KEY, grp text DEFAULT 'typed', small smallint, number int, big bigint, uid uuid, flag boolean, label varchar(10));
CREATE INDEX ON typed (grp, id);
CREATE FUNCTION work_typed(t typed) RETURNS void
LANGUAGE sql AS $$ INSERT INTO rs_partition.noted (key, job, attempt) SELECT 't', t.id, rs_partition.guards(format('rs_partition.typed:key:%s', key)) FROM
	(SELECT coalesce(t.small::text, t.number::text, t.big::text, t.uid::text, t.label, CASE t.flag WHEN true THEN 't' WHEN false THEN 'f' END) AS key) AS k $$;
CREATE FUNCTION try(key name) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('CREATE INDEX ON typed (grp, %I, id)', key);
	PERFORM ruststream.attach_queue('typed', 'id', group_column => 'grp', partition_key_column => key);
	PERFORM ruststream.subscribe('typed', 'typed', 'work_typed', workers => 0);
	RETURN key;
END $$;
SELECT try('small');
INSERT INTO typed (id, small) VALUES (1, -1), (2, -1), (3, 0);
CALL ruststream.drain('typed');
SELECT handled();
SELECT ruststream.detach_queue('typed'), try('number');
INSERT INTO typed (id, number) VALUES (1, -1), (2, -1), (3, 0);
CALL ruststream.drain('typed');
SELECT handled();
SELECT ruststream.detach_queue('typed'), try('big');
INSERT INTO typed (id, big) VALUES (1, -1), (2, -1), (3, 9223372036854775807);
CALL ruststream.drain('typed');
SELECT handled();
SELECT ruststream.detach_queue('typed'), try('uid');
INSERT INTO typed (id, uid) SELECT i, md5((i % 2)::text)::uuid FROM generate_series(1, 3) AS i;
CALL ruststream.drain('typed');
SELECT handled();
SELECT ruststream.detach_queue('typed'), try('flag');
INSERT INTO typed (id, flag) VALUES (1, true), (2, true), (3, false);
CALL ruststream.drain('typed');
SELECT handled();
SELECT ruststream.detach_queue('typed'), try('label');
INSERT INTO typed (id, label) VALUES (1, 'x'), (2, 'x'), (3, 'it''s: "é"'), (4, '');
INSERT INTO typed (id, grp, label) VALUES (5, 'other', 'x');
CALL ruststream.drain('typed');
SELECT handled(), (SELECT count(*) FROM typed) AS others;

-- serializable
SELECT ruststream.create_queue('strict', partition_key => true, isolation => 'serializable');
SET client_min_messages = error;
SELECT ruststream.subscribe('strict', 'strict', 'work', workers => 0);
RESET client_min_messages;
SELECT count(add(k, i::text, queue => 'strict')) FROM generate_series(1, 2) AS i, unnest('{a,b,NULL}'::text[]) AS k;
CALL ruststream.drain('strict');
SELECT handled(), count(*) AS left FROM strict;

--
-- Advisory lock form: the guard is the session's, beside the key of the row
--
SELECT ruststream.subscribe('keyed', 'keyed', 'work', workers => 0, on_error => 'retry', retry_delay => '50 ms');
SELECT count(add(k, i::text, priority => 3 - i / 3, queue => 'keyed')) FROM generate_series(1, 4) AS i, unnest('{a,b}'::text[]) AS k;
CALL ruststream.drain('keyed');
SELECT handled();
SELECT add('a', '1', priority => 1, delay => '1 hour', queue => 'keyed'), add('a', '2', priority => 2, queue => 'keyed'), add('b', '1', priority => 4, queue => 'keyed');
CALL ruststream.drain('keyed');
SELECT handled(), count(*) AS left FROM keyed;
DELETE FROM keyed;
SELECT add('a', '1', '{"do": "fail", "until": 2}', queue => 'keyed'), add('a', '2', queue => 'keyed'), add('b', '1', queue => 'keyed'), add(NULL, '1', queue => 'keyed');
SET client_min_messages = error;
CALL ruststream.drain('keyed');
RESET client_min_messages;
SELECT handled_by_key(), count(*) AS left FROM keyed;
SELECT add('a', '1', jsonb_build_object('sql', $$INSERT INTO rs_partition.noted (key, job, attempt) SELECT 'guards', rs_partition.guards('rs_partition.keyed:key:a'), 1$$), queue => 'keyed');
SET ruststream.trace = on;
CALL ruststream.drain('keyed');
RESET ruststream.trace;
SELECT handled(), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) AS guards;
-- a handler that gives the guard away has lost the row, and nothing stays locked
SELECT add('a', '1', '{"sql": "SELECT pg_advisory_unlock(hashtextextended(''rs_partition.keyed:key:a'', 0))"}', queue => 'keyed'), add('a', '2', queue => 'keyed');
SET client_min_messages = error;
CALL ruststream.drain('keyed', 1);
RESET client_min_messages;
SELECT handled(), (SELECT count(*) FROM keyed) AS left, (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) AS guards;
DELETE FROM keyed;
-- a caller's own lock stays the caller's
SELECT add('a', '1', queue => 'keyed');
SELECT pg_advisory_lock(hashtextextended('rs_partition.keyed:key:a', 0));
CALL ruststream.drain('keyed');
SELECT handled(), pg_advisory_unlock(hashtextextended('rs_partition.keyed:key:a', 0)) AS unlocked, (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) AS guards;

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
CREATE TABLE bare (id int PRIMARY KEY, customer text, at timestamptz);
SELECT ruststream.attach_queue('bare', 'id', partition_key_column => 'customer', retry_after_column => 'at');
CREATE FUNCTION work_bare(bare) RETURNS void LANGUAGE sql AS '';
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare', workers => 0)$$);
CREATE INDEX ON bare (at NULLS FIRST, id);
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare', workers => 0)$$);
CREATE INDEX ON bare (customer DESC, at NULLS FIRST, id);
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare', workers => 0)$$);
CREATE INDEX ON bare (customer, at NULLS FIRST, id);
SELECT refused($$SELECT ruststream.subscribe('bare', 'bare', 'work_bare', workers => 0)$$);
SELECT refused($$SELECT ruststream.subscribe('jobs', 'jobs', 'work', group_name => '*')$$);

SET client_min_messages = error;
DROP SCHEMA rs_partition CASCADE;
