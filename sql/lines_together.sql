-- Lines taken together: a batch, and a shared commit, have one row of each line (FIFO
-- group, partition key), in claim order, and never two of one.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_together;
SET search_path = rs_together;

CREATE TABLE taken (n int GENERATED ALWAYS AS IDENTITY, call int, line text, job text);
CREATE SEQUENCE calls;
-- what was taken: the lines and jobs of each call, or of each commit
CREATE FUNCTION taken() RETURNS TABLE (call bigint, rows text)
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM rs_together.taken RETURNING *),
		 sets AS (SELECT g.call, min(g.n) AS first, string_agg(g.line || g.job, ' ' ORDER BY g.n) AS rows FROM gone AS g GROUP BY 1)
	SELECT row_number() OVER (ORDER BY s.first), s.rows FROM sets AS s ORDER BY 1 $$;
CREATE FUNCTION add(queue regclass, line text, job text, priority int DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('INSERT INTO %s (%I, priority, payload) VALUES ($1, $2, $3)', queue,
		(SELECT attname FROM pg_attribute WHERE attrelid = queue AND attname IN ('group_name', 'partition_key')))
		USING line, priority, jsonb_build_object('line', line, 'job', job);
END $$;
CREATE FUNCTION fill(queue regclass) RETURNS void
LANGUAGE sql AS $$ SELECT count(rs_together.add(queue, line, job::text)) FROM generate_series(1, 3) AS job, unnest('{a,b,c}'::text[]) AS line $$;

--
-- Batches
--
SELECT ruststream.create_queue('keys', partition_key => true);
SELECT ruststream.create_queue('keys_leased', 'lease', partition_key => true);
SELECT ruststream.create_queue('keys_locked', 'advisory_lock', partition_key => true, lock_key => 'together-{id}');
SELECT ruststream.create_queue('groups', groups => true, fifo => true);

CREATE FUNCTION once(jobs keys[]) RETURNS ruststream.outcome[]
LANGUAGE plpgsql AS $$
DECLARE
	call bigint := nextval('rs_together.calls');
BEGIN
	INSERT INTO rs_together.taken (call, line, job) SELECT call, j.partition_key, j.payload->>'job' FROM unnest(jobs) AS j;
	-- the first of a is tried twice
	RETURN ARRAY(SELECT CASE WHEN j.partition_key = 'a' AND j.attempt = 1 THEN ruststream.retry() ELSE ruststream.ack() END
		FROM unnest(jobs) WITH ORDINALITY AS j ORDER BY j.ordinality);
END $$;
SELECT ruststream.subscribe('keys', 'keys', 'once', workers => 0, batch_size => 10);
SELECT fill('keys');
CALL ruststream.drain('keys');
SELECT * FROM taken();
SELECT count(*) FROM keys;

-- drain takes no more than it was asked for
SELECT fill('keys');
UPDATE keys SET attempt = 2;
CALL ruststream.drain('keys', 2);
SELECT * FROM taken();
CALL ruststream.drain('keys');
SELECT * FROM taken();

-- rows without a key stand in no line
SELECT count(add('keys', NULL, job::text)) FROM generate_series(1, 3) AS job;
SELECT add('keys', 'a', '4'), add('keys', 'a', '5');
UPDATE keys SET attempt = 2;
CALL ruststream.drain('keys');
SELECT rows FROM (SELECT call, string_agg(coalesce(line, '-') || job, ' ' ORDER BY n) AS rows FROM taken GROUP BY call) AS t ORDER BY call;
DELETE FROM taken;

-- advisory lock form: two rows of one key are never in one batch, though a session may have a lock twice
CREATE FUNCTION batch_locked(jobs keys_locked[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	call bigint := nextval('rs_together.calls');
BEGIN
	INSERT INTO rs_together.taken (call, line, job) SELECT call, j.partition_key, j.payload->>'job' FROM unnest(jobs) AS j;
END $$;
SELECT ruststream.subscribe('keys_locked', 'keys_locked', 'batch_locked', workers => 0, batch_size => 10);
SELECT fill('keys_locked');
CALL ruststream.drain('keys_locked');
SELECT * FROM taken();
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
-- many rows of one key do not hide the others
SELECT count(add('keys_locked', 'a', job::text, 0)) FROM generate_series(1, 20) AS job;
SELECT add('keys_locked', 'b', '1', 9), add('keys_locked', 'c', '1', 9);
CALL ruststream.drain('keys_locked');
SELECT count(*) AS calls, sum(cardinality(string_to_array(rows, ' '))) AS jobs, bool_and(rows !~ 'a.* a') AS one_of_each FROM taken();

-- FIFO groups, all of them: each group in its own order
CREATE FUNCTION batch_groups(jobs groups[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	call bigint := nextval('rs_together.calls');
BEGIN
	INSERT INTO rs_together.taken (call, line, job) SELECT call, j.group_name, j.payload->>'job' FROM unnest(jobs) AS j;
END $$;
SELECT ruststream.subscribe('groups', 'groups', 'batch_groups', workers => 0, batch_size => 10, group_name => '*');
SELECT fill('groups');
CALL ruststream.drain('groups');
SELECT * FROM taken();
-- one group: one row at a time
SELECT ruststream.subscribe('a', 'groups', 'batch_groups', workers => 0, batch_size => 10);
SELECT fill('groups');
CALL ruststream.drain('a');
SELECT * FROM taken();
DELETE FROM groups;

--
-- Shared commits
--
CREATE FUNCTION single(payload jsonb) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_together.taken (call, line, job) VALUES (pg_current_xact_id()::text::bigint % 1000000000, payload->>'line', payload->>'job');
	IF payload->>'line' = 'b' AND ruststream.attempt() = 1 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('keys', 'keys', 'single', workers => 0, deliveries_per_commit => 10, max_commit_wait => '60 s');
SELECT fill('keys');
SET client_min_messages = error;
CALL ruststream.drain('keys');
SELECT * FROM taken();
UPDATE keys SET retry_after = NULL;
CALL ruststream.drain('keys');
UPDATE keys SET retry_after = NULL;
CALL ruststream.drain('keys');
UPDATE keys SET retry_after = NULL;
CALL ruststream.drain('keys');
RESET client_min_messages;
SELECT string_agg(line || job, ' ' ORDER BY n) FROM taken;
DELETE FROM taken;
SELECT count(*) FROM keys;
SELECT ruststream.subscribe('groups', 'groups', 'single', workers => 0, group_name => '*', deliveries_per_commit => 10, max_commit_wait => '60 s', on_error => 'discard');
SELECT fill('groups');
SET client_min_messages = error;
CALL ruststream.drain('groups');
RESET client_min_messages;
SELECT * FROM taken();
SELECT count(*) FROM groups;

--
-- A row that fails transiently each time comes to its end, though others of other lines
-- succeed in between; alone, in a shared commit, in a batch
--
CREATE SEQUENCE tries;
CREATE FUNCTION hopeless(payload jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	IF payload->>'job' = 'hopeless' THEN
		PERFORM nextval('rs_together.tries');
		RAISE EXCEPTION 'not now' USING ERRCODE = '40001';
	END IF;
END $$;
CREATE FUNCTION hopeless_batch(jobs groups[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM rs_together.hopeless(j.payload) FROM unnest(jobs) AS j;
END $$;
CREATE FUNCTION fill_hopeless() RETURNS void
LANGUAGE sql AS $$
	SELECT setval('rs_together.tries', 1, false);
	SELECT rs_together.add('rs_together.groups', 'x', 'hopeless');
	SELECT count(rs_together.add('rs_together.groups', 'y' || i % 20, i::text)) FROM generate_series(1, 400) AS i;
$$;
SET client_min_messages = error;
SELECT ruststream.subscribe('groups', 'groups', 'hopeless', workers => 0, group_name => '*', on_error => 'discard');
SELECT fill_hopeless();
CALL ruststream.drain('groups', 300);
SELECT last_value, (SELECT count(*) FROM groups WHERE group_name = 'x') AS left_there, (SELECT count(*) FROM groups) FROM tries;
CALL ruststream.drain('groups');
SELECT ruststream.alter_subscription('groups', deliveries_per_commit => 10, max_commit_wait => '60 s');
SELECT fill_hopeless();
CALL ruststream.drain('groups', 300);
SELECT last_value, (SELECT count(*) FROM groups WHERE group_name = 'x') AS left_there, (SELECT count(*) FROM groups) FROM tries;
CALL ruststream.drain('groups');
SELECT ruststream.subscribe('groups', 'groups', 'hopeless_batch', workers => 0, group_name => '*', on_error => 'discard', batch_size => 5);
SELECT fill_hopeless();
CALL ruststream.drain('groups', 300);
SELECT last_value, (SELECT count(*) FROM groups WHERE group_name = 'x') AS left_there, (SELECT count(*) FROM groups) FROM tries;
CALL ruststream.drain('groups');

-- a row that cannot be settled holds up its own line, and not those whose commit it would
-- share, however many others there are in between
CREATE FUNCTION stuck() RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'stuck'; END $$;
CREATE TRIGGER stuck BEFORE DELETE ON groups FOR EACH ROW WHEN (OLD.payload->>'job' = 'stuck') EXECUTE FUNCTION stuck();
SELECT ruststream.subscribe('groups', 'groups', 'hopeless', workers => 0, group_name => '*', deliveries_per_commit => 10, max_commit_wait => '60 s', retry_delay => '1 hour');
SELECT count(add('groups', 'y' || i % 40, CASE WHEN i = 5 THEN 'stuck' ELSE i::text END)) FROM generate_series(0, 1199) AS i;
CALL ruststream.drain('groups', 600);
SELECT group_name, count(*) FROM groups GROUP BY 1 HAVING count(*) > 20;
SELECT attempt, count(*) FROM groups GROUP BY 1 ORDER BY 1;
DROP TRIGGER stuck ON groups;
DELETE FROM groups;
RESET client_min_messages;

-- at the levels that keep a snapshot a commit has one row of one line
SELECT ruststream.create_queue('strict', groups => true, fifo => true, isolation => 'repeatable read');
SELECT ruststream.subscribe('strict', 'strict', 'single', workers => 0, group_name => '*', deliveries_per_commit => 10, max_commit_wait => '60 s', on_error => 'discard');
SELECT count(add('strict', line, '1')) FROM unnest('{a,c}'::text[]) AS line;
CALL ruststream.drain('strict');
SELECT * FROM taken();

SET client_min_messages = error;
DROP SCHEMA rs_together CASCADE;
