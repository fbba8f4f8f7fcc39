-- publish: what it writes, into which columns, as whom.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE pub_owner;
CREATE ROLE pub_client;
CREATE SCHEMA pub_test AUTHORIZATION pub_owner;
GRANT USAGE ON SCHEMA pub_test TO pub_client;
RESET client_min_messages;
SET search_path = pub_test;

CREATE FUNCTION refused(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    message text; code text; detail text; hint text;
BEGIN
    EXECUTE statement;
    RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, code = RETURNED_SQLSTATE,
        detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN format(E'%s %s%s\n-> %s', code, message, E'\n   ' || nullif(detail, ''), hint);
END $$;

SET ROLE pub_owner;
SELECT ruststream.create_queue('jobs', groups => true, partition_key => true);
-- Nothing but what is required: the rest is the table's defaults.
SELECT ruststream.publish('jobs', '{"n": 1}', 'mail');
SELECT ruststream.publish('jobs', NULL, 'mail');
SELECT ruststream.publish('jobs', 'null', 'mail');
-- Everything.
SELECT ruststream.publish('jobs', '[4]', group_name => 'mail', priority => -7, delay => '1 hour',
    headers => '{"trace": "4711", "empty": ""}', partition_key => 'customer 9');
SELECT id, group_name, partition_key, priority, attempt, headers, payload,
    retry_after BETWEEN now() + interval '59 min' AND now() + interval '61 min' AS in_an_hour
FROM jobs ORDER BY id;

-- A delay of nothing is due now, by the running clock.
BEGIN;
SELECT ruststream.publish('jobs', '5', 'mail', delay => '0');
SELECT retry_after > now() AS after_begin, retry_after <= clock_timestamp() AS due FROM jobs WHERE id = 5;
ROLLBACK;
-- It took part in the transaction.
SELECT count(*) FROM jobs;

SELECT refused(format('SELECT ruststream.publish(%s)', a)) FROM (VALUES
    ($$NULL, '1'$$),
    ($$'pg_class', '1'$$),
    ($$'jobs', '1'$$),
    ($$'jobs', '1', 'mail', delay => '-1 s'$$),
    ($$'jobs', '1', 'mail', delay => '1000 years'$$),
    ($$'jobs', '1', 'mail', headers => '[]'$$),
    ($$'jobs', '1', 'mail', headers => '"text"'$$),
    ($$'jobs', '1', 'mail', headers => '{"a": 1}'$$),
    ($$'jobs', '1', 'mail', headers => '{"a": {"b": "c"}}'$$),
    ($$'jobs', '1', 'mail', headers => '{"a": null}'$$)
) AS v (a);

--
-- Payload columns of every kind
--
CREATE FUNCTION make(name text, payload_type text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('CREATE TABLE %I (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload %s)', name, payload_type);
    PERFORM ruststream.attach_queue(name::regclass, 'id', payload_column => 'payload');
END $$;
CREATE DOMAIN small_document AS jsonb CHECK (VALUE <> '"big"');
SELECT make('as_jsonb', 'jsonb'), make('as_json', 'json'), make('as_text', 'text'),
    make('as_varchar', 'varchar(20)'), make('as_bytea', 'bytea'), make('as_domain', 'small_document'),
    make('as_int', 'int');
SELECT ruststream.publish(q, '{"a": "text", "b": [1, 2]}')
FROM unnest('{as_jsonb,as_json,as_text,as_bytea,as_domain}'::regclass[]) AS q;
SELECT ruststream.publish('as_varchar', '{"short": 1}');
-- The bytes are the UTF-8 of the text.
SELECT (SELECT payload::text FROM as_jsonb) = (SELECT payload FROM as_text) AS text,
    (SELECT payload::text FROM as_json) = (SELECT payload FROM as_text) AS json,
    (SELECT payload FROM as_bytea) = convert_to((SELECT payload FROM as_text), 'UTF8') AS bytea,
    (SELECT payload FROM as_domain) = (SELECT payload FROM as_jsonb) AS domain;
SELECT payload FROM as_varchar;
SELECT refused($$SELECT ruststream.publish('as_varchar', '"longer than twenty characters"')$$);
SELECT refused($$SELECT ruststream.publish('as_domain', '"big"')$$);
SELECT refused($$SELECT ruststream.publish('as_int', '1')$$);
SELECT ruststream.publish('as_int', NULL);

--
-- A queue with few roles takes what it has, and says what it has not
--
CREATE TABLE bare (id uuid PRIMARY KEY DEFAULT '12345678-1234-1234-1234-123456789abc', note text DEFAULT 'by default');
SELECT ruststream.attach_queue('bare', 'id');
SELECT ruststream.publish('bare', NULL);
SELECT * FROM bare;
SELECT refused(format('SELECT ruststream.publish(%s)', a)) FROM (VALUES
    ($$'bare', '1'$$),
    ($$'bare', NULL, group_name => 'g'$$),
    ($$'bare', NULL, priority => 1$$),
    ($$'bare', NULL, delay => '1 s'$$),
    ($$'bare', NULL, headers => '{}'$$),
    ($$'bare', NULL, partition_key => 'k'$$),
    ($$'bare', NULL$$)
) AS v (a);

-- Headers that nobody gives are an empty object, unless the table knows better.
CREATE TABLE headed (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, priority smallint, k int, h json NOT NULL);
SET client_min_messages = warning;
SELECT ruststream.attach_queue('headed', 'id', headers_column => 'h', priority_column => 'priority',
    partition_key_column => 'k');
RESET client_min_messages;
SELECT ruststream.publish('headed', NULL);
ALTER TABLE headed ALTER h SET DEFAULT '{"from": "the table"}';
SELECT ruststream.publish('headed', NULL, priority => 3, partition_key => ' 42 ');
SELECT ruststream.publish('headed', NULL, headers => '{"a": "b"}');
SELECT * FROM headed ORDER BY id;
SELECT refused($$SELECT ruststream.publish('headed', NULL, priority => 100000)$$);
SELECT refused($$SELECT ruststream.publish('headed', NULL, partition_key => 'no number')$$);

-- A trigger that keeps the row out, and one that publishes further.
CREATE FUNCTION keep_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER keep_out BEFORE INSERT ON as_json FOR EACH ROW EXECUTE FUNCTION keep_out();
SELECT ruststream.publish('as_json', '1') IS NULL AS kept_out;
-- (The new function has the session prepare its publishes afresh.)
CREATE FUNCTION countdown() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.payload::int > 0 THEN
        EXECUTE 'CREATE OR REPLACE FUNCTION pub_test.nothing() RETURNS void LANGUAGE sql AS ''''';
        PERFORM ruststream.publish('as_text', to_jsonb(NEW.payload::int - 1));
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER countdown AFTER INSERT ON as_text FOR EACH ROW EXECUTE FUNCTION countdown();
DELETE FROM as_text;
SELECT ruststream.publish('as_text', '2');
SELECT string_agg(payload, ' ' ORDER BY id) FROM as_text;

-- A queue described anew in the same session.
SELECT ruststream.publish('as_jsonb', '1');
SELECT ruststream.detach_queue('as_jsonb');
SELECT refused($$SELECT ruststream.publish('as_jsonb', '1')$$);
SELECT ruststream.attach_queue('as_jsonb', 'id');
SELECT refused($$SELECT ruststream.publish('as_jsonb', '1')$$);
SELECT ruststream.detach_queue('as_jsonb');
SELECT ruststream.attach_queue('as_jsonb', 'id', payload_column => 'payload');
ALTER TABLE as_jsonb RENAME TO renamed;
SELECT ruststream.publish('renamed', '2');

--
-- With the caller's rights
--
SET ROLE pub_client;
SELECT refused($$SELECT ruststream.publish('jobs', '1', 'mail')$$);
SET ROLE pub_owner;
GRANT INSERT, SELECT (id) ON jobs TO pub_client;
SET ROLE pub_client;
SELECT ruststream.publish('jobs', '1', 'mail') IS NOT NULL AS published;
SELECT refused($$SELECT payload FROM jobs$$);
RESET ROLE;
SET client_min_messages = warning;
DROP OWNED BY pub_owner CASCADE;
DROP ROLE pub_owner, pub_client;
