-- ruststream.purge deletes rows that were processed so long ago, and no others.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE regress_ruststream_stranger;
CREATE ROLE regress_ruststream_member;
CREATE ROLE regress_ruststream_keeper;
GRANT regress_ruststream_keeper TO regress_ruststream_member;
RESET client_min_messages;

CREATE SCHEMA rs_purge;
SET search_path = rs_purge;
GRANT USAGE, CREATE ON SCHEMA rs_purge TO regress_ruststream_keeper, regress_ruststream_stranger;

SET ROLE regress_ruststream_keeper;
SELECT ruststream.create_queue('jobs', keep_processed => true);
RESET ROLE;
INSERT INTO jobs (payload, processed_at)
SELECT '{}', CASE WHEN i % 2 = 0 THEN now() - i * interval '1 minute' END FROM generate_series(1, 5000) AS i;

SELECT ruststream.purge('jobs', '3000 minutes');
SELECT count(*), count(processed_at), min(processed_at) > now() - interval '3000 minutes' AS young FROM jobs;
SELECT ruststream.purge('jobs', '3000 minutes');
-- a row that is locked stays, and is not waited for: see isolation

-- A member of the owner may, and nobody else.
SET ROLE regress_ruststream_stranger;
SELECT ruststream.purge('jobs', '0');
RESET ROLE;
SET ROLE regress_ruststream_member;
SELECT ruststream.purge('jobs', '1000 minutes');
RESET ROLE;
SELECT ruststream.purge('jobs', '0');
SELECT count(*), count(processed_at) FROM jobs;

-- A partitioned table.
CREATE TABLE parts (id bigint PRIMARY KEY, payload jsonb, done timestamptz) PARTITION BY RANGE (id);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (1) TO (100);
CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (100) TO (1000);
CREATE INDEX ON parts (id) WHERE done IS NULL;
SELECT ruststream.attach_queue('parts', 'id', processed_at_column => 'done', payload_column => 'payload');
INSERT INTO parts SELECT i, '{}', CASE WHEN i > 20 THEN now() - interval '1 s' END FROM generate_series(1, 500) AS i;
SELECT ruststream.purge('parts', '0');
SELECT count(*), max(id) FROM parts;

-- What is done by a trigger is the trigger's; what it keeps is not counted as gone.
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER keep BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION keep();
INSERT INTO jobs (payload, processed_at) VALUES ('{}', now());
SELECT ruststream.purge('jobs', '0');
DROP TRIGGER keep ON jobs;

-- With an index on the column nothing else is read, whatever the statistics say.
CREATE INDEX ON jobs (processed_at) WHERE processed_at IS NOT NULL;
INSERT INTO jobs (payload) SELECT '{}' FROM generate_series(1, 20000);
SELECT pg_stat_force_next_flush();
CREATE TABLE before AS SELECT coalesce(seq_scan, 0) AS seq_scan FROM pg_stat_user_tables WHERE relid = 'jobs'::regclass;
SELECT ruststream.purge('jobs', '0');
SELECT pg_stat_force_next_flush();
SELECT t.seq_scan - b.seq_scan AS scans FROM pg_stat_user_tables AS t, before AS b WHERE t.relid = 'jobs'::regclass;

-- what is refused
\set VERBOSITY default
SELECT ruststream.purge('jobs', '-1 s');
SELECT ruststream.purge('before', '1 s');
SELECT ruststream.create_queue('forgetful');
SELECT ruststream.purge('forgetful', '1 s');
SELECT ruststream.purge('jobs', NULL);

SET client_min_messages = error;
DROP SCHEMA rs_purge CASCADE;
DROP ROLE regress_ruststream_member, regress_ruststream_keeper, regress_ruststream_stranger;
