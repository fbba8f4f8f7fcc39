-- The extension as a whole: what it installs, whom it lets do what, and what
-- is left of a queue when it is dropped.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE ext_user;
CREATE SCHEMA ext_test AUTHORIZATION ext_user;
RESET client_min_messages;

--
-- What there is
--
-- Everything of ours is in our schema, and nothing else is there.
SELECT classid::regclass AS kind, count(*) > 0 AS some,
    count(*) FILTER (WHERE identity !~ '^ruststream([._]|$)') AS elsewhere
FROM pg_depend, pg_identify_object(classid, objid, 0)
WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
    AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ruststream')
GROUP BY 1 ORDER BY classid::regclass::text;

-- What everybody may call and read.
SELECT p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')' AS not_for_everybody
FROM pg_proc AS p
WHERE pronamespace = 'ruststream'::regnamespace AND NOT has_function_privilege('ext_user', p.oid, 'EXECUTE')
ORDER BY 1;
SELECT relname AS readable, relkind
FROM pg_class
WHERE relnamespace = 'ruststream'::regnamespace AND relkind IN ('r', 'v', 'S')
    AND has_table_privilege('ext_user', oid, 'SELECT, INSERT, UPDATE, DELETE')
ORDER BY 1;
SELECT has_schema_privilege('ext_user', 'ruststream', 'USAGE') AS usage,
    has_schema_privilege('ext_user', 'ruststream', 'CREATE') AS "create";

-- A function with the owner's rights has its own search path; a view of other
-- people's rows is a barrier; what is for users says what it is for.
SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'ruststream'::regnamespace AND prosecdef;
SELECT relname FROM pg_class
WHERE relnamespace = 'ruststream'::regnamespace AND relkind = 'v'
    AND NOT coalesce(reloptions @> '{security_barrier=true}', false);
SELECT proname FROM pg_proc
WHERE pronamespace = 'ruststream'::regnamespace AND proname !~ '^internal_'
    AND obj_description(oid, 'pg_proc') IS NULL;
SELECT relname FROM pg_class
WHERE relnamespace = 'ruststream'::regnamespace AND relkind IN ('r', 'v') AND relname !~ '^internal_'
    AND obj_description(oid, 'pg_class') IS NULL;

-- A dump carries the queues, the subscriptions and their numbers.
SELECT unnest(extconfig)::regclass FROM pg_extension WHERE extname = 'ruststream' ORDER BY 1;

--
-- Nobody's search path leads us astray
--
SET ROLE ext_user;
SET search_path = ext_test, pg_catalog;
CREATE FUNCTION trap(text, text) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'trapped'; END$$;
CREATE FUNCTION trap(oid, oid) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'trapped'; END$$;
CREATE FUNCTION trap(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'trapped'; END$$;
CREATE FUNCTION trap(int, int) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'trapped'; END$$;
CREATE FUNCTION trap(timestamptz, timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'trapped'; END$$;
CREATE OPERATOR = (FUNCTION = trap, LEFTARG = text, RIGHTARG = text);
CREATE OPERATOR = (FUNCTION = trap, LEFTARG = oid, RIGHTARG = oid);
CREATE OPERATOR = (FUNCTION = trap, LEFTARG = bigint, RIGHTARG = bigint);
CREATE OPERATOR = (FUNCTION = trap, LEFTARG = int, RIGHTARG = int);
CREATE OPERATOR <= (FUNCTION = trap, LEFTARG = timestamptz, RIGHTARG = timestamptz);
CREATE FUNCTION now() RETURNS timestamptz LANGUAGE plpgsql AS $$BEGIN RAISE 'trapped'; END$$;
CREATE DOMAIN text AS pg_catalog.int4;
CREATE DOMAIN jsonb AS pg_catalog.int4;
CREATE TABLE queue (id int);
CREATE TABLE subscription (id int);
CREATE TEMP TABLE pg_class (id int);
CREATE TEMP TABLE failure_history (id int);

SELECT ruststream.create_queue('jobs', groups => true, keep_processed => true);
CREATE FUNCTION handler(pg_catalog.jsonb) RETURNS ruststream.outcome LANGUAGE sql AS 'SELECT ruststream.ack()';
SELECT ruststream.subscribe('ext', 'jobs', 'handler', workers => 0, dead_letter => 'dead', max_attempts => 3);
SELECT ruststream.alter_subscription('ext', max_attempts => 4);
SELECT ruststream.publish('jobs', '{"a": 1}', 'ext', delay => '0');
SELECT ruststream.pause('ext');
SELECT ruststream.resume('ext');
SELECT subscription, state, ready, dead FROM ruststream.status;
SELECT queue, ready FROM ruststream.stat_queue;
SELECT ruststream.unsubscribe('ext');
SELECT ruststream.detach_queue('jobs');
DROP TABLE jobs;
DROP TABLE pg_temp.pg_class, pg_temp.failure_history;
RESET search_path;
RESET ROLE;
SET client_min_messages = warning;
DROP OWNED BY ext_user CASCADE;
CREATE SCHEMA ext_test AUTHORIZATION ext_user;
RESET client_min_messages;

--
-- Drops
--
-- Of all kinds of things, while we look on.
SET ROLE ext_user;
SET search_path = ext_test;
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handler(jsonb) RETURNS ruststream.outcome LANGUAGE sql AS 'SELECT ruststream.ack()';
SELECT ruststream.subscribe('ext', 'jobs', 'handler', workers => 0);
CREATE TABLE other (id int PRIMARY KEY, a int, b int);
CREATE VIEW a_view AS SELECT * FROM other;
CREATE SEQUENCE a_sequence;
CREATE TYPE a_type AS (a int);
CREATE TABLE typed OF a_type;
CREATE TEMP TABLE a_temp (id int);
ALTER TABLE other DROP COLUMN b CASCADE;
DROP SEQUENCE a_sequence;
DROP TABLE a_temp;
SET client_min_messages = warning;
DROP TYPE a_type CASCADE;
RESET client_min_messages;
DROP TABLE other;
-- Not even a replica's settings hide a drop from us.
RESET ROLE;
SET session_replication_role = replica;
SELECT ruststream.create_queue('ext_test.second');
DROP TABLE second;
RESET session_replication_role;
SELECT relation FROM ruststream.queue;

-- The trigger holds the extension; with CASCADE the trigger and the handlers
-- go, and the table and its rows stay.
SET ROLE ext_user;
INSERT INTO jobs (payload) VALUES ('1'), ('2');
RESET ROLE;
DROP EXTENSION ruststream;
SET client_min_messages = warning;
DROP EXTENSION ruststream CASCADE;
RESET client_min_messages;
SET ROLE ext_user;
INSERT INTO jobs (payload) VALUES ('3');
SELECT count(*) FROM jobs;
SELECT count(*) AS handlers FROM pg_proc WHERE pronamespace = 'ext_test'::regnamespace;
SELECT count(*) AS event_triggers FROM pg_event_trigger WHERE evtname ~ 'ruststream';
DROP TABLE jobs;
RESET ROLE;

--
-- Creating it again
--
SET ROLE ext_user;
CREATE EXTENSION ruststream;
RESET ROLE;
-- Nothing that is there already is taken over.
CREATE SCHEMA ruststream;
\set VERBOSITY terse
CREATE EXTENSION ruststream;
\set VERBOSITY default
DROP SCHEMA ruststream;
CREATE SCHEMA elsewhere;
CREATE EXTENSION ruststream SCHEMA elsewhere;
DROP SCHEMA elsewhere;
CREATE EXTENSION ruststream;
ALTER EXTENSION ruststream SET SCHEMA public;
-- A session that knew the old one finds its way in the new one.
SET ROLE ext_user;
SELECT ruststream.create_queue('ext_test.jobs');
CREATE FUNCTION handler(jsonb) RETURNS ruststream.outcome LANGUAGE sql AS 'SELECT ruststream.ack()';
SELECT ruststream.subscribe('ext', 'ext_test.jobs', 'handler', workers => 0);
SELECT ruststream.publish('ext_test.jobs', '1');
SELECT subscription, state, ready FROM ruststream.status;
RESET ROLE;
SET client_min_messages = warning;
DROP OWNED BY ext_user CASCADE;
SELECT count(*) AS left_behind FROM ruststream.queue;
DROP ROLE ext_user;
