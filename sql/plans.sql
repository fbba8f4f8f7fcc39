-- Our statements never read a queue from end to end, whatever its statistics
-- say, and a claim locks the row it takes and no other.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_plans;
SET search_path = rs_plans;

CREATE TABLE jobs (id bigint PRIMARY KEY, grp text NOT NULL DEFAULT 'plans', priority int, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb)
	WITH (autovacuum_enabled = false);
CREATE INDEX ON jobs (grp, priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', group_column => 'grp', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', payload_column => 'payload');
CREATE TABLE kept (id bigint PRIMARY KEY, processed_at timestamptz, payload jsonb) WITH (autovacuum_enabled = false);
CREATE INDEX ON kept (id) WHERE processed_at IS NULL;
SELECT ruststream.attach_queue('kept', 'id', processed_at_column => 'processed_at', payload_column => 'payload');
CREATE TABLE kept_dead (LIKE kept INCLUDING INDEXES);
CREATE TABLE parts (id bigint PRIMARY KEY, attempt int, payload jsonb) PARTITION BY HASH (id);
CREATE TABLE parts_0 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (autovacuum_enabled = false);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (autovacuum_enabled = false);
SELECT ruststream.attach_queue('parts', 'id', attempt_column => 'attempt', payload_column => 'payload');

-- the handler of row 0 fills its queue, while its plans are those of an empty one
CREATE FUNCTION handle(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	IF p ? 'sql' THEN
		EXECUTE p->>'sql';
	END IF;
	RETURN CASE p->>'do' WHEN 'retry' THEN CASE d.attempt WHEN 1 THEN ruststream.retry() ELSE ruststream.ack() END
		WHEN 'retry_after' THEN ruststream.retry_after('1 hour') WHEN 'discard' THEN ruststream.discard()
		WHEN 'dead_letter' THEN ruststream.dead_letter() ELSE ruststream.ack() END;
END $$;
CREATE FUNCTION job(i bigint) RETURNS jsonb
LANGUAGE sql AS $$ SELECT jsonb_build_object('do', (ARRAY['ack', 'retry', 'retry_after', 'discard', 'dead_letter'])[i % 5 + 1]) $$;

SELECT ruststream.subscribe('plans', 'jobs', 'handle', workers => 0, dead_letter => 'dead');
SELECT ruststream.subscribe('plans kept', 'kept', 'handle', workers => 0, dead_letter => 'kept_dead');
SELECT ruststream.subscribe('plans parts', 'parts', 'handle', workers => 0);

-- How often the tables of this schema have been scanned from end to end.
CREATE FUNCTION seq_scans() RETURNS bigint
LANGUAGE sql AS $$ SELECT sum(seq_scan)::bigint FROM pg_stat_user_tables WHERE schemaname = 'rs_plans' AND relname ~ '^(jobs|kept|parts)' $$;

\set flush 'DO ''BEGIN PERFORM pg_stat_force_next_flush(); END'';'
-- they are counted
:flush
SELECT seq_scans() AS before \gset
SET enable_indexscan = off;
SET enable_indexonlyscan = off;
SET enable_bitmapscan = off;
SELECT count(*) FROM jobs WHERE id = 1;
SELECT count(*) FROM parts WHERE id = 1;
RESET enable_indexscan;
RESET enable_indexonlyscan;
RESET enable_bitmapscan;
:flush
SELECT seq_scans() - :before AS sequential_scans;

-- empty when the plans are made, then 20,000 rows
INSERT INTO jobs (id, payload) VALUES (0, '{"sql": "INSERT INTO rs_plans.jobs (id, payload) SELECT i, rs_plans.job(i) FROM generate_series(1, 20000) AS i"}');
INSERT INTO kept (id, payload) VALUES (0, '{"sql": "INSERT INTO rs_plans.kept (id, payload) SELECT i, rs_plans.job(i) FROM generate_series(1, 20000) AS i WHERE i % 5 > 2 OR i % 5 = 0"}');
INSERT INTO parts (id, payload) VALUES (0, '{"sql": "INSERT INTO rs_plans.parts (id, payload) SELECT i, rs_plans.job(i) FROM generate_series(1, 20000) AS i WHERE i % 5 NOT IN (2, 4)"}');
:flush
SELECT seq_scans() AS before \gset
CALL ruststream.drain('plans', 20);
CALL ruststream.drain('plans kept', 20);
CALL ruststream.drain('plans parts', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
-- no statistics, but a look at the size
CALL ruststream.drain('plans', 20);
CALL ruststream.drain('plans kept', 20);
CALL ruststream.drain('plans parts', 20);
-- statistics
ANALYZE jobs, kept, parts;
CALL ruststream.drain('plans', 20);
CALL ruststream.drain('plans kept', 20);
CALL ruststream.drain('plans parts', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
-- statistics that say: there are hardly any rows
UPDATE pg_class SET reltuples = 1, relpages = 1 WHERE relnamespace = 'rs_plans'::regnamespace AND relkind IN ('r', 'i');
CALL ruststream.drain('plans', 20);
CALL ruststream.drain('plans kept', 20);
CALL ruststream.drain('plans parts', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
-- a caller whose settings forbid what we need, and want what we must not do
SET enable_indexscan = off;
SET enable_seqscan = on;
SET enable_bitmapscan = on;
SET random_page_cost = 10000;
SET plan_cache_mode = force_custom_plan;
CALL ruststream.drain('plans', 20);
CALL ruststream.drain('plans kept', 20);
CALL ruststream.drain('plans parts', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
SHOW enable_indexscan;
RESET enable_indexscan;
RESET enable_seqscan;
RESET enable_bitmapscan;
RESET random_page_cost;
RESET plan_cache_mode;
-- what waits is counted in the same way
SELECT subscription, ready > 0 AS ready FROM ruststream.status WHERE subscription ~ '^plans' ORDER BY 1;
SELECT queue, ready > 0 AS ready FROM ruststream.stat_queue WHERE queue IN ('jobs'::regclass, 'kept', 'parts') ORDER BY queue::text;
:flush
SELECT seq_scans() - :before AS sequential_scans;
-- rows that are not due in front of those that are; none that is due at all
UPDATE jobs SET retry_after = '3000-01-01', priority = -1 WHERE id > 1000;
:flush
SELECT seq_scans() AS before \gset
CALL ruststream.drain('plans', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
UPDATE jobs SET retry_after = '3000-01-01';
:flush
SELECT seq_scans() AS before \gset
CALL ruststream.drain('plans', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
-- settlements that fail
CREATE FUNCTION refuse() RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
CREATE TRIGGER t BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION refuse();
UPDATE jobs SET retry_after = NULL, payload = '{}' WHERE id BETWEEN 1001 AND 1003;
:flush
SELECT seq_scans() AS before \gset
CALL ruststream.drain('plans', 3);
:flush
SELECT seq_scans() - :before AS sequential_scans;
DROP TRIGGER t ON jobs;
-- a handler that has ended its own row
UPDATE jobs SET retry_after = NULL, payload = jsonb_build_object('sql', 'DELETE FROM rs_plans.jobs WHERE id = ' || id) WHERE id BETWEEN 2001 AND 2003;
:flush
SELECT seq_scans() AS before \gset
CALL ruststream.drain('plans', 3);
:flush
SELECT seq_scans() - :before AS sequential_scans;
SELECT count(*) FROM jobs WHERE id BETWEEN 2001 AND 2003;

-- exactly the claimed row is locked: no other bears a lock's mark
CREATE TABLE locks (id int PRIMARY KEY, priority int, payload jsonb) WITH (autovacuum_enabled = false);
CREATE INDEX ON locks (priority NULLS FIRST, id);
SELECT ruststream.attach_queue('locks', 'id', priority_column => 'priority', payload_column => 'payload');
SELECT ruststream.subscribe('plans locks', 'locks', 'handle', workers => 0);
INSERT INTO locks SELECT i, i % 10, '{}' FROM generate_series(1, 20000) AS i;
INSERT INTO locks VALUES (-1, -1, '{"do": "retry"}');
CALL ruststream.drain('plans locks', 5);
SELECT id FROM locks WHERE xmax <> 0;
DELETE FROM locks WHERE id < 0;
CALL ruststream.drain('plans locks', 100);
SELECT count(*) AS left, count(*) FILTER (WHERE xmax <> 0) AS locked FROM locks;
-- with statistics too
ANALYZE locks;
CALL ruststream.drain('plans locks', 100);
SELECT count(*) AS left, count(*) FILTER (WHERE xmax <> 0) AS locked FROM locks;
-- a claim that finds nothing due locks nothing
SELECT count(*) AS locked FROM jobs WHERE xmax <> 0 AND retry_after = '3000-01-01';

SET client_min_messages = error;
DROP SCHEMA rs_plans CASCADE;
