-- Which row is next, of which tables; and what a move into another table carries.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_order;
SET search_path = rs_order;

-- handlers note the rows they are given, in order
CREATE TABLE noted (n int GENERATED ALWAYS AS IDENTITY, id text);
CREATE FUNCTION note(jsonb) RETURNS void
LANGUAGE sql AS 'INSERT INTO rs_order.noted (id) SELECT (ruststream.delivery()).id';

-- priority, then retry_after, then id; NULL is first, also before -1
CREATE TABLE jobs (id int PRIMARY KEY, priority int, retry_after timestamptz, payload jsonb);
CREATE INDEX ON jobs (priority NULLS FIRST, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', priority_column => 'priority', retry_after_column => 'retry_after',
	payload_column => 'payload');
SELECT ruststream.subscribe('jobs', 'jobs', 'note', workers => 0);

INSERT INTO jobs (id, priority, retry_after)
	SELECT row_number() OVER (ORDER BY md5(p || ' ' || d)), nullif(p, '')::int, nullif(d, '')::timestamptz
	FROM unnest('{"",-1,0,1}'::text[]) AS p, unnest('{"",2001-01-01,2002-01-01,3000-01-01}'::text[]) AS d;
INSERT INTO jobs SELECT id + 100, priority, retry_after FROM jobs;
CREATE TABLE before AS SELECT * FROM jobs;
CALL ruststream.drain('jobs');
SELECT b.priority, b.retry_after::date, string_agg(b.id::text, ' ' ORDER BY n) AS ids, min(n), max(n)
	FROM noted JOIN before AS b ON b.id = noted.id::int GROUP BY 1, 2 ORDER BY 4;
SELECT (SELECT array_agg(id::int ORDER BY n) FROM noted) =
	(SELECT array_agg(id ORDER BY priority NULLS FIRST, retry_after NULLS FIRST, id) FROM before
	 WHERE retry_after IS NULL OR retry_after <= now()) AS in_claim_order;
-- not due
SELECT priority, retry_after::date, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1 NULLS FIRST;

-- due at this very moment, by the running clock and not a transaction's start
TRUNCATE jobs, noted;
INSERT INTO jobs (id, retry_after) VALUES (1, clock_timestamp());
CALL ruststream.drain('jobs');
SELECT id FROM noted;
TRUNCATE jobs, noted;
INSERT INTO jobs (id, retry_after) VALUES (1, 'infinity'), (2, '-infinity');
CALL ruststream.drain('jobs');
SELECT id FROM noted;

-- a row that came in while another was handled takes its place in the order
TRUNCATE jobs, noted;
CREATE FUNCTION note_and_insert(jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_order.noted (id) SELECT (ruststream.delivery()).id;
	IF (ruststream.delivery()).id = '1' THEN
		INSERT INTO rs_order.jobs VALUES (3, -5);
	END IF;
END $$;
SELECT ruststream.alter_subscription('jobs', handler => 'note_and_insert');
INSERT INTO jobs VALUES (1, -9), (2, 5);
CALL ruststream.drain('jobs');
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;

-- so many and no more
TRUNCATE jobs, noted;
INSERT INTO jobs (id) SELECT generate_series(11, 15);
CALL ruststream.drain('jobs', 2);
CALL ruststream.drain('jobs', 0);
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;
CALL ruststream.drain('jobs', -1);
CALL ruststream.drain('jobs', NULL);
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;

-- groups: one's own only; and processed rows are not seen
TRUNCATE noted;
CREATE TABLE groups (id int PRIMARY KEY, grp text, processed_at timestamptz, payload jsonb);
CREATE INDEX ON groups (grp, id) WHERE processed_at IS NULL;
SELECT ruststream.attach_queue('groups', 'id', group_column => 'grp', processed_at_column => 'processed_at',
	payload_column => 'payload');
SELECT ruststream.subscribe('red', 'groups', 'note', workers => 0);
SELECT ruststream.subscribe('other', 'groups', 'note', group_name => 'blue', workers => 0);
INSERT INTO groups VALUES (1, 'red'), (2, 'blue'), (3, 'red'), (4, 'green'), (5, 'red'),
	(6, NULL), (7, 'other'), (8, 'Red'), (9, 'blue');
UPDATE groups SET processed_at = '2001-01-01' WHERE id = 5;
CALL ruststream.drain('red');
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;
CALL ruststream.drain('other');
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;
SELECT id, grp, processed_at IS NOT NULL AS processed FROM groups ORDER BY id;

-- ids of every type
CREATE PROCEDURE drain_ids(type text, ids text[])
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('CREATE TABLE rs_order.ids (id %s PRIMARY KEY, priority smallint, payload jsonb)', type);
	CREATE INDEX ON rs_order.ids (priority NULLS FIRST, id);
	PERFORM ruststream.attach_queue('rs_order.ids', 'id', priority_column => 'priority', payload_column => 'payload');
	PERFORM ruststream.subscribe('ids', 'rs_order.ids', 'rs_order.note', workers => 0);
	EXECUTE format('INSERT INTO rs_order.ids (id) SELECT i::%s FROM unnest($1) AS i', type) USING ids;
	TRUNCATE rs_order.noted;
	CALL ruststream.drain('ids');
	RAISE NOTICE '%: %, left: %', type, (SELECT array_agg(id ORDER BY n) FROM rs_order.noted),
		(SELECT count(*) FROM rs_order.ids);
	DROP TABLE rs_order.ids;
END $$;
CALL drain_ids('smallint', '{5,-5,32767}');
CALL drain_ids('integer', '{5,-5,2147483647}');
CALL drain_ids('bigint', '{5,-5,9223372036854775807}');
CALL drain_ids('uuid', '{ffffffff-0000-4000-8000-000000000000,00000000-0000-4000-8000-000000000001}');
CALL drain_ids('text', '{b,a,aa,"it''s",""}');
CALL drain_ids('text COLLATE "C"', '{b,B,a}');
CALL drain_ids('varchar(8)', '{b,a}');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CALL drain_ids('rs_order.positive', '{3,1,2}');

-- a partitioned table
TRUNCATE noted;
CREATE TABLE parts (id int PRIMARY KEY, retry_after timestamptz, attempt int, payload jsonb) PARTITION BY RANGE (id);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (1) TO (10);
-- with its columns in an order of its own
CREATE TABLE parts_2 (payload jsonb, attempt int, gone int, id int NOT NULL, retry_after timestamptz);
ALTER TABLE parts_2 DROP COLUMN gone;
ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (10) TO (20);
CREATE INDEX ON parts (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('parts', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload');
CREATE FUNCTION handle_part(parts) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_order.noted (id) VALUES ($1.id || '/' || coalesce($1.attempt, 1) || '/' || ($1.payload->>'do'));
	RETURN CASE $1.payload->>'do' WHEN 'ack' THEN ruststream.ack()
		WHEN 'dead_letter' THEN ruststream.dead_letter() ELSE ruststream.retry_after('1 hour') END;
END $$;
CREATE TABLE parts_dead (LIKE parts);
SELECT ruststream.subscribe('parts', 'parts', 'handle_part', workers => 0, dead_letter => 'parts_dead');
INSERT INTO parts (id, payload) VALUES (12, '{"do": "ack"}'), (2, '{"do": "ack"}'), (11, '{"do": "retry"}'),
	(1, '{"do": "retry"}'), (3, '{"do": "dead_letter"}'), (13, '{"do": "dead_letter"}');
CALL ruststream.drain('parts');
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;
SELECT tableoid::regclass, id, attempt, retry_after > now() AS later FROM parts ORDER BY id;
SELECT id, attempt, payload FROM parts_dead ORDER BY id;

-- a table with children: its own rows only, though a child has the same ids
TRUNCATE noted;
CREATE TABLE parent (id int PRIMARY KEY, attempt int, payload jsonb);
SELECT ruststream.attach_queue('parent', 'id', attempt_column => 'attempt', payload_column => 'payload');
CREATE TABLE child (extra int) INHERITS (parent);
CREATE TABLE parent_dead (LIKE parent);
CREATE FUNCTION note_kind(p jsonb) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_order.noted (id) SELECT (ruststream.delivery()).id;
	RETURN CASE p->>'do' WHEN 'dead_letter' THEN ruststream.dead_letter()
		WHEN 'retry' THEN CASE WHEN ruststream.attempt() = 1 THEN ruststream.retry() ELSE ruststream.ack() END
		ELSE ruststream.ack() END;
END $$;
SELECT ruststream.subscribe('parent', 'parent', 'note_kind', workers => 0, dead_letter => 'parent_dead');
INSERT INTO parent VALUES (1, NULL, '{}'), (2, NULL, '{"do": "dead_letter"}'), (3, NULL, '{"do": "retry"}');
INSERT INTO child VALUES (1, NULL, '{}'), (2, NULL, '{}'), (3, NULL, '{}'), (4, NULL, '{}');
CALL ruststream.drain('parent');
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;
SELECT tableoid::regclass, id, attempt FROM parent ORDER BY id;
SELECT id, attempt, payload FROM parent_dead;

-- names that need their quotes, and names of 63 bytes
TRUNCATE noted;
CREATE SCHEMA "rs ""odd"" schema";
CREATE TABLE "rs ""odd"" schema"."select" ("order" int PRIMARY KEY, "Group" text, "a""b" int,
	"{id} $1" int, "where it's due" timestamptz, "Pay load" jsonb, "Done" timestamptz, "h" jsonb);
CREATE INDEX ON "rs ""odd"" schema"."select" ("Group", "a""b" NULLS FIRST, "where it's due" NULLS FIRST, "order")
	WHERE "Done" IS NULL;
SELECT ruststream.attach_queue('"rs ""odd"" schema"."select"', 'order', group_column => 'Group',
	priority_column => 'a"b', attempt_column => '{id} $1', retry_after_column => 'where it''s due',
	payload_column => 'Pay load', processed_at_column => 'Done', headers_column => 'h');
SELECT ruststream.subscribe('it''s a "name"', '"rs ""odd"" schema"."select"', 'note_kind', workers => 0,
	dead_letter => 'a ''dead'' "group"', group_name => 'a "group"''s');
INSERT INTO "rs ""odd"" schema"."select" VALUES (1, 'a "group"''s', 1, NULL, NULL, '{"do": "retry"}'),
	(2, 'a "group"''s', 1, NULL, NULL, '{"do": "dead_letter"}'), (3, 'a "group"''s', 0, NULL, NULL, '{}'),
	(4, 'other', 1, NULL, NULL, '{}');
CALL ruststream.drain('it''s a "name"');
SELECT string_agg(id, ' ' ORDER BY n) AS ids FROM noted;
SELECT "order", "Group", "{id} $1", "Done" IS NOT NULL AS processed FROM "rs ""odd"" schema"."select" ORDER BY 1;

DO $$
DECLARE
	n text := repeat('n', 62);
BEGIN
	EXECUTE format('CREATE SCHEMA %1$ss', n);
	EXECUTE format('CREATE TABLE %1$ss.%1$st (%1$si int PRIMARY KEY, %1$sa int, %1$sp jsonb)', n);
	EXECUTE format('CREATE TABLE %1$ss.%1$sd (LIKE %1$ss.%1$st)', n);
	EXECUTE format('CREATE FUNCTION %1$ss.%1$sf(jsonb) RETURNS ruststream.outcome LANGUAGE sql AS
		''SELECT rs_order.note_kind($1)''', n);
	PERFORM ruststream.attach_queue(format('%1$ss.%1$st', n)::regclass, (n || 'i')::name, attempt_column => (n || 'a')::name,
		payload_column => (n || 'p')::name);
	PERFORM ruststream.subscribe(n || 's', format('%1$ss.%1$st', n), format('%1$ss.%1$sf', n), workers => 0,
		dead_letter => format('%1$ss.%1$sd', n));
	EXECUTE format('INSERT INTO %1$ss.%1$st VALUES (1, NULL, ''{}''), (2, 7, ''{"do": "dead_letter"}'')', n);
	TRUNCATE rs_order.noted;
	CALL ruststream.drain(n || 's');
	EXECUTE format('INSERT INTO rs_order.noted (id) SELECT ''moved '' || %1$si || '' '' || %1$sa FROM %1$ss.%1$sd', n);
	RAISE NOTICE '%', (SELECT array_agg(id ORDER BY noted.n) FROM rs_order.noted);
	SET LOCAL client_min_messages = error;
	EXECUTE format('DROP SCHEMA %1$ss CASCADE', n);
END $$;

-- what a move carries: every column that is not generated, by name
TRUNCATE noted;
CREATE TABLE source (gone int, id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, attempt int NOT NULL DEFAULT 1,
	twice int GENERATED ALWAYS AS (attempt * 2) STORED, payload jsonb, at timestamptz DEFAULT '2001-01-01',
	tags text[], price numeric(8,2), "Odd name" text);
ALTER TABLE source DROP COLUMN gone;
CREATE TABLE destination ("Odd name" text, payload jsonb, price numeric(8,2), note text DEFAULT 'died',
	serial int GENERATED ALWAYS AS IDENTITY, attempt int, thrice int GENERATED ALWAYS AS (attempt * 3) STORED,
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, nothing text, tags text[], at timestamptz NOT NULL DEFAULT '1999-01-01');
SELECT ruststream.attach_queue('source', 'id', attempt_column => 'attempt', payload_column => 'payload');
CREATE FUNCTION handle_source(source) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'given %', $1;
	UPDATE rs_order.source SET price = 0 WHERE id = $1.id;
	RETURN ruststream.dead_letter();
END $$;
SELECT ruststream.subscribe('source', 'source', 'handle_source', workers => 0, dead_letter => 'destination');
INSERT INTO source (attempt, payload, at, tags, price, "Odd name")
	VALUES (4, '{"a": 1}', DEFAULT, '{x,y}', 12.5, 'odd'), (1, NULL, NULL, NULL, NULL, NULL);
UPDATE source SET at = '2002-01-01' WHERE at IS NULL;
CALL ruststream.drain('source');
SELECT * FROM source;
SELECT id, attempt, thrice, payload, at::date, tags, price, "Odd name", note, serial, nothing FROM destination ORDER BY id;

-- a row whose id is there already: a failed settlement, and nothing is lost
CREATE TABLE twins (id int PRIMARY KEY, attempt int DEFAULT 1, retry_after timestamptz, payload jsonb);
CREATE INDEX ON twins (retry_after NULLS FIRST, id);
CREATE TABLE twins_dead (LIKE twins INCLUDING INDEXES);
SELECT ruststream.attach_queue('twins', 'id', attempt_column => 'attempt', retry_after_column => 'retry_after',
	payload_column => 'payload');
SELECT ruststream.subscribe('twins', 'twins', 'note_kind', workers => 0, dead_letter => 'twins_dead', retry_delay => '1 hour');
INSERT INTO twins_dead VALUES (1, 3, NULL, '{"the": "first"}');
INSERT INTO twins VALUES (1, 1, NULL, '{"do": "dead_letter"}'), (2, 1, NULL, '{"do": "dead_letter"}');
SET ruststream.trace = on;
CALL ruststream.drain('twins');
SELECT id, attempt, retry_after > now() AS later, payload FROM twins ORDER BY id;
SELECT id, attempt, payload FROM twins_dead ORDER BY id;
SELECT id, attempt, sqlstate FROM ruststream.failure WHERE subscription = 'twins';
-- also at the cap: it can only be tried again
CREATE FUNCTION fail(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no good'; END $$;
SELECT ruststream.alter_subscription('twins', handler => 'fail', max_attempts => 2);
UPDATE twins SET retry_after = NULL;
CALL ruststream.drain('twins');
RESET ruststream.trace;
SELECT id, attempt, retry_after > now() AS later, payload FROM twins ORDER BY id;
SELECT id, attempt, payload FROM twins_dead ORDER BY id;
SELECT id, attempt, sqlstate FROM ruststream.failure WHERE subscription = 'twins';

SET client_min_messages = error;
DROP SCHEMA "rs ""odd"" schema" CASCADE;
DROP SCHEMA rs_order CASCADE;
