-- Dead letters say where they came from, and ruststream.redrive moves them back.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE regress_ruststream_stranger;
RESET client_min_messages;

CREATE SCHEMA rs_redrive;
SET search_path = rs_redrive;

-- Fails until it is told not to.
CREATE TABLE mood (fails boolean);
INSERT INTO mood VALUES (true);
CREATE FUNCTION serve(payload jsonb) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT fails FROM rs_redrive.mood) THEN
		IF payload->>'answers' = 'dead_letter' THEN
			RETURN ruststream.dead_letter('not for me');
		END IF;
		RAISE EXCEPTION E'it said "no" \\ and left' USING ERRCODE = 'RS001';
	END IF;
	RETURN ruststream.ack();
END $$;

-- The time is the only header that differs from run to run.
CREATE FUNCTION shown(headers jsonb) RETURNS jsonb LANGUAGE sql AS $$
	SELECT CASE WHEN (headers->>'ruststream-dead-lettered-at')::timestamptz
			BETWEEN now() - interval '1 hour' AND clock_timestamp()
		THEN headers || '{"ruststream-dead-lettered-at": "now"}' ELSE headers END;
$$;

---------------------------------------------------------------------- groups
SELECT ruststream.create_queue('jobs', groups => true);
ALTER TABLE jobs ALTER headers DROP NOT NULL;
SELECT ruststream.subscribe('mail', 'jobs', 'serve', workers => 0, dead_letter => 'dead', max_attempts => 2, retry_delay => '0');
SELECT ruststream.subscribe('fax "machine"', 'jobs', 'serve', workers => 0, dead_letter => 'dead', max_attempts => 1, group_name => 'fax');
SELECT ruststream.publish('jobs', '{}', 'mail', headers => '{"mine": "1"}');
SELECT ruststream.publish('jobs', '{}', 'fax', priority => 5);
SELECT ruststream.publish('jobs', '{"answers": "dead_letter"}', 'mail');
INSERT INTO jobs (group_name, payload, headers) VALUES ('mail', '{}', NULL), ('fax', '{}', '["not", "an object"]'),
	('fax', '{}', '"nor this"'), ('mail', '{}', '{"ruststream-origin-group": "forged", "ruststream-reason": "old"}');
SET client_min_messages = error;
CALL ruststream.drain('mail');
CALL ruststream.drain('fax "machine"');
RESET client_min_messages;
SELECT id, group_name, attempt, shown(headers) FROM jobs ORDER BY id;

-- Two of them do not say: nothing moves, or where it is told to.
SELECT ruststream.redrive('dead');
SELECT count(*) FROM jobs WHERE group_name = 'dead';
SELECT ruststream.redrive('dead', 2);
SELECT id, group_name, attempt, headers FROM jobs WHERE group_name <> 'dead' ORDER BY id;
SELECT ruststream.redrive('dead', subscription => 'fax "machine"');
SELECT ruststream.redrive('dead', subscription => 'fax "machine"');
SELECT ruststream.redrive('dead');
SELECT id, group_name, attempt, retry_after, priority, headers FROM jobs ORDER BY id;
UPDATE mood SET fails = false;
CALL ruststream.drain('mail');
CALL ruststream.drain('fax "machine"');
SELECT count(*) FROM jobs;

-- Headers of type json are text: what jsonb would refuse stays as it is.
CREATE TABLE texts (id int PRIMARY KEY, grp varchar NOT NULL, note json, payload jsonb DEFAULT '{}');
CREATE INDEX ON texts (grp, id);
SELECT ruststream.attach_queue('texts', 'id', group_column => 'grp', headers_column => 'note', payload_column => 'payload');
SELECT ruststream.subscribe('texts', 'texts', 'serve', workers => 0, dead_letter => 'dead texts', on_error => 'dead_letter');
INSERT INTO texts VALUES (1, 'texts', NULL), (2, 'texts', ' { } '), (3, 'texts', E'\t{"a": {"b": {}}, "z": "1"} \n'),
	(4, 'texts', '{"a": "\u0000"}'), (5, 'texts', '[1, 2]'), (6, 'texts', 'null'), (7, 'texts', '{"a":"}"}');
UPDATE mood SET fails = true;
SET client_min_messages = error;
CALL ruststream.drain('texts');
RESET client_min_messages;
SELECT id, grp, regexp_replace(note::text, '\d{4}-\d\d-\d\dT[0-9:.]+\+00:00', 'now') AS note FROM texts ORDER BY id;
SELECT id, shown(note::jsonb) FROM texts WHERE id IN (3, 7) ORDER BY id;
DELETE FROM texts WHERE id = 4;
SELECT ruststream.redrive('dead texts');
SELECT * FROM texts ORDER BY id;

---------------------------------------------------------------------- tables
-- Two queues of different columns, one table for their dead letters.
SELECT ruststream.create_queue('orders', keep_processed => true);
CREATE TABLE bills (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, headers jsonb, payload jsonb, tries int NOT NULL,
	due timestamptz, twice text GENERATED ALWAYS AS (payload::text || payload::text) STORED);
CREATE INDEX ON bills (due NULLS FIRST, id);
SELECT ruststream.attach_queue('bills', 'id', headers_column => 'headers', payload_column => 'payload', attempt_column => 'tries',
	retry_after_column => 'due');
CREATE TABLE "dead letters" (LIKE orders);
ALTER TABLE "dead letters" ADD tries int, ADD due timestamptz, ADD since timestamptz DEFAULT now(),
	ALTER attempt DROP NOT NULL;
SELECT ruststream.subscribe('orders', 'orders', 'serve', workers => 0, dead_letter => '"dead letters"', max_attempts => 3, retry_delay => '0');
SELECT ruststream.subscribe('bills', 'bills', 'serve', workers => 0, dead_letter => '"dead letters"', max_attempts => 1);
SELECT ruststream.publish('orders', '{"order": 1}', priority => 7, headers => '{"mine": "1"}');
SELECT ruststream.publish('orders', '{"order": 2}');
INSERT INTO bills (headers, payload, tries) SELECT NULL, '{"bill": 1}', 1;
SET client_min_messages = error;
CALL ruststream.drain('orders');
CALL ruststream.drain('bills');
RESET client_min_messages;
SELECT id, payload, attempt, tries, shown(headers) FROM "dead letters" ORDER BY payload;
INSERT INTO "dead letters" (id, payload, headers, tries) VALUES (100, '{"bill": 2}', '{}', 4), (101, '{"bill": 3}', '{"ruststream-origin-queue": "gone.q"}', 4);
SELECT ruststream.redrive('"dead letters"');
SELECT ruststream.redrive('rs_redrive."dead letters"', 0);
SELECT ruststream.redrive('rs_redrive."dead letters"', 1, 'bills');
SELECT ruststream.redrive('rs_redrive."dead letters"', subscription => 'bills');
SELECT count(*) FROM "dead letters";
SELECT id, priority, attempt, retry_after, processed_at, headers, payload FROM orders ORDER BY id;
SELECT * FROM bills ORDER BY id;
UPDATE mood SET fails = false;
CALL ruststream.drain('orders');
CALL ruststream.drain('bills');
SELECT count(*) FILTER (WHERE processed_at IS NULL) FROM orders;
SELECT count(*) FROM bills;

-- What was processed there is no dead letter any more; an id that is there again stays.
UPDATE mood SET fails = true;
CREATE TABLE kept (LIKE orders INCLUDING ALL);
SELECT ruststream.attach_queue('kept', 'id', processed_at_column => 'processed_at', priority_column => 'priority', retry_after_column => 'retry_after');
SELECT ruststream.alter_subscription('orders', dead_letter => 'kept', max_attempts => 1);
SELECT ruststream.publish('orders', '{}'), ruststream.publish('orders', '{}');
SET client_min_messages = error;
CALL ruststream.drain('orders');
RESET client_min_messages;
UPDATE kept SET processed_at = now() WHERE id = (SELECT min(id) FROM kept);
SELECT ruststream.redrive('kept');
SELECT count(*), count(processed_at) FROM kept;
SET client_min_messages = error;
CALL ruststream.drain('orders');
RESET client_min_messages;
INSERT INTO orders (id, payload) OVERRIDING SYSTEM VALUE SELECT id, '{}' FROM kept WHERE processed_at IS NULL;
SELECT ruststream.redrive('kept');
SELECT count(*), count(processed_at) FROM kept;

-- A trigger that swallows a row does not lose it.
DELETE FROM orders;
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER swallow BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT ruststream.redrive('kept');
SELECT count(*), count(processed_at) FROM kept;
DROP TRIGGER swallow ON orders;

-- More rows than a portion has, and no more than are asked for.
DELETE FROM kept;
INSERT INTO kept (id, payload) OVERRIDING SYSTEM VALUE SELECT i, '{}' FROM generate_series(1, 3500) AS i;
SELECT ruststream.redrive('kept', 1001);
SELECT count(*), min(id) FROM kept;
SELECT ruststream.redrive('kept');
SELECT count(*), min(id), max(id), max(attempt) FROM orders;
DELETE FROM orders;

-- Of a partitioned table: rows lie at the same places of its partitions.
CREATE TABLE parted (LIKE orders) PARTITION BY HASH (id);
CREATE TABLE parted_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1);
SELECT ruststream.alter_subscription('orders', dead_letter => 'parted');
INSERT INTO parted (id, attempt, headers, payload) SELECT i, 9, '{}', '{}' FROM generate_series(1, 40) AS i;
SELECT ruststream.redrive('parted', 7);
SELECT (SELECT count(*) FROM parted), array_agg(id ORDER BY id) FROM orders;
SELECT ruststream.redrive('parted');
SELECT (SELECT count(*) FROM parted), count(*) FROM orders;
DELETE FROM orders;

-- Dead letters among many rows: neither they nor the table are scanned for them.
SELECT ruststream.alter_subscription('orders', dead_letter => 'kept');
INSERT INTO jobs (group_name, payload) SELECT 'mail', '{}' FROM generate_series(1, 20000);
INSERT INTO jobs (group_name, payload) SELECT 'dead', '{}' FROM generate_series(1, 10);
SELECT pg_stat_force_next_flush();
CREATE TABLE before AS SELECT coalesce(seq_scan, 0) AS seq_scan, coalesce(idx_tup_fetch, 0) AS fetched
FROM pg_stat_user_tables WHERE relid = 'jobs'::regclass;
SELECT ruststream.redrive('dead', subscription => 'mail');
SELECT pg_stat_force_next_flush();
SELECT t.seq_scan - b.seq_scan AS scans, t.idx_tup_fetch - b.fetched <= 50 AS few_fetched
FROM pg_stat_user_tables AS t, before AS b WHERE t.relid = 'jobs'::regclass;
DELETE FROM jobs;

-- No name of ours is looked up on the caller's path.
CREATE SCHEMA rs_trap;
CREATE FUNCTION rs_trap.trap() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'caught'; END $$;
CREATE FUNCTION rs_trap.eq(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT rs_trap.trap()';
CREATE OPERATOR rs_trap.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = rs_trap.eq);
CREATE FUNCTION rs_trap.unnest(bigint[]) RETURNS SETOF bigint LANGUAGE sql AS 'SELECT 1::bigint FROM rs_trap.trap()';
CREATE FUNCTION rs_trap.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'x' FROM rs_trap.trap() $$;
INSERT INTO kept (id, payload) OVERRIDING SYSTEM VALUE VALUES (1, '{}');
INSERT INTO jobs (group_name, payload, headers) VALUES ('dead', '{}', '{"ruststream-origin-group": "mail"}');
SET search_path = rs_trap, pg_catalog, rs_redrive;
SELECT ruststream.redrive('kept');
SELECT ruststream.redrive('dead');
SET search_path = rs_redrive;
DROP SCHEMA rs_trap CASCADE;

-------------------------------------------------------------- what is refused
\set VERBOSITY default
\set SHOW_CONTEXT never
SELECT ruststream.redrive(NULL);
SELECT ruststream.redrive('dead', -1);
SELECT ruststream.redrive('nowhere');
SELECT ruststream.redrive('a.b.c');
SELECT ruststream.redrive('dead', subscription => 'nobody');
SELECT ruststream.redrive('nowhere', subscription => 'orders');
CREATE TABLE dead (LIKE orders);
SELECT ruststream.alter_subscription('bills', reset => ARRAY['dead_letter', 'max_attempts']);
SELECT ruststream.alter_subscription('orders', dead_letter => 'dead');
SELECT ruststream.redrive('dead');
SELECT ruststream.redrive('rs_redrive.dead');
GRANT USAGE ON SCHEMA rs_redrive TO regress_ruststream_stranger;
SET ROLE regress_ruststream_stranger;
SELECT ruststream.redrive('rs_redrive.dead');
SELECT ruststream.redrive('dead texts');
RESET ROLE;

SET client_min_messages = error;
DROP SCHEMA rs_redrive CASCADE;
DROP ROLE regress_ruststream_stranger;
