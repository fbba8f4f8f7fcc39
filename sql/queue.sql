-- Queues: what create_queue makes, what attach_queue accepts and refuses, and
-- what is left when a queue goes.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE queue_owner;
CREATE ROLE queue_stranger;
CREATE SCHEMA queue_test AUTHORIZATION queue_owner;
GRANT USAGE ON SCHEMA queue_test TO queue_stranger;
RESET client_min_messages;
SET search_path = queue_test;

-- How a statement is refused: the code, the message and the hint.
CREATE FUNCTION refused(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    message text; code text; detail text; hint text;
BEGIN
    EXECUTE statement;
    RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, code = RETURNED_SQLSTATE,
        detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN format(E'%s %s%s\n-> %s', code, regexp_replace(message, 'pg_temp_\d+', 'pg_temp'),
        E'\n   ' || nullif(detail, ''), hint);
END $$;

-- The roles a queue has, without those it has not.
CREATE FUNCTION roles(queue regclass) RETURNS text LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT string_agg(key || '=' || value, ' ' ORDER BY key)
    FROM ruststream.queue AS q, jsonb_each_text(to_jsonb(q) - 'relation')
    WHERE q.relation = queue AND value IS NOT NULL
$$;

CREATE FUNCTION columns(queue regclass) RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(format('%s %s%s', attname, format_type(atttypid, atttypmod),
                             CASE WHEN attnotnull THEN ' not null' END), E'\n' ORDER BY attnum)
    FROM pg_attribute WHERE attrelid = queue AND attnum > 0
$$;

CREATE FUNCTION claim_index(queue regclass) RETURNS SETOF text LANGUAGE sql AS $$
    SELECT pg_get_indexdef(indexrelid) FROM pg_index
    WHERE indrelid = queue AND NOT indisprimary ORDER BY 1
$$;

-- The queues there are, of this test.
CREATE FUNCTION attached() RETURNS text LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT string_agg(relation::text, ', ' ORDER BY relation::text COLLATE "C")
    FROM ruststream.queue WHERE relation::text LIKE 'queue\_test.%'
$$;

SET ROLE queue_owner;

--
-- Queues of our making
--
SELECT ruststream.create_queue('plain');
SELECT columns('plain');
SELECT claim_index('plain');
SELECT roles('plain');
SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = 'plain'::regclass;

SELECT ruststream.create_queue('queue_test."Every Switch"', groups => true, fifo => true,
    keep_processed => true, payload_type => 'text',
    isolation => 'Repeatable READ');
SELECT columns('"Every Switch"');
SELECT claim_index('"Every Switch"');
SELECT roles('"Every Switch"');

-- More indexes where rows go one at a time: by partition key, and for their leases.
SELECT ruststream.create_queue('customers', form => 'lease', groups => true, partition_key => true, keep_processed => true);
SELECT pg_get_indexdef(indexrelid) AS indexes FROM pg_index WHERE indrelid = 'customers'::regclass ORDER BY 1;
SELECT ruststream.create_queue('fifo_leased', form => 'lease', groups => true, fifo => true);
SELECT pg_get_indexdef(indexrelid) AS indexes FROM pg_index WHERE indrelid = 'fifo_leased'::regclass ORDER BY 1;
CREATE TABLE line_by_line (id int PRIMARY KEY, customer int, until timestamptz);
SELECT ruststream.attach_queue('line_by_line', 'id', partition_key_column => 'customer', locked_until_column => 'until');
DROP TABLE line_by_line;

SELECT ruststream.create_queue('leased', form => 'lease');
SELECT roles('leased');
SELECT ruststream.create_queue('keyed', form => 'advisory_lock', lock_key => 'account-{id}');
SELECT roles('keyed');

-- A name of 63 bytes, and one that needs quoting.
SELECT ruststream.create_queue('"' || repeat('X', 63) || '"');
SELECT ruststream.create_queue('"with ""quotes"" and.dots"');

SELECT refused($$SELECT ruststream.create_queue('plain')$$);
SELECT refused($$SELECT ruststream.create_queue(NULL)$$);
SELECT refused($$SELECT ruststream.create_queue('nowhere.at_all')$$);
SELECT refused($$SELECT ruststream.create_queue('fifo_only', fifo => true)$$);
SELECT refused($$SELECT ruststream.create_queue('keyless', form => 'advisory_lock')$$);
SELECT refused($$SELECT ruststream.create_queue('key_for_nothing', lock_key => '{id}')$$);
SELECT refused($$SELECT ruststream.create_queue('bad_key', form => 'advisory_lock', lock_key => '{id')$$);
SELECT refused($$SELECT ruststream.create_queue('bad_key', form => 'advisory_lock', lock_key => '{nothing}')$$);
SELECT refused($$SELECT ruststream.create_queue('bad_key', form => 'advisory_lock', lock_key => '{retry_after}')$$);
SELECT refused($$SELECT ruststream.create_queue('dirty', isolation => 'read uncommitted')$$);
SELECT refused($$SELECT ruststream.create_queue('dirty', isolation => 'chaos')$$);
SELECT refused($$SELECT ruststream.create_queue('fifo_key', form => 'advisory_lock', groups => true,
    fifo => true, lock_key => '{group_name}')$$);
SELECT refused($$SELECT ruststream.create_queue('fifo_by_key', groups => true, fifo => true, partition_key => true)$$);
-- Nothing of a refused queue is left.
SELECT count(*) FROM pg_class
WHERE relname IN ('fifo_only', 'keyless', 'key_for_nothing', 'bad_key', 'dirty', 'fifo_key', 'fifo_by_key');

--
-- Tables that are there already
--
CREATE TABLE email_jobs (
    job_id uuid PRIMARY KEY,
    "for" text NOT NULL,
    urgency smallint,
    not_before timestamptz,
    tries smallint DEFAULT 1,
    done_at timestamptz,
    meta json,
    body bytea,
    size int GENERATED ALWAYS AS (length(body)) STORED
);
-- The notice has the index to the letter, names quoted.
SELECT ruststream.attach_queue('email_jobs', 'job_id', group_column => 'for',
    priority_column => 'urgency', retry_after_column => 'not_before', attempt_column => 'tries',
    processed_at_column => 'done_at', headers_column => 'meta', payload_column => 'body');
SELECT roles('email_jobs');
SELECT refused($$SELECT ruststream.attach_queue('email_jobs', 'job_id')$$);
SELECT ruststream.detach_queue('email_jobs');

-- Other ids.  A table whose claims need nothing but the id has its index.
CREATE TABLE ids_text (id text PRIMARY KEY);
SELECT ruststream.attach_queue('ids_text', 'id');
CREATE TABLE ids_varchar (id varchar(20) PRIMARY KEY);
SELECT ruststream.attach_queue('ids_varchar', 'id', wake => false);
SELECT count(*) AS triggers FROM pg_trigger WHERE tgrelid = 'ids_varchar'::regclass;
CREATE TABLE ids_int (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
SELECT ruststream.attach_queue('ids_int', 'id');
CREATE UNLOGGED TABLE ids_smallint (id smallint PRIMARY KEY);
SELECT ruststream.attach_queue('ids_smallint', 'id');
CREATE DOMAIN job_number AS bigint;
CREATE TABLE ids_domain (id job_number PRIMARY KEY);
SELECT ruststream.attach_queue('ids_domain', 'id');

-- Partitioned, by its id.
CREATE TABLE parted (id bigint PRIMARY KEY, payload jsonb) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (1000);
SELECT ruststream.attach_queue('parted', 'id', payload_column => 'payload');

-- Dropping a column leaves a hole in the table, not in its description.
CREATE TABLE holey (gone int, id bigint PRIMARY KEY, also_gone text, payload text);
ALTER TABLE holey DROP COLUMN gone, DROP COLUMN also_gone;
SELECT ruststream.attach_queue('holey', 'id', payload_column => 'payload');

--
-- What is refused
--
CREATE TABLE base (
    id bigint PRIMARY KEY, other bigint NOT NULL, nullable bigint UNIQUE, half bigint NOT NULL,
    late bigint NOT NULL UNIQUE DEFERRABLE, number numeric NOT NULL UNIQUE, grp text,
    at_local timestamp, at timestamptz, must timestamptz NOT NULL, tries int,
    made int GENERATED ALWAYS AS (1) STORED, always int GENERATED ALWAYS AS IDENTITY,
    headers text, fixed char(3), word text NOT NULL, pattern text NOT NULL
);
CREATE UNIQUE INDEX ON base (word COLLATE "C");
CREATE UNIQUE INDEX ON base (pattern text_pattern_ops);
CREATE UNIQUE INDEX ON base (half) WHERE half > 0;
CREATE UNIQUE INDEX ON base (other, id);
CREATE VIEW a_view AS SELECT * FROM base;
CREATE MATERIALIZED VIEW a_matview AS SELECT * FROM base;
CREATE TEMP TABLE a_temp (id bigint PRIMARY KEY);
CREATE TABLE parent (id bigint PRIMARY KEY);
CREATE TABLE child () INHERITS (parent);

SELECT refused(format('SELECT ruststream.attach_queue(%s)', a)) FROM (VALUES
    ($$'a_view', 'id'$$),
    ($$'a_matview', 'id'$$),
    ($$'base_pkey', 'id'$$),
    ($$'pg_temp.a_temp', 'id'$$),
    ($$'parent', 'id'$$),
    ($$NULL, 'id'$$),
    ($$'base', NULL$$),
    ($$'base', 'missing'$$),
    ($$'base', 'ctid'$$),
    ($$'base', 'nullable'$$),
    ($$'base', 'other'$$),
    ($$'base', 'half'$$),
    ($$'base', 'late'$$),
    ($$'base', 'word'$$),
    ($$'base', 'pattern'$$),
    ($$'base', 'number'$$),
    ($$'base', 'id', group_column => 'id'$$),
    ($$'base', 'id', group_column => 'other'$$),
    ($$'base', 'id', group_column => 'fixed'$$),
    ($$'base', 'id', priority_column => 'grp'$$),
    ($$'base', 'id', retry_after_column => 'at_local'$$),
    ($$'base', 'id', processed_at_column => 'must'$$),
    ($$'base', 'id', attempt_column => 'made'$$),
    ($$'base', 'id', attempt_column => 'always'$$),
    ($$'base', 'id', headers_column => 'headers'$$),
    ($$'base', 'id', partition_key_column => 'at'$$),
    ($$'base', 'id', payload_column => 'nope'$$),
    ($$'base', 'id', fifo => true$$),
    ($$'base', 'id', locked_until_column => 'at', lock_key => '{id}'$$),
    ($$'base', 'id', lock_key => ''$$),
    ($$'base', 'id', lock_key => '{at}'$$),
    ($$'base', 'id', isolation => 'read uncommitted'$$)
) AS v (a);
SELECT refused($$SELECT ruststream.attach_queue('pg_catalog.pg_class', 'oid')$$);
-- Nothing of all this is left.
SELECT count(*) FROM pg_trigger WHERE tgrelid = 'base'::regclass AND NOT tgisinternal;

-- A trigger of that name that is not ours is nobody's to take.
CREATE FUNCTION other_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER ruststream_wake AFTER INSERT ON base FOR EACH STATEMENT EXECUTE FUNCTION other_trigger();
SELECT refused($$SELECT ruststream.attach_queue('base', 'id')$$);
DROP TRIGGER ruststream_wake ON base;

SET ROLE queue_stranger;
SELECT refused($$SELECT ruststream.attach_queue('base', 'id')$$);
SELECT refused($$SELECT ruststream.detach_queue('plain')$$);
SELECT refused($$SELECT * FROM ruststream.queue$$);
SELECT refused($$SELECT * FROM ruststream.subscription$$);
SELECT refused($$DELETE FROM ruststream.failure_history$$);
SELECT refused($$SELECT ruststream.internal_forget_dropped()$$);
RESET ROLE;
SELECT refused($$SELECT ruststream.attach_queue('pg_catalog.pg_class', 'oid')$$);
SELECT refused($$SELECT ruststream.attach_queue('ruststream.failure_history', 'id')$$);
SELECT refused($$SELECT ruststream.attach_queue('information_schema.sql_parts', 'feature_id')$$);
SET ROLE queue_owner;

--
-- Which index serves the claims
--
CREATE TABLE indexed (id bigint PRIMARY KEY, grp text NOT NULL, prio int, at timestamptz, done timestamptz);
CREATE FUNCTION attach_indexed() RETURNS void LANGUAGE sql AS $$
    SELECT ruststream.attach_queue('queue_test.indexed', 'id', group_column => 'grp',
        priority_column => 'prio', retry_after_column => 'at', processed_at_column => 'done')
$$;
-- Almost: the order of NULLs, a direction, a column, the predicate, the operator class.
CREATE INDEX ON indexed (grp, prio, at, id) WHERE done IS NULL;
CREATE INDEX ON indexed (grp, prio NULLS FIRST, at DESC, id) WHERE done IS NULL;
CREATE INDEX ON indexed (grp, prio NULLS FIRST, at NULLS FIRST) WHERE done IS NULL;
CREATE INDEX ON indexed (grp, prio NULLS FIRST, at NULLS FIRST, id);
CREATE INDEX ON indexed (grp, prio NULLS FIRST, at NULLS FIRST, id) WHERE done IS NULL AND prio > 0;
CREATE INDEX ON indexed (grp, prio NULLS FIRST, at NULLS FIRST, id) WHERE done IS NOT NULL;
CREATE INDEX ON indexed (grp text_pattern_ops, prio NULLS FIRST, at NULLS FIRST, id) WHERE done IS NULL;
CREATE INDEX ON indexed (grp COLLATE "C", prio NULLS FIRST, at NULLS FIRST, id) WHERE done IS NULL;
SELECT attach_indexed();
SELECT ruststream.detach_queue('indexed');
-- Included columns do no harm.
CREATE INDEX ON indexed (grp, prio NULLS FIRST, at NULLS FIRST, id) INCLUDE (done) WHERE done IS NULL;
SELECT attach_indexed();
SELECT ruststream.detach_queue('indexed');
DROP TABLE indexed;

--
-- The end of a queue
--
-- By hand: the table stays, the trigger goes.
INSERT INTO plain (payload) VALUES ('1');
SELECT ruststream.detach_queue('plain');
SELECT count(*) AS rows FROM plain;
SELECT count(*) AS triggers FROM pg_trigger WHERE tgrelid = 'plain'::regclass;
SELECT refused($$SELECT ruststream.detach_queue('plain')$$);
-- and it can be attached again
SELECT ruststream.attach_queue('plain', 'id', payload_column => 'payload');

-- By DROP, in any way.
SELECT attached();
DROP TABLE plain;
DROP TABLE ids_text, ids_varchar, ids_int, ids_smallint, ids_domain;
BEGIN;
DROP TABLE leased;
ROLLBACK;
SELECT attached();
RESET ROLE;
SET client_min_messages = warning;
DROP OWNED BY queue_owner CASCADE;
SELECT count(*) AS queues FROM ruststream.queue;

DROP ROLE queue_owner, queue_stranger;
