-- Statements that commit by themselves: what stays, what comes back, who may.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE rs_auto_other;
RESET client_min_messages;
CREATE SCHEMA rs_auto;
SET search_path = rs_auto;

CREATE FUNCTION refused(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text; code text; detail text; hint text; context text; table_name text; constraint_name text;
BEGIN
	EXECUTE statement;
	RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, code = RETURNED_SQLSTATE, detail = PG_EXCEPTION_DETAIL,
		hint = PG_EXCEPTION_HINT, table_name = TABLE_NAME, constraint_name = CONSTRAINT_NAME;
	RETURN concat_ws(E'\n', code || ' ' || message, 'detail: ' || nullif(detail, ''), 'hint: ' || nullif(hint, ''),
		'table: ' || nullif(table_name, ''), 'constraint: ' || nullif(constraint_name, ''));
END $$;
\pset format unaligned
\pset tuples_only on

CREATE TABLE note (id serial PRIMARY KEY, text text);
CREATE TABLE child (note int REFERENCES note DEFERRABLE INITIALLY DEFERRED);

-------------------------------------------------- it stays, and counts rows
BEGIN;
SELECT ruststream.autonomous('INSERT INTO note (text) VALUES (''stays''), (''too'')');
INSERT INTO note (text) VALUES ('goes');
ROLLBACK;
SELECT text FROM note ORDER BY id;
SELECT ruststream.autonomous('SELECT FROM note');
SELECT ruststream.autonomous('UPDATE note SET text = upper(text) WHERE id = 1 RETURNING id');
SELECT ruststream.autonomous('CREATE TABLE made (a int); INSERT INTO made VALUES (1), (2), (3)');
SELECT ruststream.autonomous('DROP TABLE made');
SELECT ruststream.autonomous('');
-- it does not see what the caller has not committed
BEGIN;
INSERT INTO note (text) VALUES ('mine');
SELECT ruststream.autonomous('SELECT FROM note WHERE text = ''mine''');
ROLLBACK;

------------------------------------------------------ parameters are values
DELETE FROM note;
SELECT ruststream.autonomous('INSERT INTO note (text) VALUES ($1)', $$x'); DROP TABLE note; -- \ "$1" %s$$);
SELECT text FROM note;
CREATE DOMAIN small AS int CHECK (VALUE < 10);
CREATE TYPE pair AS (a small, b text);
CREATE TYPE colour AS ENUM ('red', 'green');
CREATE TABLE held (i int, n numeric, d timestamptz, dur interval, b bytea, j jsonb, a text[], p pair, c colour,
	r regclass, s small, f float8, m money, x text);
SET DateStyle = 'German, DMY';
SET IntervalStyle = 'sql_standard';
SET TimeZone = 'Asia/Tokyo';
SELECT ruststream.autonomous('INSERT INTO held VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)',
	1, 2.50, '2026-02-03 04:05:06.789+00'::timestamptz, '-1 day +02:03'::interval, '\x00ff'::bytea, '{"a": [1]}'::jsonb,
	ARRAY['a,b', NULL, '{"'], ROW(3, 'b"')::pair, 'green'::colour, 'note'::regclass, 4::small, 0.1::float8 + 0.2,
	12.34::money, NULL::text);
RESET DateStyle;
RESET IntervalStyle;
RESET TimeZone;
SET TimeZone = 'UTC';
SELECT i, n, d, dur, b, j, a, p, c, r, s, f, m::numeric, x IS NULL FROM held;
SELECT ruststream.autonomous('SELECT FROM generate_series(1, $1 + $2)', VARIADIC ARRAY[2, 3]);
SELECT ruststream.autonomous('SELECT FROM note WHERE text = $1', repeat('x', 200000));
SELECT refused($$SELECT ruststream.autonomous('SELECT $1', VARIADIC NULL::int[])$$);
SELECT refused($$SELECT ruststream.autonomous(NULL)$$);
SELECT refused($$SELECT ruststream.autonomous('SELECT $1', ROW(1, 2))$$);
SELECT refused($$SELECT ruststream.autonomous('SELECT $2', 1)$$);
BEGIN;
CREATE TYPE new AS ENUM ('one');
SELECT refused($$SELECT ruststream.autonomous('SELECT $1', 'one'::rs_auto.new)$$);
ROLLBACK;

--------------------------------------------------------- errors come back
SELECT refused($$SELECT ruststream.autonomous('SELECT 1 / $1', 0)$$);
SELECT refused($$SELECT ruststream.autonomous('SELEC 1')$$);
SELECT refused($$SELECT ruststream.autonomous('INSERT INTO note (id, text) VALUES (1, NULL), (1, NULL)')$$);
SELECT refused($$SELECT ruststream.autonomous('INSERT INTO child VALUES (4711)')$$);
SELECT refused($$SELECT ruststream.autonomous('DO $do$ BEGIN RAISE EXCEPTION ''as asked'' USING
	ERRCODE = ''RS001'', DETAIL = ''the detail'', HINT = ''the hint''; END $do$')$$);
SELECT refused($$SELECT ruststream.autonomous('COMMIT')$$);
SELECT refused($$SELECT ruststream.autonomous('INSERT INTO note (text) VALUES (''undone''); ROLLBACK')$$);
SELECT refused($$SELECT ruststream.autonomous('DO $do$ BEGIN COMMIT; END $do$')$$);
SELECT refused($$SELECT ruststream.autonomous('COPY note FROM STDIN')$$);
SELECT refused($$SELECT ruststream.autonomous('VACUUM note')$$);
BEGIN READ ONLY;
SELECT refused($$SELECT ruststream.autonomous('SELECT')$$);
ROLLBACK;
SELECT count(*) FROM note WHERE text = 'undone';

--------------------------------------- a session of its own, nothing leaks
CREATE TABLE seen (what text);
SELECT ruststream.autonomous($$INSERT INTO seen SELECT pg_backend_pid()$$) FROM generate_series(1, 3);
SELECT count(DISTINCT what), bool_and(what <> pg_backend_pid()::text) FROM seen;
TRUNCATE seen;
SELECT ruststream.autonomous($$
	SET work_mem = '7MB'; SET search_path = pg_catalog; SELECT set_config('app.note', 'left', false);
	CREATE TEMPORARY TABLE left_over (a int); PREPARE left_plan AS SELECT 1;
	DECLARE left_open CURSOR WITH HOLD FOR SELECT 1; SELECT pg_advisory_lock(4711); SET ROLE rs_auto_other$$);
SELECT ruststream.autonomous($$INSERT INTO seen VALUES (concat_ws(' ', current_user = session_user,
	current_setting('work_mem'), current_setting('search_path'), current_setting('app.note', true),
	to_regclass('pg_temp.left_over'), (SELECT count(*) FROM pg_prepared_statements),
	(SELECT count(*) FROM pg_cursors WHERE name = 'left_open')))$$);
SELECT what FROM seen;
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711;

------------------------------------------------------------------- who may
GRANT USAGE ON SCHEMA rs_auto TO rs_auto_other;
GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA rs_auto TO rs_auto_other;
SET ROLE rs_auto_other;
SELECT replace(refused($$SELECT ruststream.autonomous('SELECT')$$), session_user::text, '(session user)');
RESET ROLE;
CREATE FUNCTION definer() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT ruststream.autonomous('SELECT') $$;
SELECT refused('SELECT definer()');
CREATE FUNCTION invoker(int) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN ruststream.autonomous('SELECT'); END $$;
SELECT refused('CREATE INDEX ON note (invoker(id))');

------------------------------------------------------- in a handler, by drain
SELECT ruststream.create_queue('jobs');
SELECT ruststream.create_queue('other');
CREATE FUNCTION handle(job jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_auto.note (text) VALUES ('own ' || job.id);
	PERFORM ruststream.autonomous('INSERT INTO rs_auto.note (text) VALUES ($1)', 'alone ' || job.id);
	PERFORM ruststream.autonomous($sql$SELECT ruststream.publish('rs_auto.other', $1)$sql$, job.payload);
	CASE job.payload->>'do'
		WHEN 'error' THEN RAISE EXCEPTION 'no good';
		WHEN 'role' THEN SET LOCAL ROLE rs_auto_other; PERFORM ruststream.autonomous('SELECT');
		ELSE RETURN ROW(job.payload->>'do', NULL, NULL)::ruststream.outcome;
	END CASE;
END $$;
SELECT ruststream.subscribe('auto', 'jobs', 'handle', workers => 0, on_error => 'discard');
DELETE FROM note;
INSERT INTO jobs (payload) SELECT jsonb_build_object('do', d) FROM unnest('{ack,discard,error,role}'::text[]) AS d;
SET client_min_messages = error;
CALL ruststream.drain('auto');
RESET client_min_messages;
SELECT text FROM note ORDER BY id;
SELECT payload->>'do' FROM other ORDER BY id;
SELECT id, sqlstate FROM ruststream.failure WHERE subscription = 'auto' ORDER BY id;

-------------------------------------------------- a lock that the caller holds
SET deadlock_timeout = '10s';
BEGIN;
UPDATE note SET text = 'held';
SELECT refused($$SELECT ruststream.autonomous('UPDATE rs_auto.note SET text = ''never''')$$) LIKE '40P01 %';
ROLLBACK;
RESET deadlock_timeout;
-- also one that a new session needs in order to connect
\c -
SET search_path = rs_auto;
BEGIN;
LOCK TABLE pg_authid;
SET LOCAL deadlock_timeout = '10ms';
SELECT refused($$SELECT ruststream.autonomous('SELECT 1')$$) LIKE '40P01 %';
ROLLBACK;
-- the caller's lock_timeout is none for the call, but the call has it too
SET lock_timeout = '100ms';
SELECT ruststream.autonomous('SELECT pg_sleep(0.4)');
SELECT ruststream.autonomous('SELECT WHERE current_setting(''lock_timeout'') = ''100ms''');
RESET lock_timeout;

------------------------------------------------------- nothing is left of it
SELECT ruststream.autonomous($$DECLARE left_open CURSOR WITH HOLD FOR SELECT set_config('work_mem', '7MB', false)$$);
SELECT ruststream.autonomous($$SELECT FROM pg_cursors WHERE name = 'left_open'$$);
SELECT ruststream.autonomous($$SELECT WHERE current_setting('work_mem') = '7MB'$$);

-------------------------------------------------------------- interrupted
SET statement_timeout = '300ms';
SELECT ruststream.autonomous('INSERT INTO rs_auto.note (text) SELECT ''never'' FROM pg_sleep(60)');
RESET statement_timeout;
SELECT ruststream.autonomous('SELECT FROM rs_auto.note WHERE text = ''never''');
-- inside itself
SELECT ruststream.autonomous($$SELECT ruststream.autonomous('SELECT 1 / 0')$$);
SELECT ruststream.autonomous($$SELECT FROM generate_series(1, ruststream.autonomous('SELECT FROM generate_series(1, 5)'))$$);
-- .. and so on, but not for ever: each is a process
CREATE FUNCTION nest(depth int) RETURNS bigint LANGUAGE sql AS $$
	SELECT CASE WHEN depth = 0 THEN 0
		ELSE ruststream.autonomous(format('SELECT FROM generate_series(0, rs_auto.nest(%s))', depth - 1)) END
$$;
SELECT nest(3);
SELECT nest(4);
SELECT nest(3);

SET client_min_messages = error;
DROP SCHEMA rs_auto CASCADE;
DROP ROLE rs_auto_other;
