-- Nothing leaks from one delivery to the next, nor into the caller's session;
-- and where drain may be called.
\set VERBOSITY terse
SELECT current_user AS superuser \gset
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
DROP ROLE IF EXISTS regress_rs_hygiene, regress_rs_hygiene_other;
RESET client_min_messages;

CREATE ROLE regress_rs_hygiene_other LOGIN;
CREATE SCHEMA rs_hygiene;
GRANT USAGE ON SCHEMA rs_hygiene TO regress_rs_hygiene_other;
SET search_path = rs_hygiene, public;

CREATE TABLE jobs (id int PRIMARY KEY, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb);
CREATE INDEX ON jobs (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload');

-- What a session has that a commit keeps.
CREATE VIEW session AS
	SELECT 'setting' AS kind, name || '=' || coalesce(current_setting(name, true), '') AS what
	FROM unnest('{work_mem,search_path,rs_hygiene.mine,application_name,default_transaction_read_only,lock_timeout,ruststream.trace}'::text[]) AS name
	UNION ALL SELECT 'role', current_user::text || CASE WHEN current_user = session_user THEN '' ELSE ' of ' || session_user END
		WHERE current_user ~ '^regress_rs' OR current_user <> session_user
	UNION ALL SELECT 'prepared statement', name FROM pg_prepared_statements
	UNION ALL SELECT 'cursor', name FROM pg_cursors WHERE name ~ 'hygiene'
	UNION ALL SELECT 'channel', pg_listening_channels()
	UNION ALL SELECT 'relation', relname FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relkind <> 'i'
	UNION ALL SELECT 'function', proname FROM pg_proc WHERE pronamespace = pg_my_temp_schema()
	UNION ALL SELECT 'type', typname FROM pg_type WHERE typnamespace = pg_my_temp_schema() AND typrelid = 0 AND typelem = 0
	UNION ALL SELECT 'lock', mode || ' ' || classid || ' ' || objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();

CREATE TABLE seen (id text, kind text, what text);

CREATE FUNCTION handle(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	IF p->>'do' = 'look' THEN
		INSERT INTO rs_hygiene.seen SELECT d.id, s.kind, s.what FROM rs_hygiene.session s;
		RETURN ruststream.ack();
	END IF;
	SET rs_hygiene.mine = 'handler';
	SET LOCAL lock_timeout = '7s';
	PERFORM set_config('work_mem', '7MB', false), set_config('application_name', 'handler', true);
	EXECUTE 'PREPARE hygiene_h AS SELECT 1';
	/* whose query is read by the commit */
	EXECUTE 'DECLARE hygiene_hold CURSOR WITH HOLD FOR SELECT set_config(''rs_hygiene.mine'', ''held'', false)';
	EXECUTE 'DECLARE hygiene_plain CURSOR FOR SELECT 1';
	EXECUTE 'LISTEN hygiene_h';
	PERFORM pg_advisory_lock(7, 1), pg_advisory_lock(7, 1), pg_advisory_lock_shared(7, 2), pg_advisory_lock(77), pg_advisory_xact_lock(777);
	CREATE TEMP TABLE hygiene_h (id serial PRIMARY KEY, t text);
	CREATE TEMP TABLE hygiene_i (id int GENERATED ALWAYS AS IDENTITY);
	INSERT INTO hygiene_h (t) VALUES ('x');
	CREATE TEMP TABLE hygiene_parts (id int) PARTITION BY LIST (id);
	CREATE TEMP TABLE hygiene_part PARTITION OF hygiene_parts DEFAULT;
	CREATE TEMP VIEW hygiene_view AS SELECT * FROM hygiene_h;
	CREATE TEMP SEQUENCE hygiene_sequence;
	CREATE FUNCTION pg_temp.hygiene_function() RETURNS int LANGUAGE sql AS 'SELECT 1';
	CREATE TYPE pg_temp.hygiene_composite AS (a int);
	CREATE DOMAIN pg_temp.hygiene_domain AS int;
	CREATE TYPE pg_temp.hygiene_enum AS ENUM ('a');
	SET search_path = pg_temp, pg_catalog;
	SET default_transaction_read_only = on;
	SET ruststream.trace = off;
	SET ROLE regress_rs_hygiene_other;
	CASE p->>'do'
		WHEN 'ack' THEN RETURN ruststream.ack();
		WHEN 'retry_after' THEN RETURN ruststream.retry_after('1 hour');
		WHEN 'error' THEN RAISE EXCEPTION 'no good' USING ERRCODE = 'RS001';
		WHEN 'transient' THEN
			IF nextval('rs_hygiene.failures') = 1 THEN
				RAISE EXCEPTION 'again' USING ERRCODE = '40001';
			END IF;
			RETURN ruststream.ack();
	END CASE;
END $$;
CREATE SEQUENCE failures;
GRANT USAGE ON failures TO regress_rs_hygiene_other;

-- the settlement runs as the owner, under the owner's settings
CREATE TABLE settled (n int GENERATED ALWAYS AS IDENTITY, op text, by text, settings text);
CREATE FUNCTION note_settlement() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_hygiene.settled (op, by, settings) VALUES (TG_OP, CASE WHEN current_user = session_user THEN 'owner' ELSE current_user END,
		concat_ws(', ', current_setting('work_mem'), current_setting('search_path'), current_setting('application_name'),
			current_setting('lock_timeout'), current_setting('rs_hygiene.mine', true)));
	RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER t BEFORE UPDATE OR DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION note_settlement();

SELECT ruststream.subscribe('hygiene', 'jobs', 'handle', workers => 0, retry_delay => '1 hour');

-- what the caller has of each kind
SET work_mem = '3MB';
SET application_name = 'caller';
PREPARE hygiene_c AS SELECT 42;
BEGIN;
DECLARE hygiene_c CURSOR WITH HOLD FOR SELECT generate_series(1, 3);
COMMIT;
LISTEN hygiene_c;
CREATE TEMP TABLE hygiene_c (id serial PRIMARY KEY, t text);
INSERT INTO hygiene_c (t) VALUES ('caller''s');
CREATE FUNCTION pg_temp.hygiene_c() RETURNS int LANGUAGE sql AS 'SELECT 43';
SELECT pg_advisory_lock(5, 1), pg_advisory_lock_shared(5, 2), pg_advisory_lock(55);
CREATE TEMP TABLE hygiene_before AS SELECT * FROM session;
INSERT INTO hygiene_before VALUES ('relation', 'hygiene_before');
SELECT * FROM session ORDER BY kind COLLATE "C", what COLLATE "C";

INSERT INTO jobs (id, payload) SELECT i, jsonb_build_object('do', CASE WHEN i % 2 = 0 THEN 'look' ELSE (ARRAY['ack', 'retry_after', 'error', 'transient'])[(i + 1) / 2] END)
	FROM generate_series(1, 8) AS i;
CALL ruststream.drain('hygiene');
-- nothing for those that came next
SELECT id, kind, what FROM (SELECT * FROM seen EXCEPT SELECT g.id::text, b.* FROM hygiene_before b, generate_series(2, 8, 2) AS g(id)) AS leaked
	WHERE kind <> 'relation' OR what !~ '^hygiene_before' ORDER BY 1, 2, 3;
SELECT g.id, b.* FROM hygiene_before b, generate_series(2, 8, 2) AS g(id) EXCEPT SELECT id::int, kind, what FROM seen ORDER BY 1, 2, 3;
-- nothing for the caller, who has lost nothing
SELECT * FROM session EXCEPT SELECT * FROM hygiene_before;
SELECT * FROM hygiene_before EXCEPT SELECT * FROM session;
EXECUTE hygiene_c;
FETCH ALL FROM hygiene_c;
INSERT INTO hygiene_c (t) VALUES ('and more') RETURNING *;
SELECT pg_temp.hygiene_c();
SELECT pg_advisory_unlock(5, 1), pg_advisory_unlock_shared(5, 2), pg_advisory_unlock(55);
SELECT * FROM session WHERE kind = 'lock';
-- settled by the owner
SELECT op, by, settings FROM settled ORDER BY n;
SELECT id, attempt, retry_after > now() AS later FROM jobs ORDER BY id;
CLOSE ALL;
DEALLOCATE ALL;
UNLISTEN *;
DROP TABLE hygiene_c, hygiene_before;
RESET work_mem;
RESET application_name;

-- what the caller set stays set, also where the handler resets it
DELETE FROM jobs;
SET rs_hygiene.mine = 'caller';
CREATE FUNCTION reset_all(p jsonb) RETURNS void
LANGUAGE plpgsql AS $$ BEGIN RESET ALL; RESET ROLE; RESET rs_hygiene.mine; END $$;
SELECT ruststream.alter_subscription('hygiene', handler => 'reset_all');
INSERT INTO jobs (id) VALUES (1);
CALL ruststream.drain('hygiene');
SHOW rs_hygiene.mine;
SHOW search_path;
SELECT count(*) FROM jobs;

-- SET CONSTRAINTS of one handler is nothing to the next
CREATE TABLE parents (id int PRIMARY KEY);
CREATE TABLE children (id int REFERENCES parents DEFERRABLE);
CREATE FUNCTION defer(p jsonb, d ruststream.delivery) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	IF p->>'do' = 'defer' THEN
		SET CONSTRAINTS ALL DEFERRED;
	END IF;
	INSERT INTO rs_hygiene.children VALUES (d.id::int);
	INSERT INTO rs_hygiene.parents VALUES (d.id::int);
END $$;
SELECT ruststream.alter_subscription('hygiene', handler => 'defer');
INSERT INTO jobs (id, payload) VALUES (1, '{"do": "defer"}'), (2, '{}'), (3, '{"do": "defer"}');
CALL ruststream.drain('hygiene');
SELECT * FROM children ORDER BY id;

-- a handler that ends transactions, or starts what cannot be in one: its own error
DELETE FROM jobs;
DELETE FROM ruststream.failure_history;
CREATE FUNCTION run(p jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	CASE p->>'do'
		WHEN 'commit' THEN COMMIT;
		WHEN 'rollback' THEN ROLLBACK;
		WHEN 'drain' THEN CALL ruststream.drain('hygiene');
		ELSE EXECUTE p->>'do';
	END CASE;
END $$;
SELECT ruststream.alter_subscription('hygiene', handler => 'run');
INSERT INTO jobs (id, payload) SELECT n, jsonb_build_object('do', w) FROM unnest('{commit,rollback,drain,COMMIT,SAVEPOINT s,
	ROLLBACK TO SAVEPOINT ruststream_claim,RELEASE SAVEPOINT ruststream_claim,PREPARE TRANSACTION ''rs_hygiene'',BEGIN,
	VACUUM rs_hygiene.jobs,DISCARD ALL,CREATE DATABASE rs_hygiene,SELECT 1}'::text[]) WITH ORDINALITY AS u(w, n);
CALL ruststream.drain('hygiene');
SELECT f.id, payload->>'do' AS what, f.sqlstate FROM ruststream.failure f JOIN jobs j ON j.id::text = f.id
	WHERE f.subscription = 'hygiene' ORDER BY j.id;
SELECT count(*) FROM pg_prepared_xacts;

---------------------------------------------------------- where drain may be called

\set VERBOSITY default
DELETE FROM jobs;
INSERT INTO jobs (id, payload) SELECT i, '{"do": "SELECT 1"}' FROM generate_series(1, 20) AS i;
BEGIN;
CALL ruststream.drain('hygiene');
ROLLBACK;
CREATE FUNCTION call_drain() RETURNS void
LANGUAGE plpgsql AS $$ BEGIN CALL ruststream.drain('hygiene'); END $$;
SELECT call_drain();
CREATE PROCEDURE call_drain_setting()
LANGUAGE plpgsql SET work_mem = '5MB' AS $$ BEGIN CALL ruststream.drain('hygiene', 1); END $$;
CALL call_drain_setting();
\set VERBOSITY terse
DO $$
BEGIN
	CALL ruststream.drain('hygiene', 1);
EXCEPTION WHEN OTHERS THEN
	RAISE NOTICE 'refused: %', SQLSTATE IN ('25001', '2D000');
END $$;
SELECT count(*) FROM jobs;
CALL ruststream.drain('no such subscription');
CALL ruststream.drain(NULL);
-- by itself, from DO, from a procedure, in a loop, with the caller's own work around it
CALL ruststream.drain('hygiene', 1);
CREATE TABLE around (t text);
DO $$
BEGIN
	INSERT INTO rs_hygiene.around VALUES ('before');
	CALL ruststream.drain('hygiene', 1);
	INSERT INTO rs_hygiene.around VALUES ('after');
END $$;
CREATE PROCEDURE call_drain_twice()
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..2 LOOP
		CALL ruststream.drain('hygiene', 1);
	END LOOP;
	COMMIT;
	CALL ruststream.drain('hygiene', 1);
	INSERT INTO rs_hygiene.around VALUES ('rolled back');
	ROLLBACK;
END $$;
CALL call_drain_twice();
DO $$
DECLARE
	r record;
BEGIN
	FOR r IN SELECT i FROM generate_series(1, 3) AS i LOOP
		CALL ruststream.drain('hygiene', 1);
	END LOOP;
END $$;
SELECT * FROM around;
SELECT count(*) FROM jobs;
SET ruststream.trace = on;
CALL ruststream.drain('hygiene', 1);
RESET ruststream.trace;

-- a cancelled call: everything of the delivery is undone, its attempt is not counted
CREATE TABLE effect (id text);
CREATE FUNCTION sleep(p jsonb, d ruststream.delivery) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_hygiene.effect VALUES (d.id);
	CREATE TEMP TABLE hygiene_sleep (id int);
	PERFORM pg_advisory_lock(9), set_config('work_mem', '9MB', false);
	IF p->>'do' = 'sleep' THEN
		PERFORM pg_sleep(1000);
	END IF;
EXCEPTION WHEN OTHERS THEN
	RAISE NOTICE 'not reached: a cancel is not among the others';
END $$;
DELETE FROM jobs;
DELETE FROM ruststream.failure_history;
SELECT ruststream.alter_subscription('hygiene', handler => 'sleep');
INSERT INTO jobs (id, payload) VALUES (1, '{}'), (2, '{"do": "sleep"}'), (3, '{}');
SET statement_timeout = '300ms';
CALL ruststream.drain('hygiene');
RESET statement_timeout;
-- what was delivered before the cancel has been delivered
SELECT id, attempt FROM jobs WHERE id > 1 ORDER BY id;
SELECT * FROM effect WHERE id <> '1';
SELECT count(*) FROM ruststream.failure WHERE subscription = 'hygiene';
SELECT kind, what FROM session WHERE kind <> 'setting' OR what ~ 'work_mem=9';
-- and the session goes on
SELECT ruststream.alter_subscription('hygiene', handler => 'run');
UPDATE jobs SET payload = '{"do": "SELECT 1"}';
CALL ruststream.drain('hygiene');
SELECT count(*) FROM jobs;

------------------------------------------- names that a hostile path resolves

CREATE SCHEMA rs_hostile;
CREATE FUNCTION rs_hostile.hostile() RETURNS boolean
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$;
DO $$
DECLARE
	t text;
	o text;
	f text;
BEGIN
	FOREACH t IN ARRAY '{int2,int4,int8,text,timestamptz,jsonb,uuid,oid,name,bool,regclass,bytea,interval}'::text[] LOOP
		EXECUTE format('CREATE FUNCTION rs_hostile.compare(pg_catalog.%1$s, pg_catalog.%1$s) RETURNS boolean LANGUAGE plpgsql AS
			''BEGIN RAISE EXCEPTION ''''hostile %1$s''''; END''', t);
		FOREACH o IN ARRAY '{=,<>,<,<=,>,>=,+,-,*,||}'::text[] LOOP
			EXECUTE format('CREATE OPERATOR rs_hostile.%s (LEFTARG = pg_catalog.%s, RIGHTARG = pg_catalog.%2$s, FUNCTION = rs_hostile.compare)', o, t);
		END LOOP;
		EXECUTE format('CREATE DOMAIN rs_hostile.%s AS pg_catalog.text CHECK (rs_hostile.hostile())', t);
	END LOOP;
	CREATE FUNCTION rs_hostile.compare(pg_catalog.int4, pg_catalog.int8) RETURNS boolean LANGUAGE sql AS 'SELECT rs_hostile.hostile()';
	CREATE OPERATOR rs_hostile.= (LEFTARG = pg_catalog.int4, RIGHTARG = pg_catalog.int8, FUNCTION = rs_hostile.compare);
	FOREACH f IN ARRAY string_to_array('now() clock_timestamp() pg_my_temp_schema() pg_listening_channels() pg_backend_pid() ack()
 count(anyelement) min(anyelement) to_jsonb(anyelement) nextval(pg_catalog.regclass) format(pg_catalog.text)
 quote_ident(pg_catalog.text) concat(pg_catalog.text) pg_has_role(pg_catalog.text,pg_catalog.text)', ' ') LOOP
		EXECUTE format('CREATE FUNCTION rs_hostile.%s RETURNS boolean LANGUAGE sql AS ''SELECT rs_hostile.hostile()''', f);
	END LOOP;
END $$;
CREATE TABLE rs_hostile.pg_locks (a int);
CREATE TABLE rs_hostile.pg_class (a int);
CREATE TABLE rs_hostile.pg_cursors (a int);
CREATE TABLE rs_hostile.queue (a int);
CREATE TABLE rs_hostile.subscription (a int);
CREATE TABLE rs_hostile.failure_history (a int);
CREATE FUNCTION hostile_handler(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
	RETURN CASE p->>'do' WHEN 'ack' THEN ruststream.ack() WHEN 'retry' THEN CASE d.attempt WHEN 1 THEN ruststream.retry() ELSE ruststream.ack() END
		WHEN 'retry_after' THEN CASE d.attempt WHEN 1 THEN ruststream.retry_after('0') ELSE ruststream.ack() END
		WHEN 'dead_letter' THEN ruststream.dead_letter('hopeless') WHEN 'null' THEN NULL END;
END $$;
DROP TRIGGER t ON jobs;
SET search_path = rs_hostile, pg_catalog;
SELECT ruststream.create_queue('rs_hygiene.hostile', groups => true, keep_processed => true);
SELECT ruststream.subscribe('hostile', 'rs_hygiene.hostile', 'rs_hygiene.hostile_handler(pg_catalog.jsonb, ruststream.delivery)', workers => 0,
	dead_letter => 'dead', max_attempts => 3, retry_delay => '0', on_error => 'retry');
CREATE TABLE rs_hygiene.hostile_dead (LIKE rs_hygiene.jobs);
SELECT ruststream.subscribe('hygiene', 'rs_hygiene.jobs', 'rs_hygiene.hostile_handler', workers => 0, retry_delay => '0',
	dead_letter => 'rs_hygiene.hostile_dead', max_attempts => 2);
INSERT INTO rs_hygiene.jobs (id, payload) VALUES (1, '{"do": "ack"}'), (2, '{"do": "retry"}'), (3, '{"do": "retry_after"}'),
	(4, '{"do": "dead_letter"}'), (5, '{"do": "null"}');
SELECT ruststream.publish('rs_hygiene.hostile', payload, group_name => 'hostile') IS NULL FROM rs_hygiene.jobs;
SET client_min_messages = error;
CALL ruststream.drain('hostile');
CALL ruststream.drain('hygiene');
RESET client_min_messages;
SELECT subscription, id, sqlstate, message FROM ruststream.failure WHERE subscription OPERATOR(pg_catalog.=) 'hostile';
SELECT subscription, state, ready, waiting, dead FROM ruststream.status WHERE subscription OPERATOR(pg_catalog.=) 'hostile';
SELECT queue, ready, waiting, dead FROM ruststream.stat_queue WHERE queue::pg_catalog.oid OPERATOR(pg_catalog.=) 'rs_hygiene.hostile'::pg_catalog.regclass::pg_catalog.oid;
SELECT ruststream.alter_subscription('hostile', retry_delay => '1 s');
SELECT ruststream.pause('hostile');
SELECT ruststream.resume('hostile');
SELECT ruststream.unsubscribe('hostile');
SELECT ruststream.detach_queue('rs_hygiene.hostile');
DROP TABLE rs_hygiene.hostile;
SET search_path = rs_hygiene, public;
SELECT id FROM jobs;
SELECT id, attempt FROM hostile_dead ORDER BY id;

-- by whom: the owner as session user and as current user
CREATE ROLE regress_rs_hygiene LOGIN;
GRANT regress_rs_hygiene TO regress_rs_hygiene_other;
GRANT USAGE ON SCHEMA rs_hygiene TO regress_rs_hygiene;
CREATE SCHEMA rs_hygiene_owned AUTHORIZATION regress_rs_hygiene;
\connect - regress_rs_hygiene
CREATE TABLE rs_hygiene_owned.jobs (id int PRIMARY KEY);
CREATE FUNCTION rs_hygiene_owned.handle(rs_hygiene_owned.jobs) RETURNS void
LANGUAGE plpgsql AS $$ BEGIN RAISE NOTICE 'handled as % of %', current_user, session_user; END $$;
SELECT ruststream.attach_queue('rs_hygiene_owned.jobs', 'id');
SELECT ruststream.subscribe('owned', 'rs_hygiene_owned.jobs', 'rs_hygiene_owned.handle', workers => 0);
INSERT INTO rs_hygiene_owned.jobs VALUES (1), (2);
CALL ruststream.drain('owned', 1);
CALL ruststream.drain('hygiene');
\connect - :superuser
CALL ruststream.drain('owned');
SET ROLE regress_rs_hygiene;
CALL ruststream.drain('owned');
RESET ROLE;
\connect - regress_rs_hygiene_other
CALL ruststream.drain('owned');
SET ROLE regress_rs_hygiene;
CALL ruststream.drain('owned');
\connect - :superuser
-- nor a session that could go back to a superuser's rights
SET SESSION AUTHORIZATION regress_rs_hygiene;
\set VERBOSITY default
CALL ruststream.drain('owned');
\set VERBOSITY terse
RESET SESSION AUTHORIZATION;
-- nor while it is paused
\connect - regress_rs_hygiene
SELECT ruststream.pause('owned');
CALL ruststream.drain('owned');
SELECT ruststream.resume('owned');
CALL ruststream.drain('owned');
-- a handler that pauses its subscription is the last
CREATE OR REPLACE FUNCTION rs_hygiene_owned.handle(rs_hygiene_owned.jobs) RETURNS void
LANGUAGE sql AS $$ SELECT ruststream.pause('owned') $$;
INSERT INTO rs_hygiene_owned.jobs VALUES (3), (4);
CALL ruststream.drain('owned');
SELECT * FROM rs_hygiene_owned.jobs;
SELECT ruststream.resume('owned');
-- one that forgets it, or drops the queue, too
CREATE OR REPLACE FUNCTION rs_hygiene_owned.handle(rs_hygiene_owned.jobs) RETURNS void
LANGUAGE sql AS $$ SELECT ruststream.unsubscribe('owned') $$;
INSERT INTO rs_hygiene_owned.jobs VALUES (5);
CALL ruststream.drain('owned');
SELECT * FROM rs_hygiene_owned.jobs;
\connect - :superuser
SET search_path = rs_hygiene, public;

SET client_min_messages = error;
DROP SCHEMA rs_hostile CASCADE;
DROP SCHEMA rs_hygiene CASCADE;
DROP SCHEMA rs_hygiene_owned CASCADE;
DROP ROLE regress_rs_hygiene, regress_rs_hygiene_other;
