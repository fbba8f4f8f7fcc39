-- What a claim reads and locks where rows go one at a time: as much with many lines, or
-- with many rows of one that cannot go, as with ten; whatever the statistics say, and
-- with plans that were made while the queue was empty.  Busy partition keys are in
-- test/t/035_lines.pl, since it takes a second session to hold one.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_plans_lines;
SET search_path = rs_plans_lines;
CREATE FUNCTION handle(jsonb) RETURNS void LANGUAGE sql AS '';

-- a queue whose subscription serves all of it, and what fills it: its plans are made before
CREATE FUNCTION make(name text, fifo boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM ruststream.create_queue('rs_plans_lines.' || name, groups => fifo, fifo => fifo, partition_key => NOT fifo);
	EXECUTE format('ALTER TABLE %I SET (autovacuum_enabled = false)', name);
	PERFORM ruststream.subscribe(name, name::regclass, 'rs_plans_lines.handle', workers => 0, group_name => CASE WHEN fifo THEN '*' END);
END $$;
CREATE FUNCTION fill(name text, line text, rows int, priority int DEFAULT NULL, due timestamptz DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('INSERT INTO %I (%I, priority, retry_after, payload) SELECT %s, $1, $2, ''{}'' FROM generate_series(1, $3) AS i', name,
		(SELECT attname FROM pg_attribute WHERE attrelid = name::regclass AND attname IN ('group_name', 'partition_key')), line)
		USING priority, due, rows;
END $$;
-- blocks read since the last time it was called, and sequential scans
CREATE TABLE seen (name text PRIMARY KEY, blocks bigint);
CREATE FUNCTION blocks(name text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
	before bigint;
	now bigint;
BEGIN
	SELECT b.blocks INTO before FROM seen AS b WHERE b.name = blocks.name;
	SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit INTO now
		FROM pg_statio_user_tables WHERE relid = blocks.name::regclass;
	INSERT INTO seen VALUES (blocks.name, now) ON CONFLICT ON CONSTRAINT seen_pkey DO UPDATE SET blocks = excluded.blocks;
	RETURN now - before;
END $$;
CREATE FUNCTION scans() RETURNS bigint
LANGUAGE sql AS $$ SELECT sum(seq_scan)::bigint FROM pg_stat_user_tables WHERE schemaname = 'rs_plans_lines' AND relname ~ 'fifo|keys' $$;
CREATE FUNCTION start(VARIADIC names text[]) RETURNS void
LANGUAGE sql AS $$ SELECT count(blocks(n)) FROM unnest(names) AS n $$;
\set flush 'DO ''BEGIN PERFORM pg_stat_force_next_flush(); END'';'

--
-- FIFO groups, all of them
--
SELECT make('fifo_ten', true), make('fifo_many', true), make('fifo_busy', true), make('fifo_waiting', true);
CALL ruststream.drain('fifo_ten');
SELECT fill('fifo_ten', 'i % 10', 50000), fill('fifo_many', 'i', 50000);
-- the head of a group with many rows is not due; ten others go on
SELECT fill('fifo_busy', $$'busy'$$, 1, 1, '3000-01-01'), fill('fifo_busy', $$'busy'$$, 100000, 2), fill('fifo_busy', 'i % 10', 10000);
-- of many groups most wait
SELECT fill('fifo_waiting', $$'waiting ' || i$$, 20000, NULL, '3000-01-01'), fill('fifo_waiting', 'i % 10', 10000);
:flush
SELECT scans() AS before \gset
SELECT start('fifo_ten', 'fifo_many', 'fifo_busy', 'fifo_waiting');
CALL ruststream.drain('fifo_ten', 500);
CALL ruststream.drain('fifo_many', 500);
CALL ruststream.drain('fifo_busy', 500);
CALL ruststream.drain('fifo_waiting', 500);
:flush
SELECT scans() - :before AS sequential_scans, blocks('fifo_ten') AS ten, blocks('fifo_many') AS many, blocks('fifo_busy') AS busy,
	blocks('fifo_waiting') AS waiting \gset
SELECT :sequential_scans AS sequential_scans, :many <= 2 * :ten AS many, :busy <= 2 * :ten AS busy;
-- once around, and then four lines a claim, of what does not go
SELECT :waiting <= 2 * 20000 * 10 + 500 * (4 * 10 + 2 * :ten / 500) AS waiting;

-- statistics that say: it is all one group; or that there are hardly any rows
ANALYZE fifo_busy, fifo_many;
UPDATE pg_class SET reltuples = 1, relpages = 1 WHERE relnamespace = 'rs_plans_lines'::regnamespace AND relkind IN ('r', 'i') AND relname ~ 'fifo_ten';
:flush
SELECT scans() AS before \gset
SELECT start('fifo_ten', 'fifo_many', 'fifo_busy');
CALL ruststream.drain('fifo_ten', 500);
CALL ruststream.drain('fifo_many', 500);
CALL ruststream.drain('fifo_busy', 500);
:flush
SELECT scans() - :before AS sequential_scans, blocks('fifo_ten') AS ten, blocks('fifo_many') AS many, blocks('fifo_busy') AS busy \gset
SELECT :sequential_scans AS sequential_scans, :many <= 2 * :ten AS many, :busy <= 2 * :ten AS busy;
-- no row was locked but those that were delivered
SELECT (SELECT count(*) FROM fifo_ten WHERE xmax <> 0) + (SELECT count(*) FROM fifo_many WHERE xmax <> 0)
	+ (SELECT count(*) FROM fifo_busy WHERE xmax <> 0) AS locked;
SELECT (SELECT count(*) FROM fifo_ten), (SELECT count(*) FROM fifo_many), (SELECT count(*) FROM fifo_busy);

-- one group of many, its head not due: a look that finds nothing reads a handful of blocks
SELECT ruststream.subscribe('busy', 'fifo_busy', 'handle', workers => 0);
:flush
SELECT start('fifo_busy');
CALL ruststream.drain('busy');
:flush
SELECT blocks('fifo_busy') < 40 AS few;

--
-- Partition keys
--
SELECT make('keys_ten', false), make('keys_many', false), make('keys_delayed', false);
CALL ruststream.drain('keys_ten');
SELECT fill('keys_ten', 'i % 10', 50000, 5), fill('keys_many', 'i', 50000, 5);
-- rows that wait are as many as you like, also within one key
SELECT fill('keys_delayed', $$'one'$$, 50000, NULL, '3000-01-01'), fill('keys_delayed', 'i', 50000, NULL, '3000-01-01'), fill('keys_delayed', $$'one'$$, 5000, 5),
	fill('keys_delayed', 'i % 10', 5000, 5);
:flush
SELECT scans() AS before \gset
SELECT start('keys_ten', 'keys_many', 'keys_delayed');
CALL ruststream.drain('keys_ten', 500);
CALL ruststream.drain('keys_many', 500);
CALL ruststream.drain('keys_delayed', 500);
:flush
SELECT scans() - :before AS sequential_scans, blocks('keys_ten') AS ten, blocks('keys_many') AS many, blocks('keys_delayed') AS delayed \gset
SELECT :sequential_scans AS sequential_scans, :many <= 2 * :ten AS many, :delayed <= 2 * :ten AS delayed;
ANALYZE keys_delayed, keys_many;
UPDATE pg_class SET reltuples = 1, relpages = 1 WHERE relnamespace = 'rs_plans_lines'::regnamespace AND relkind IN ('r', 'i') AND relname ~ 'keys_ten';
-- an index that would do, were it not for the conditions it does not have
CREATE INDEX ON keys_delayed (id);
CREATE INDEX ON keys_delayed (partition_key);
SET random_page_cost = 10000;
SET cpu_operator_cost = 10000;
SET plan_cache_mode = force_custom_plan;
:flush
SELECT scans() AS before \gset
SELECT start('keys_ten', 'keys_many', 'keys_delayed');
CALL ruststream.drain('keys_ten', 500);
CALL ruststream.drain('keys_many', 500);
CALL ruststream.drain('keys_delayed', 500);
:flush
SELECT scans() - :before AS sequential_scans, blocks('keys_ten') AS ten, blocks('keys_many') AS many, blocks('keys_delayed') AS delayed \gset
SELECT :sequential_scans AS sequential_scans, :many <= 2 * :ten AS many, :delayed <= 2 * :ten AS delayed;
RESET random_page_cost;
RESET cpu_operator_cost;
RESET plan_cache_mode;
SELECT (SELECT count(*) FROM keys_ten WHERE xmax <> 0) + (SELECT count(*) FROM keys_many WHERE xmax <> 0)
	+ (SELECT count(*) FROM keys_delayed WHERE xmax <> 0) AS locked;
SELECT (SELECT count(*) FROM keys_ten), (SELECT count(*) FROM keys_many), (SELECT count(*) FROM keys_delayed);
-- a poll that finds nothing due; with no dead rows in its way, which a snapshot of an autovacuum may keep
CREATE TABLE waiting AS SELECT * FROM keys_delayed WHERE retry_after IS NOT NULL;
TRUNCATE keys_delayed;
INSERT INTO keys_delayed OVERRIDING SYSTEM VALUE SELECT * FROM waiting;
:flush
SELECT start('keys_delayed');
CALL ruststream.drain('keys_delayed');
:flush
SELECT blocks('keys_delayed') < 60 AS few;


--
-- Partitioned tables
--
CREATE TABLE fifo_parts (id bigint PRIMARY KEY, grp text, retry_after timestamptz) PARTITION BY HASH (id);
CREATE TABLE fifo_parts_0 PARTITION OF fifo_parts FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (autovacuum_enabled = false);
CREATE TABLE fifo_parts_1 PARTITION OF fifo_parts FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (autovacuum_enabled = false);
CREATE INDEX ON fifo_parts (grp, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('fifo_parts', 'id', group_column => 'grp', retry_after_column => 'retry_after', fifo => true);
CREATE FUNCTION handle_fifo_part(fifo_parts) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('fifo_parts', 'fifo_parts', 'handle_fifo_part', workers => 0, group_name => '*');
CREATE TABLE keys_parts (id bigint PRIMARY KEY, key int, priority int, retry_after timestamptz) PARTITION BY HASH (id);
CREATE TABLE keys_parts_0 PARTITION OF keys_parts FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (autovacuum_enabled = false);
CREATE TABLE keys_parts_1 PARTITION OF keys_parts FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (autovacuum_enabled = false);
CREATE INDEX ON keys_parts (priority NULLS FIRST, retry_after NULLS FIRST, id);
CREATE INDEX ON keys_parts (key, priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('keys_parts', 'id', priority_column => 'priority', partition_key_column => 'key', retry_after_column => 'retry_after');
CREATE FUNCTION handle_keys_part(keys_parts) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('keys_parts', 'keys_parts', 'handle_keys_part', workers => 0);
CALL ruststream.drain('fifo_parts');
CALL ruststream.drain('keys_parts');
INSERT INTO fifo_parts SELECT i, i % 100 FROM generate_series(1, 20000) AS i;
INSERT INTO keys_parts SELECT i, i % 100, i % 3 FROM generate_series(1, 20000) AS i;
:flush
SELECT scans() AS before \gset
SELECT sum(idx_tup_read) AS tuples_before FROM pg_stat_user_indexes WHERE relname ~ 'parts' \gset
CALL ruststream.drain('fifo_parts', 100);
CALL ruststream.drain('keys_parts', 100);
:flush
SELECT scans() - :before AS sequential_scans;
SELECT sum(idx_tup_read) - :tuples_before < 200 * 300 AS few FROM pg_stat_user_indexes WHERE relname ~ 'parts';
SELECT (SELECT count(*) FROM fifo_parts WHERE xmax <> 0) + (SELECT count(*) FROM keys_parts WHERE xmax <> 0) AS locked,
	(SELECT count(*) FROM fifo_parts), (SELECT count(*) FROM keys_parts);

SET client_min_messages = error;
DROP SCHEMA rs_plans_lines CASCADE;
