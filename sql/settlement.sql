-- When the ack itself fails; and failures that are nobody's fault.
\set VERBOSITY terse
SELECT current_user AS superuser \gset
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
DROP ROLE IF EXISTS regress_rs_settlement;
RESET client_min_messages;

CREATE SCHEMA rs_settlement;
SET search_path = rs_settlement;

CREATE TABLE jobs (id int PRIMARY KEY, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb);
CREATE INDEX ON jobs (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('jobs', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload');
CREATE TABLE jobs_dead (LIKE jobs);
CREATE TABLE effect (id text, attempt int);
CREATE SEQUENCE calls;
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE writes (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);

CREATE FUNCTION handle(job jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM nextval('rs_settlement.calls');
	INSERT INTO rs_settlement.effect VALUES (d.id, d.attempt);
	IF job ? 'sql' THEN
		EXECUTE job->>'sql';
	END IF;
	RETURN CASE job->>'do' WHEN 'ack' THEN ruststream.ack() WHEN 'retry' THEN ruststream.retry()
		WHEN 'discard' THEN ruststream.discard() WHEN 'dead_letter' THEN ruststream.dead_letter()
		WHEN 'retry_after' THEN ruststream.retry_after('1 hour') END;
END $$;
-- what triggers on the queue are made of
CREATE FUNCTION raise() RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION USING MESSAGE = TG_ARGV[0], ERRCODE = TG_ARGV[1]; END $$;
CREATE FUNCTION nothing() RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;

-- Deliver one row; say how often the handler was called, and what is there then.
CREATE PROCEDURE try(job jsonb, max_deliveries int DEFAULT 1)
LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	ALTER TABLE rs_settlement.jobs DISABLE TRIGGER USER;
	SET LOCAL session_replication_role = replica;
	DELETE FROM rs_settlement.jobs;
	DELETE FROM rs_settlement.jobs_dead;
	DELETE FROM rs_settlement.effect;
	DELETE FROM ruststream.failure_history;
	INSERT INTO rs_settlement.jobs (id, payload) VALUES (1, job);
	ALTER TABLE rs_settlement.jobs ENABLE TRIGGER USER;
	PERFORM setval('rs_settlement.calls', 1, false);
	COMMIT;
	CALL ruststream.drain('settlement', max_deliveries);
	FOR r IN SELECT id, attempt, CASE WHEN retry_after IS NULL THEN 'now' ELSE 'later' END AS back FROM rs_settlement.jobs
	LOOP
		RAISE NOTICE 'row % attempt % back %', r.id, r.attempt, r.back;
	END LOOP;
	FOR r IN SELECT id, attempt FROM rs_settlement.jobs_dead LOOP
		RAISE NOTICE 'dead row % attempt %', r.id, r.attempt;
	END LOOP;
	RAISE NOTICE 'calls %, effects %', nextval('rs_settlement.calls') - 1, (SELECT count(*) FROM rs_settlement.effect);
	FOR r IN SELECT sqlstate, id, attempt, message FROM ruststream.failure WHERE subscription = 'settlement' LOOP
		RAISE NOTICE 'failure of row % attempt %: % %', r.id, r.attempt, r.sqlstate, r.message;
	END LOOP;
END $$;

SELECT ruststream.subscribe('settlement', 'jobs', 'handle', workers => 0, dead_letter => 'jobs_dead', retry_delay => '1 hour');
SET ruststream.trace = on;

-- a foreign key forbids the row's end
CREATE TABLE child (id int REFERENCES jobs);
CALL try('{"do": "ack"}');
-- the handler's own write does
CALL try('{"do": "ack", "sql": "INSERT INTO rs_settlement.child VALUES (1)"}');
DROP TABLE child;
CREATE TABLE child (id int);
INSERT INTO child VALUES (1);
SET session_replication_role = replica;
ALTER TABLE child ADD CONSTRAINT child_id FOREIGN KEY (id) REFERENCES jobs NOT VALID;
RESET session_replication_role;
CALL try('{"do": "ack"}');
CALL try('{"do": "discard"}');
CALL try('{"do": "dead_letter"}');
CALL try('{"do": "retry"}');
-- at the cap, where it cannot go either
SELECT ruststream.alter_subscription('settlement', max_attempts => 1);
CALL try('{"do": "ack"}');
SELECT ruststream.alter_subscription('settlement', reset => '{max_attempts}');

-- deferred: an ack's settlement finds it at once, another's COMMIT finds it
ALTER TABLE child DROP CONSTRAINT child_id;
ALTER TABLE child ADD CONSTRAINT child_id FOREIGN KEY (id) REFERENCES jobs DEFERRABLE INITIALLY DEFERRED NOT VALID;
CALL try('{"do": "ack"}');
CALL try('{"do": "discard"}');
CALL try('{"do": "dead_letter"}');
DROP TABLE child;

-- a deferred constraint of the handler's writes: an error of the handler
CALL try('{"do": "ack", "sql": "INSERT INTO rs_settlement.writes VALUES (5)"}');
CALL try('{"do": "discard", "sql": "INSERT INTO rs_settlement.writes VALUES (5)"}');
CALL try('{"do": "ack", "sql": "INSERT INTO rs_settlement.writes VALUES (5); INSERT INTO rs_settlement.parent VALUES (5)"}');
CALL try('{"do": "ack", "sql": "SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED; INSERT INTO rs_settlement.writes VALUES (6)"}');
SELECT * FROM writes;
SELECT * FROM parent;

-- triggers that raise
CREATE TRIGGER t BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION raise('before delete', 'RS001');
CALL try('{"do": "ack"}');
CALL try('{"do": "discard"}');
CALL try('{"do": "dead_letter"}');
DROP TRIGGER t ON jobs;
CREATE TRIGGER t AFTER DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION raise('after delete', 'RS002');
CALL try('{"do": "ack"}');
DROP TRIGGER t ON jobs;
CREATE TRIGGER t AFTER DELETE ON jobs FOR EACH STATEMENT EXECUTE FUNCTION raise('after the statement', 'RS002');
CALL try('{"do": "ack"}');
DROP TRIGGER t ON jobs;
CREATE CONSTRAINT TRIGGER t AFTER DELETE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
	EXECUTE FUNCTION raise('at commit', 'RS003');
CALL try('{"do": "ack"}');
CALL try('{"do": "discard"}');
CALL try('{"do": "dead_letter"}');
DROP TRIGGER t ON jobs;
CREATE CONSTRAINT TRIGGER t AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
	EXECUTE FUNCTION raise('at commit', 'RS003');
CALL try('{"do": "ack"}');
-- neither can it be tried again, so that it stays as it was, and its worker waits
CALL try('{"do": "retry"}');
CALL try('{"do": "retry_after"}');
DROP TRIGGER t ON jobs;
CREATE TRIGGER t BEFORE DELETE OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION raise('no change', 'RS004');
CALL try('{"do": "ack"}');
RESET ruststream.trace;
SELECT ruststream.alter_subscription('settlement', retry_delay => '100 ms');
SELECT clock_timestamp() AS started \gset
CALL try('{"do": "ack"}', 3);
SELECT clock_timestamp() - :'started' >= '200 ms' AS waited_twice;
SET ruststream.trace = on;
DROP TRIGGER t ON jobs;
SELECT ruststream.alter_subscription('settlement', retry_delay => '1 hour');

-- triggers that keep the settlement from doing anything
CREATE TRIGGER t BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION nothing();
CALL try('{"do": "ack"}');
CALL try('{"do": "discard"}');
CALL try('{"do": "dead_letter"}');
DROP TRIGGER t ON jobs;
CREATE TRIGGER t BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION nothing();
CALL try('{"do": "ack"}');
CALL try('{"do": "retry"}');
CALL try('{"do": "retry_after"}');
DROP TRIGGER t ON jobs;
CREATE TRIGGER t BEFORE INSERT ON jobs_dead FOR EACH ROW EXECUTE FUNCTION nothing();
CALL try('{"do": "dead_letter"}');
SELECT ruststream.alter_subscription('settlement', max_attempts => 1);
CALL try('{"do": "retry"}');
SELECT ruststream.alter_subscription('settlement', reset => '{max_attempts}');
DROP TRIGGER t ON jobs_dead;
CREATE TRIGGER t BEFORE INSERT ON jobs_dead FOR EACH ROW EXECUTE FUNCTION raise('no room', 'RS005');
CALL try('{"do": "dead_letter"}');
DROP TRIGGER t ON jobs_dead;

-- the failed settlement may go well the next time
SELECT ruststream.alter_subscription('settlement', retry_delay => '1 ms');
CREATE FUNCTION raise_at_first() RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN IF OLD.attempt < 3 THEN RAISE EXCEPTION 'too early'; END IF; RETURN OLD; END $$;
CREATE TRIGGER t BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION raise_at_first();
CREATE PROCEDURE drain_until_empty()
LANGUAGE plpgsql AS $$
BEGIN
	WHILE EXISTS (SELECT FROM rs_settlement.jobs) LOOP
		CALL ruststream.drain('settlement');
	END LOOP;
END $$;
RESET ruststream.trace;
-- whatever the error policy is, for the handler has not failed
SELECT ruststream.alter_subscription('settlement', on_error => 'retry');
CALL try('{"do": "ack"}');
CALL drain_until_empty();
SELECT * FROM effect;
SELECT ruststream.alter_subscription('settlement', on_error => 'discard');
CALL try('{"do": "ack"}');
CALL drain_until_empty();
SELECT * FROM effect;
SELECT ruststream.alter_subscription('settlement', on_error => 'dead_letter');
CALL try('{"do": "ack"}');
CALL drain_until_empty();
SELECT * FROM effect;
DROP TRIGGER t ON jobs;

-- a policy that lets the owner see a row, but not end it
CREATE ROLE regress_rs_settlement LOGIN;
CREATE SCHEMA rs_settlement_rls AUTHORIZATION regress_rs_settlement;
\connect - regress_rs_settlement
SET search_path = rs_settlement_rls;
CREATE TABLE jobs (id int PRIMARY KEY, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb);
CREATE INDEX ON jobs (retry_after NULLS FIRST, id);
CREATE TABLE effect (id text);
CREATE FUNCTION handle(jsonb, d ruststream.delivery) RETURNS void
LANGUAGE sql AS 'INSERT INTO rs_settlement_rls.effect VALUES (d.id)';
SELECT ruststream.attach_queue('jobs', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload');
SELECT ruststream.subscribe('rls', 'jobs', 'handle', workers => 0, retry_delay => '1 hour');
ALTER TABLE jobs ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY see ON jobs FOR SELECT USING (true);
CREATE POLICY change ON jobs FOR UPDATE USING (true);
CREATE POLICY come ON jobs FOR INSERT WITH CHECK (true);
CREATE POLICY go ON jobs FOR DELETE USING (id <> 2);
INSERT INTO jobs SELECT generate_series(1, 3);
CALL ruststream.drain('rls');
SELECT id, attempt, retry_after > now() AS later FROM jobs ORDER BY id;
SELECT id FROM effect ORDER BY id;
SELECT id, attempt, sqlstate, message, hint FROM ruststream.failure;
-- rows that the owner may not lock are not there for it
DROP POLICY change ON jobs;
CREATE POLICY change ON jobs FOR UPDATE USING (id <> 4);
INSERT INTO jobs VALUES (4), (5);
CALL ruststream.drain('rls');
SELECT id, attempt, retry_after > now() AS later FROM jobs ORDER BY id;
-- nothing can be written about a row: it stays as it is, and its worker waits before it
UPDATE jobs SET retry_after = NULL;
DROP POLICY change ON jobs;
CREATE POLICY change ON jobs FOR UPDATE USING (true) WITH CHECK (false);
SELECT ruststream.alter_subscription('rls', retry_delay => '10 s');
DELETE FROM effect;
SELECT clock_timestamp() AS started \gset
CALL ruststream.drain('rls', 2);
SELECT clock_timestamp() - :'started' >= '10 s' AS waited;
SELECT id, attempt, retry_after > now() AS later FROM jobs ORDER BY id;
SELECT id FROM effect ORDER BY id;
SELECT id, attempt, sqlstate FROM ruststream.failure;
\connect - :superuser
SET search_path = rs_settlement;
SET ruststream.trace = on;

------------------------------------------------------------------- transient

SELECT ruststream.alter_subscription('settlement', retry_delay => '1 hour', reset => '{on_error}');

-- in the handler, twice: the attempt is not counted
CREATE SEQUENCE failures;
CREATE FUNCTION fail_times(times int, state text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	IF nextval('rs_settlement.failures') <= times THEN
		RAISE EXCEPTION USING MESSAGE = 'transient', ERRCODE = state;
	END IF;
END $$;
CREATE FUNCTION failing() RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN PERFORM rs_settlement.fail_times(TG_ARGV[0]::int, TG_ARGV[1]); RETURN coalesce(NEW, OLD); END $$;

CALL try('{"do": "ack", "sql": "SELECT rs_settlement.fail_times(2, $$40001$$)"}');
SELECT * FROM effect;
SELECT setval('failures', 1, false);
CALL try('{"do": "ack", "sql": "SELECT rs_settlement.fail_times(1, $$40P01$$)"}');
-- at settlement
SELECT setval('failures', 1, false);
CREATE TRIGGER t BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION failing(2, '40001');
CALL try('{"do": "ack"}');
DROP TRIGGER t ON jobs;
-- at COMMIT
SELECT setval('failures', 1, false);
CREATE CONSTRAINT TRIGGER t AFTER DELETE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION failing(2, '40001');
CALL try('{"do": "discard"}');
DROP TRIGGER t ON jobs;
-- in the handler's deferred constraints
SELECT setval('failures', 1, false);
CREATE CONSTRAINT TRIGGER t AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION failing(1, '40001');
CALL try('{"do": "ack"}');
DROP TRIGGER t ON effect;
-- one that the handler itself has swallowed
CALL try('{"do": "ack", "sql": "DO $do$ BEGIN RAISE EXCEPTION USING ERRCODE = $$40P01$$; EXCEPTION WHEN deadlock_detected THEN NULL; END $do$"}');

-- always: ten times, then an ordinary failure
RESET ruststream.trace;
SELECT setval('failures', 1, false);
CALL try('{"do": "ack", "sql": "SELECT rs_settlement.fail_times(1000, $$40001$$)"}');
SELECT setval('failures', 1, false);
CREATE TRIGGER t BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION failing(1000, '40P01');
CALL try('{"do": "ack"}');
DROP TRIGGER t ON jobs;
-- a discard settles it, though its settlement is not the handler's
SELECT setval('failures', 1, false);
SELECT ruststream.alter_subscription('settlement', on_error => 'discard');
CALL try('{"do": "ack", "sql": "SELECT rs_settlement.fail_times(1000, $$40001$$)"}');
SELECT ruststream.alter_subscription('settlement', reset => '{on_error}', max_attempts => 1);
SELECT setval('failures', 1, false);
CALL try('{"do": "ack", "sql": "SELECT rs_settlement.fail_times(1000, $$40001$$)"}');
SELECT ruststream.alter_subscription('settlement', reset => '{max_attempts}');
-- nine times, then it goes well
SELECT setval('failures', 1, false);
CALL try('{"do": "ack", "sql": "SELECT rs_settlement.fail_times(9, $$40001$$)"}');

-- they are settled afresh at READ COMMITTED, whatever the queue's level
SELECT ruststream.detach_queue('jobs');
SET client_min_messages = error;
SELECT ruststream.attach_queue('jobs', 'id', retry_after_column => 'retry_after', attempt_column => 'attempt',
	payload_column => 'payload', isolation => 'serializable');
SELECT ruststream.subscribe('settlement', 'jobs', 'handle', workers => 0, retry_delay => '1 hour');
RESET client_min_messages;
CREATE TABLE levels (n int GENERATED ALWAYS AS IDENTITY, level text, by text);
CREATE FUNCTION note_level() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_settlement.levels (level, by) VALUES (current_setting('transaction_isolation'), TG_OP);
	RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER t BEFORE UPDATE OR DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION note_level();
SELECT setval('failures', 1, false);
CALL try('{"do": "ack", "sql": "SELECT rs_settlement.fail_times(1000, $$40001$$)"}');
SELECT level, by FROM levels ORDER BY n;
TRUNCATE levels;
CALL try('{"do": "retry_after"}');
SELECT level, by FROM levels ORDER BY n;

-- the counters, where the server keeps them
SELECT current_setting('shared_preload_libraries') !~ 'ruststream' OR transient = 10 AS transient_counted,
	current_setting('shared_preload_libraries') !~ 'ruststream' OR (deliveries, failed, settle_failed) = (2, 1, 0) AS failures_counted
	FROM ruststream.stat_subscription WHERE subscription = 'settlement';

SET client_min_messages = error;
DROP SCHEMA rs_settlement CASCADE;
DROP SCHEMA rs_settlement_rls CASCADE;
DROP ROLE regress_rs_settlement;
