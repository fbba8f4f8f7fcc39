-- Nobody's rights through us: what others have attached to a table runs neither
-- as whoever looks at it nor as a superuser who delivers.  No worker takes part.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE sec_owner LOGIN;
CREATE ROLE sec_writer LOGIN IN ROLE pg_write_all_data;
CREATE SCHEMA sec_test;
GRANT ALL ON SCHEMA sec_test TO sec_owner;
SET search_path = sec_test;
RESET client_min_messages;

CREATE FUNCTION refused(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    message text; code text; detail text; hint text;
BEGIN
    EXECUTE statement;
    RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, code = RETURNED_SQLSTATE,
        detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN regexp_replace(format(E'%s %s%s\n-> %s', code, message, E'\n   ' || nullif(detail, ''), hint),
        '(as|TO) "?' || session_user || '"?', '\1 a superuser', 'g');
END $$;

--
-- Functions in an index are not run by whoever looks at the table
--
-- Evaluated once a session by whoever asks the server for the index's predicate.
SET ROLE sec_owner;
CREATE FUNCTION spy() RETURNS integer LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user) THEN
        RAISE WARNING 'the spy runs as a superuser';
    END IF;
    RETURN 1;
END $$;
CREATE FUNCTION spy(integer) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN sec_test.spy();
END $$;
CREATE TABLE spied (id bigint NOT NULL, payload jsonb, processed_at timestamptz);
CREATE UNIQUE INDEX a_spied ON spied (id) WHERE spy(1) = 1;
CREATE UNIQUE INDEX b_spied ON spied ((id + spy(1)));
CREATE INDEX c_spied ON spied (id) WHERE processed_at IS NULL AND spy(2) = 1;
CREATE UNIQUE INDEX d_spied ON spied (id);
CREATE INDEX e_spied ON spied (id) WHERE processed_at IS NULL;
CREATE TABLE spied_dead (LIKE spied);
CREATE UNIQUE INDEX ON spied_dead (id) WHERE spy(1) = 1;
CREATE FUNCTION handle(job spied) RETURNS void LANGUAGE sql AS '';
RESET ROLE;

\c -
SET search_path = sec_test;
SELECT ruststream.attach_queue('spied', 'id', processed_at_column => 'processed_at', payload_column => 'payload');
SET ROLE sec_owner;
SELECT ruststream.subscribe('spied', 'spied', 'handle', workers => 0, dead_letter => 'spied_dead');
\c -
SELECT subscription, ready, last_error FROM ruststream.status WHERE subscription = 'spied';
SELECT subscriptions, ready FROM ruststream.stat_queue WHERE queue = 'sec_test.spied'::regclass;
\c -
SELECT ruststream.alter_subscription('spied', retry_delay => '5 s');
SELECT ruststream.pause('spied');
SELECT ruststream.resume('spied');
SELECT sec_test.refused($$SELECT ruststream.subscribe('spied', 'sec_test.spied', 'sec_test.handle', workers => 0)$$);
CALL ruststream.drain('spied');
SELECT ruststream.detach_queue('sec_test.spied');

-- What serves is told from what does not all the same.
SET search_path = sec_test;
SET ROLE sec_owner;
DROP INDEX d_spied;
SELECT refused($$SELECT ruststream.attach_queue('spied', 'id', processed_at_column => 'processed_at')$$);
CREATE UNIQUE INDEX d_spied ON spied (id);
DROP INDEX e_spied;
SELECT ruststream.attach_queue('spied', 'id', processed_at_column => 'processed_at');
SELECT ruststream.detach_queue('spied');
CREATE INDEX e_spied ON spied (id) WHERE processed_at IS NOT NULL;
SELECT ruststream.attach_queue('spied', 'id', processed_at_column => 'processed_at');
SELECT ruststream.detach_queue('spied');
SELECT ruststream.attach_queue('spied', 'id');
SELECT ruststream.detach_queue('spied');
RESET ROLE;

--
-- A superuser's deliveries
--
CREATE TABLE parts (id bigint PRIMARY KEY, payload jsonb) PARTITION BY RANGE (id);
CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id);
CREATE TABLE parts_lowest PARTITION OF parts_low FOR VALUES FROM (0) TO (10);
CREATE TABLE dead (id bigint, payload jsonb) PARTITION BY RANGE (id);
CREATE TABLE dead_all PARTITION OF dead DEFAULT;
CREATE FUNCTION take(job parts) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
    RAISE NOTICE 'handler a';
    RETURN ruststream.ack();
END $$;
SELECT ruststream.attach_queue('parts', 'id', payload_column => 'payload');

-- neither the partitions of the queue nor those of its dead letters may be somebody else's
ALTER TABLE parts_lowest OWNER TO sec_owner;
SELECT refused($$SELECT ruststream.subscribe('parts', 'parts', 'take', workers => 0, dead_letter => 'dead')$$);
ALTER TABLE parts_lowest OWNER TO CURRENT_USER;
ALTER TABLE dead_all OWNER TO sec_owner;
SELECT refused($$SELECT ruststream.subscribe('parts', 'parts', 'take', workers => 0, dead_letter => 'dead')$$);
ALTER TABLE dead_all OWNER TO CURRENT_USER;

-- nor the handler
ALTER FUNCTION take(parts) OWNER TO sec_owner;
SELECT refused($$SELECT ruststream.subscribe('parts', 'parts', 'take', workers => 0, dead_letter => 'dead')$$);
ALTER FUNCTION take(parts) OWNER TO CURRENT_USER;
SELECT ruststream.subscribe('parts', 'parts', 'take', workers => 0, dead_letter => 'dead');
INSERT INTO parts (id) VALUES (1);
CALL ruststream.drain('parts');

-- Asked again at each load.
INSERT INTO parts (id) VALUES (2);
\set VERBOSITY terse
ALTER TABLE parts_lowest OWNER TO sec_owner;
CALL ruststream.drain('parts');
ALTER TABLE parts_lowest OWNER TO CURRENT_USER;
ALTER TABLE dead_all OWNER TO sec_owner;
CALL ruststream.drain('parts');
ALTER TABLE dead_all OWNER TO CURRENT_USER;
CREATE TABLE parts_next PARTITION OF parts_low FOR VALUES FROM (10) TO (20);
ALTER TABLE parts_next OWNER TO sec_owner;
CALL ruststream.drain('parts');
DROP TABLE parts_next;

-- The owner of the handler's schema may drop it, but not put another in its place.
ALTER SCHEMA sec_test OWNER TO sec_owner;
SET ROLE sec_owner;
DROP FUNCTION take(parts);
CREATE FUNCTION take(job parts) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
    RAISE NOTICE 'handler b';
    RETURN ruststream.ack();
END $$;
RESET ROLE;
CALL ruststream.drain('parts');
SELECT state <> 'running' AS broken, ready FROM ruststream.status WHERE subscription = 'parts';
ALTER FUNCTION take(parts) OWNER TO CURRENT_USER;
CALL ruststream.drain('parts');
\set VERBOSITY default

--
-- Our tables are written by our functions only
--
-- Where somebody has been let in, nothing is delivered or registered.
GRANT INSERT ON ruststream.queue TO sec_owner;
SELECT refused($$SELECT ruststream.alter_subscription('parts', workers => 0)$$);
CALL ruststream.drain('parts');
REVOKE ALL ON ruststream.queue FROM sec_owner;
GRANT UPDATE (handler) ON ruststream.subscription TO PUBLIC;
SELECT refused($$SELECT ruststream.alter_subscription('parts', workers => 0)$$);
REVOKE ALL ON ruststream.subscription FROM PUBLIC;
GRANT TRIGGER ON ruststream.failure_history TO sec_owner;
SELECT refused($$SELECT ruststream.alter_subscription('parts', workers => 0)$$);
REVOKE ALL ON ruststream.failure_history FROM sec_owner;
-- to read them is another matter
GRANT SELECT ON ruststream.queue, ruststream.subscription, ruststream.failure_history TO sec_owner;
SELECT ruststream.alter_subscription('parts', workers => 0);
REVOKE ALL ON ruststream.queue, ruststream.subscription, ruststream.failure_history FROM sec_owner;

-- A right that is in no list does not help either.
SET ROLE sec_writer;
INSERT INTO ruststream.queue (relation, id_column, fifo, wake) VALUES ('pg_class', 'oid', false, false);
UPDATE ruststream.subscription SET handler = 'sec_test.handle';
DELETE FROM ruststream.subscription;
RESET ROLE;

--
-- Default privileges do not count
--
CREATE VIEW granted AS
SELECT o.object, coalesce(r.rolname, 'PUBLIC') AS grantee, g.privilege_type, g.is_grantable
FROM (
    SELECT 'schema', nspname::text, nspowner, nspacl FROM pg_namespace
    UNION ALL
    SELECT 'relation', oid::regclass::text, relowner, relacl FROM pg_class
    UNION ALL
    SELECT 'function', oid::regprocedure::text, proowner, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc
    UNION ALL
    SELECT 'type', oid::regtype::text, typowner, coalesce(typacl, acldefault('T', typowner)) FROM pg_type
) AS o (kind, object, owner, acl), aclexplode(o.acl) AS g LEFT JOIN pg_roles AS r ON r.oid = g.grantee
WHERE object ~ '^ruststream(\.|$)' AND g.grantee <> o.owner;

CREATE TABLE granted_before AS SELECT * FROM granted;
SELECT object, grantee, privilege_type FROM granted_before
WHERE privilege_type NOT IN ('EXECUTE', 'SELECT') AND object !~ '^ruststream\.\w+\[\]$'
  AND object NOT IN (SELECT oid::regclass::text FROM pg_class)
   OR grantee <> 'PUBLIC' OR is_grantable
ORDER BY 1, 2, 3;

BEGIN;
SET client_min_messages = error;
DROP EXTENSION ruststream CASCADE;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO sec_owner WITH GRANT OPTION;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO sec_owner;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO sec_owner;
ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO sec_owner;
ALTER DEFAULT PRIVILEGES REVOKE ALL ON FUNCTIONS FROM PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TYPES TO sec_owner;
ALTER DEFAULT PRIVILEGES REVOKE ALL ON TYPES FROM PUBLIC;
CREATE EXTENSION ruststream;
RESET client_min_messages;
SELECT 'more' AS what, * FROM (TABLE granted EXCEPT TABLE granted_before) AS m
UNION ALL
SELECT 'less', * FROM (TABLE granted_before EXCEPT TABLE granted) AS l;
ROLLBACK;

SET client_min_messages = error;
SELECT ruststream.detach_queue('parts');
DROP SCHEMA sec_test CASCADE;
DROP ROLE sec_owner, sec_writer;
