-- What must not happen: one bad row or one odd table stops nobody else.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;
CREATE SCHEMA rs_robust;
SET search_path = rs_robust;

-- a row that always fails, on a table that cannot delay it: the others go on
CREATE TABLE jobs (id int PRIMARY KEY, attempt int NOT NULL DEFAULT 1);
CREATE TABLE done (id int);
CREATE FUNCTION handle(j jobs) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_robust.done VALUES (j.id);
	IF j.id < 3 THEN
		RAISE EXCEPTION 'poison';
	END IF;
END $$;
SELECT ruststream.attach_queue('jobs', 'id', attempt_column => 'attempt');
SELECT ruststream.subscribe('robust', 'jobs', 'handle', workers => 0, retry_delay => '1 day');
INSERT INTO jobs SELECT g FROM generate_series(1, 6) AS g;
CALL ruststream.drain('robust', 6);
SELECT * FROM jobs ORDER BY id;
SELECT * FROM done ORDER BY id;

-- a failing row that is to be tried at once waits for its worker all the same
SELECT ruststream.create_queue('hot');
CREATE FUNCTION fail(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'again'; END $$;
SELECT ruststream.subscribe('hot', 'hot', 'fail', workers => 0, on_error => 'retry', retry_delay => '200 ms');
INSERT INTO hot (payload) VALUES ('{}');
SELECT clock_timestamp() AS started \gset
CALL ruststream.drain('hot', 3);
SELECT clock_timestamp() - :'started' >= '400 ms' AS waited_twice;

-- what a trigger of the settlement sets is gone before the next delivery
CREATE TABLE tenants (id int PRIMARY KEY);
CREATE TABLE seen (id int, tenant text, path text);
CREATE FUNCTION look(t tenants) RETURNS void
LANGUAGE sql AS $$ INSERT INTO rs_robust.seen VALUES (t.id, current_setting('app.tenant', true), current_setting('search_path')) $$;
CREATE FUNCTION set_tenant() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM set_config('app.tenant', OLD.id::text, false), set_config('search_path', 'pg_temp', false);
	RETURN OLD;
END $$;
CREATE TRIGGER t BEFORE DELETE ON tenants FOR EACH ROW EXECUTE FUNCTION set_tenant();
CREATE CONSTRAINT TRIGGER late AFTER DELETE ON tenants DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION set_tenant();
SELECT ruststream.attach_queue('tenants', 'id');
SELECT ruststream.subscribe('tenants', 'tenants', 'look', workers => 0);
INSERT INTO tenants SELECT generate_series(1, 3);
CALL ruststream.drain('tenants');
SELECT id, coalesce(tenant, '') = '' AS no_tenant, path FROM seen ORDER BY id;
SELECT coalesce(current_setting('app.tenant', true), '') = '' AS no_tenant, current_setting('search_path');

-- the one name that our statements need for themselves
CREATE TABLE evil (id bigint PRIMARY KEY, ruststream_row bigint);
SELECT ruststream.attach_queue('evil', 'id');
CREATE TABLE mild (id bigint PRIMARY KEY, other bigint);
CREATE FUNCTION take(mild) RETURNS void LANGUAGE sql AS 'SELECT';
SELECT ruststream.attach_queue('mild', 'id');
SELECT ruststream.subscribe('mild', 'mild', 'take', workers => 0);
INSERT INTO mild VALUES (1, 4711);
ALTER TABLE mild RENAME other TO ruststream_row;
CALL ruststream.drain('mild');
ALTER TABLE mild RENAME ruststream_row TO other;
CALL ruststream.drain('mild');
SELECT * FROM mild;

-- a cancel in the settlement that follows a failed one is the caller's, too
CREATE TABLE slow (id int PRIMARY KEY, attempt int NOT NULL DEFAULT 1);
CREATE FUNCTION take_slow(slow) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no end'; END $$;
CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NEW; END $$;
CREATE TRIGGER d BEFORE DELETE ON slow FOR EACH ROW EXECUTE FUNCTION refuse();
CREATE TRIGGER u BEFORE UPDATE ON slow FOR EACH ROW EXECUTE FUNCTION linger();
SELECT ruststream.attach_queue('slow', 'id', attempt_column => 'attempt');
SELECT ruststream.subscribe('slow', 'slow', 'take_slow', workers => 0);
INSERT INTO slow VALUES (1);
SET statement_timeout = '300 ms';
\set VERBOSITY terse
CALL ruststream.drain('slow');
\set VERBOSITY default
RESET statement_timeout;
SELECT * FROM slow;

SET client_min_messages = error;
DROP SCHEMA rs_robust CASCADE;
