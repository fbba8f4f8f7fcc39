-- The statements of the lease and advisory lock forms never read a queue from
-- end to end either, whatever its statistics say (see plans.sql).  Where the
-- library is not preloaded leases are not drained: plans_lanes_1.out.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_plans_lanes;
SET search_path = rs_plans_lanes;

-- every role of each form, and partitions without any but the id
CREATE TABLE leased (id bigint PRIMARY KEY, grp text NOT NULL DEFAULT 'leased', priority int, retry_after timestamptz,
	attempt int NOT NULL DEFAULT 1, processed_at timestamptz, locked_until timestamptz, payload jsonb) WITH (autovacuum_enabled = false);
CREATE INDEX ON leased (grp, priority NULLS FIRST, retry_after NULLS FIRST, id) WHERE processed_at IS NULL;
SELECT ruststream.attach_queue('leased', 'id', group_column => 'grp', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', processed_at_column => 'processed_at', locked_until_column => 'locked_until', payload_column => 'payload');
CREATE TABLE keyed (LIKE leased INCLUDING ALL) WITH (autovacuum_enabled = false);
ALTER TABLE keyed ALTER COLUMN grp SET DEFAULT 'keyed';
SELECT ruststream.attach_queue('keyed', 'id', group_column => 'grp', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', processed_at_column => 'processed_at', payload_column => 'payload', lock_key => '{grp}-{id}');
CREATE TABLE leased_parts (id bigint PRIMARY KEY, locked_until timestamptz, payload jsonb) PARTITION BY HASH (id);
CREATE TABLE leased_parts_0 PARTITION OF leased_parts FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (autovacuum_enabled = false);
CREATE TABLE leased_parts_1 PARTITION OF leased_parts FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (autovacuum_enabled = false);
SELECT ruststream.attach_queue('leased_parts', 'id', locked_until_column => 'locked_until', payload_column => 'payload');
CREATE TABLE keyed_parts (id bigint PRIMARY KEY, attempt int, payload jsonb) PARTITION BY HASH (id);
CREATE TABLE keyed_parts_0 PARTITION OF keyed_parts FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (autovacuum_enabled = false);
CREATE TABLE keyed_parts_1 PARTITION OF keyed_parts FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (autovacuum_enabled = false);
SELECT ruststream.attach_queue('keyed_parts', 'id', attempt_column => 'attempt', payload_column => 'payload', lock_key => 'keyed-{id}');

-- the handler of row 0 fills its queue, while its plans are those of an empty one
CREATE FUNCTION handle(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	IF p ? 'sql' THEN
		EXECUTE p->>'sql';
	END IF;
	RETURN CASE p->>'do' WHEN 'retry_after' THEN ruststream.retry_after('1 hour') WHEN 'discard' THEN ruststream.discard()
		WHEN 'dead_letter' THEN ruststream.dead_letter() ELSE ruststream.ack() END;
END $$;
CREATE FUNCTION job(i bigint) RETURNS jsonb
LANGUAGE sql AS $$ SELECT jsonb_build_object('do', (ARRAY['ack', 'retry_after', 'discard', 'dead_letter'])[i % 4 + 1]) $$;
SELECT ruststream.subscribe(name, name::regclass, 'handle', workers => 0, dead_letter => 'dead')
FROM unnest('{leased,keyed}'::text[]) AS name;
SELECT ruststream.subscribe(name, name::regclass, 'handle', workers => 0)
FROM unnest('{leased_parts,keyed_parts}'::text[]) AS name;

CREATE FUNCTION seq_scans() RETURNS bigint
LANGUAGE sql AS $$ SELECT sum(seq_scan)::bigint FROM pg_stat_user_tables WHERE schemaname = 'rs_plans_lanes' $$;
\set flush 'DO ''BEGIN PERFORM pg_stat_force_next_flush(); END'';'

-- empty when the plans are made, then 20,000 rows
INSERT INTO leased (id, payload) VALUES (0, '{"sql": "INSERT INTO rs_plans_lanes.leased (id, payload) SELECT i, rs_plans_lanes.job(i) FROM generate_series(1, 20000) AS i"}');
INSERT INTO keyed (id, payload) VALUES (0, '{"sql": "INSERT INTO rs_plans_lanes.keyed (id, payload) SELECT i, rs_plans_lanes.job(i) FROM generate_series(1, 20000) AS i"}');
INSERT INTO leased_parts (id, payload) VALUES (0, '{"sql": "INSERT INTO rs_plans_lanes.leased_parts (id, payload) SELECT i, $${}$$ FROM generate_series(1, 20000) AS i"}');
INSERT INTO keyed_parts (id, payload) VALUES (0, '{"sql": "INSERT INTO rs_plans_lanes.keyed_parts (id, payload) SELECT i, $${}$$ FROM generate_series(1, 20000) AS i"}');
:flush
SELECT seq_scans() AS before \gset
CALL ruststream.drain('keyed', 20);
CALL ruststream.drain('keyed_parts', 20);
CALL ruststream.drain('leased', 20);
CALL ruststream.drain('leased_parts', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
-- statistics
ANALYZE leased, keyed, leased_parts, keyed_parts;
CALL ruststream.drain('keyed', 20);
CALL ruststream.drain('keyed_parts', 20);
CALL ruststream.drain('leased', 20);
CALL ruststream.drain('leased_parts', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
-- statistics that say: there are hardly any rows; and a caller whose settings forbid what we need
UPDATE pg_class SET reltuples = 1, relpages = 1 WHERE relnamespace = 'rs_plans_lanes'::regnamespace AND relkind IN ('r', 'i');
SET enable_indexscan = off;
SET enable_nestloop = off;
SET enable_hashjoin = on;
SET random_page_cost = 10000;
SET plan_cache_mode = force_custom_plan;
CALL ruststream.drain('keyed', 20);
CALL ruststream.drain('keyed_parts', 20);
CALL ruststream.drain('leased', 20);
CALL ruststream.drain('leased_parts', 20);
:flush
SELECT seq_scans() - :before AS sequential_scans;
RESET enable_indexscan;
RESET enable_nestloop;
RESET enable_hashjoin;
RESET random_page_cost;
RESET plan_cache_mode;

-- 60 were delivered
SELECT count(*) FILTER (WHERE processed_at IS NOT NULL) AS processed, count(*) FILTER (WHERE grp = 'dead') AS dead,
	count(*) FILTER (WHERE retry_after IS NOT NULL) AS delayed FROM keyed;

-- a caller's odd search path and settings
CREATE FUNCTION rs_plans_lanes.concat(text, bigint) RETURNS text LANGUAGE sql AS $$ SELECT 'stolen' $$;
SET search_path = rs_plans_lanes, pg_catalog;
SET standard_conforming_strings = off;
CALL ruststream.drain('keyed_parts', 1);
RESET standard_conforming_strings;

SET client_min_messages = error;
DROP SCHEMA rs_plans_lanes CASCADE;
