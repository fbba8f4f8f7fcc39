-- What handlers are given: the row, the payload decoded, the delivery; and what
-- becomes of a row that does not decode.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_payload;
SET search_path = rs_payload;

CREATE TABLE given (n int GENERATED ALWAYS AS IDENTITY, id text, what text);
CREATE FUNCTION given(what text) RETURNS void
LANGUAGE sql AS 'INSERT INTO rs_payload.given (id, what) SELECT (ruststream.delivery()).id, what';

-------------------------------------------------------- from each type to each

-- Deliver payloads, which are given as text, of one type to a handler of another.
CREATE PROCEDURE pass(column_type text, handler_type text, VARIADIC payloads text[])
LANGUAGE plpgsql AS $$
DECLARE
	value text := CASE WHEN column_type IN ('bytea', 'rs_payload.raw')
		THEN 'CASE WHEN p LIKE ''\\x%'' THEN p::bytea ELSE convert_to(p, ''UTF8'') END' ELSE 'p::' || column_type END;
	r record;
BEGIN
	EXECUTE format('CREATE TABLE rs_payload.pass (id int PRIMARY KEY, payload %s)', column_type);
	EXECUTE format('CREATE OR REPLACE FUNCTION rs_payload.take(%s) RETURNS void LANGUAGE sql AS
		''SELECT rs_payload.given(pg_typeof($1) || '''' '''' || %s)''', handler_type,
		CASE handler_type WHEN 'bytea' THEN 'encode($1, ''''escape'''')'
			ELSE 'encode(convert_to($1::text, ''''UTF8''''), ''''escape'''')' END);
	PERFORM ruststream.attach_queue('rs_payload.pass', 'id', payload_column => 'payload');
	PERFORM ruststream.subscribe('pass', 'rs_payload.pass', format('rs_payload.take(%s)', handler_type),
		workers => 0, on_decode_error => 'discard');
	EXECUTE format('INSERT INTO rs_payload.pass SELECT n, %s FROM unnest($1) WITH ORDINALITY AS u(p, n)', value)
		USING payloads;
	TRUNCATE rs_payload.given;
	CALL ruststream.drain('pass');
	FOR r IN SELECT g.id, g.what FROM rs_payload.given g
		UNION ALL SELECT f.id, f.sqlstate || ' ' || f.message FROM ruststream.failure f WHERE f.subscription = 'pass'
		ORDER BY id
	LOOP
		RAISE NOTICE '% to %, row %: %', column_type, handler_type, r.id, r.what;
	END LOOP;
	PERFORM ruststream.unsubscribe('pass');
	DROP TABLE rs_payload.pass;
	EXECUTE format('DROP FUNCTION rs_payload.take(%s)', handler_type);
END $$;

DO $$
DECLARE
	c text;
	h text;
BEGIN
	FOREACH c IN ARRAY '{jsonb,json,text,varchar,bytea}'::text[] LOOP
		FOREACH h IN ARRAY '{jsonb,json,text,varchar,bytea}'::text[] LOOP
			CALL rs_payload.pass(c, h, '{"a":  "\u0061", "b":1, "a": null}', '"x"');
		END LOOP;
	END LOOP;
END $$;

-- bytes that are no text, text that is no JSON: nothing of it reaches the handler
CALL pass('bytea', 'jsonb', '{"a": 1}', '{bad', '\xff', '\x7b007d', '\xc3a9', '');
CALL pass('bytea', 'json', '{bad', '\xff', '\x00');
CALL pass('bytea', 'text', '{bad', '\xc328', '\x00', '', '\x22c3a922');
CALL pass('bytea', 'json', '\x22c3a922');
CALL pass('bytea', 'bytea', '\x00ff', '');
CALL pass('text', 'jsonb', '1', '{bad', '', 'null', '{"a": "\u0000"}');
CALL pass('text', 'json', '1', '{bad', '', '{"a": "\u0000"}');
CALL pass('varchar(20)', 'jsonb', '[1]', 'nonsense');
CALL pass('json', 'jsonb', '{"a": "\u0000"}', '{"a": 1}');

-- other types are given as they are
CALL pass('int', 'int', '42', '-1');
CALL pass('numeric(10,2)', 'numeric', '1.5');
CALL pass('timestamp', 'timestamp', '2001-02-03 04:05:06');
CALL pass('text[]', 'text[]', '{a,b}');
CREATE TYPE parcel AS (weight int, label text);
CALL pass('rs_payload.parcel', 'rs_payload.parcel', '(3,heavy)');
CREATE DOMAIN document AS jsonb CHECK (VALUE <> '1');
CALL pass('rs_payload.document', 'rs_payload.document', '{"a": 1}');
CALL pass('rs_payload.document', 'jsonb', '{"a": 1}');
CALL pass('rs_payload.document', 'text', '{"a": 1}');
CREATE DOMAIN raw AS bytea;
CALL pass('rs_payload.raw', 'jsonb', '{"a": 1}', '\xff');
CREATE TYPE mood AS ENUM ('sad', 'happy');
CALL pass('rs_payload.mood', 'rs_payload.mood', 'happy');
-- and to no other
CALL pass('int', 'bigint', '42');
CALL pass('jsonb', 'rs_payload.document', '{}');
CALL pass('text', 'int', '42');

-- large enough to be toasted
TRUNCATE given;
CREATE TABLE large (id int PRIMARY KEY, payload text, body bytea);
ALTER TABLE large ALTER body SET STORAGE EXTERNAL;
SELECT ruststream.attach_queue('large', 'id', payload_column => 'body');
CREATE FUNCTION take_large(jsonb) RETURNS void
LANGUAGE sql AS $$ SELECT rs_payload.given(length($1->>'text')::text) $$;
CREATE FUNCTION take_large_row(large) RETURNS void
LANGUAGE sql AS $$ SELECT rs_payload.given(length($1.payload) || ' ' || length($1.body)) $$;
SELECT ruststream.subscribe('large', 'large', 'take_large', workers => 0);
INSERT INTO large SELECT i, repeat('x', 100000 * i),
	convert_to(jsonb_build_object('text', repeat('y', 100000 * i))::text, 'UTF8') FROM generate_series(1, 4) AS i;
CALL ruststream.drain('large', 2);
SELECT ruststream.alter_subscription('large', handler => 'take_large_row');
CALL ruststream.drain('large');
SELECT id, what FROM given ORDER BY n;

-- an id as well; it is known for longer than its row is
TRUNCATE given;
CREATE TABLE long_id (id text PRIMARY KEY, payload jsonb);
ALTER TABLE long_id ALTER id SET STORAGE EXTERNAL;
SELECT ruststream.attach_queue('long_id', 'id', payload_column => 'payload');
CREATE FUNCTION take_long_id(jsonb, d ruststream.delivery) RETURNS void
LANGUAGE sql AS $$ SELECT rs_payload.given(left(d.id, 1) || ' of ' || length(d.id)) $$;
SELECT ruststream.subscribe('long_id', 'long_id', 'take_long_id', workers => 0);
INSERT INTO long_id SELECT i || repeat('i', 2100), '{}' FROM generate_series(1, 4) AS i;
CALL ruststream.drain('long_id');
SELECT what FROM given ORDER BY n;

------------------------------------------------------------------ no payload

TRUNCATE given;
CREATE TABLE empty (id int PRIMARY KEY, retry_after timestamptz, payload jsonb);
CREATE INDEX ON empty (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('empty', 'id', retry_after_column => 'retry_after', payload_column => 'payload');
CREATE FUNCTION take_any(jsonb) RETURNS void
LANGUAGE sql AS $$ SELECT rs_payload.given(CASE WHEN $1 IS NULL THEN 'NULL' ELSE $1::text END) $$;
CREATE FUNCTION take_strict(jsonb) RETURNS void
LANGUAGE sql STRICT AS $$ SELECT rs_payload.given($1::text) $$;
CREATE FUNCTION take_strict_text(text, ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql STRICT AS $$ BEGIN PERFORM rs_payload.given($1); RETURN ruststream.ack(); END $$;
SELECT ruststream.subscribe('empty', 'empty', 'take_any', workers => 0);
INSERT INTO empty VALUES (1, NULL, NULL), (2, NULL, 'null');
CALL ruststream.drain('empty');
SELECT ruststream.alter_subscription('empty', handler => 'take_strict');
INSERT INTO empty VALUES (3, NULL, NULL), (4, NULL, 'null');
CALL ruststream.drain('empty');
SELECT ruststream.alter_subscription('empty', handler => 'take_strict_text', on_decode_error => 'discard');
INSERT INTO empty VALUES (5, NULL, NULL), (6, NULL, '6');
CALL ruststream.drain('empty');
SELECT id, what FROM given ORDER BY n;
SELECT id, retry_after > now() AS later FROM empty;
SELECT id, sqlstate, message, context FROM ruststream.failure WHERE subscription = 'empty';
-- a STRICT handler of the row has its row
TRUNCATE given, empty;
CREATE FUNCTION take_strict_row(empty) RETURNS void
LANGUAGE sql STRICT AS $$ SELECT rs_payload.given($1::text) $$;
SELECT ruststream.alter_subscription('empty', handler => 'take_strict_row');
INSERT INTO empty VALUES (7);
CALL ruststream.drain('empty');
SELECT id, what FROM given ORDER BY n;

---------------------------------------------------- the policies of decoding

CREATE TABLE bad (id int PRIMARY KEY, grp text, retry_after timestamptz, attempt int DEFAULT 1, payload text);
CREATE INDEX ON bad (grp, retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('bad', 'id', group_column => 'grp', retry_after_column => 'retry_after',
	attempt_column => 'attempt', payload_column => 'payload');
CREATE FUNCTION take_json(jsonb) RETURNS void
LANGUAGE sql AS $$ SELECT rs_payload.given($1::text) $$;

CREATE PROCEDURE bad(policy text, attempt int DEFAULT 1)
LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	PERFORM ruststream.alter_subscription('bad', on_decode_error => policy,
		reset => CASE WHEN policy IS NULL THEN '{on_decode_error}'::text[] END);
	TRUNCATE rs_payload.bad, rs_payload.given;
	INSERT INTO rs_payload.bad (id, grp, attempt, payload) VALUES (1, 'bad', attempt, '{bad'), (2, 'bad', attempt, '[]');
	CALL ruststream.drain('bad', 2);
	FOR r IN SELECT id, grp, b.attempt, CASE WHEN retry_after IS NULL THEN 'now'
			WHEN retry_after > clock_timestamp() THEN 'later' ELSE 'due' END AS back FROM rs_payload.bad b ORDER BY id
	LOOP
		RAISE NOTICE 'left: row % group % attempt % back %', r.id, r.grp, r.attempt, r.back;
	END LOOP;
	RAISE NOTICE 'given: %', (SELECT string_agg(id || ' ' || what, ', ' ORDER BY n) FROM rs_payload.given);
END $$;

-- without a dead letter
SELECT ruststream.subscribe('bad', 'bad', 'take_json', workers => 0, retry_delay => '1 hour', on_error => 'discard');
SET ruststream.trace = on;
CALL bad(NULL);
CALL bad('discard');
CALL bad('retry_after');
CALL bad('retry');
CALL bad('dead_letter');
-- with one
SELECT ruststream.alter_subscription('bad', dead_letter => 'dead', max_attempts => 3);
CALL bad(NULL);
CALL bad('dead_letter', 2);
CALL bad('discard', 3);
CALL bad('retry_after', 2);
CALL bad('retry_after', 3);
RESET ruststream.trace;
SELECT id, attempt, sqlstate, message, count(*) FROM ruststream.failure WHERE subscription = 'bad'
	GROUP BY 1, 2, 3, 4 ORDER BY 1, 2;

---------------------------------------------------------------- the delivery

TRUNCATE given;
CREATE TABLE mail (id uuid PRIMARY KEY, attempt int, headers jsonb, payload jsonb, retry_after timestamptz);
CREATE INDEX ON mail (retry_after NULLS FIRST, id);
SELECT ruststream.attach_queue('mail', 'id', attempt_column => 'attempt', headers_column => 'headers',
	payload_column => 'payload', retry_after_column => 'retry_after');
CREATE FUNCTION describe(d ruststream.delivery) RETURNS text
LANGUAGE sql AS $$
	SELECT concat_ws(' | ', d.subscription, d.queue, d.id, d.attempt, coalesce(d.headers::text, 'no headers'),
		CASE WHEN d.claimed_at BETWEEN now() - '1 min'::interval AND clock_timestamp() THEN 'just now' ELSE d.claimed_at::text END,
		coalesce(d.lease_until::text, 'no lease'), ruststream.attempt(), d = ruststream.delivery())
$$;
CREATE FUNCTION take_delivery(jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$ BEGIN PERFORM rs_payload.given(rs_payload.describe(d)); RETURN ruststream.ack(); END $$;
CREATE FUNCTION take_row(m mail, d ruststream.delivery) RETURNS void
LANGUAGE sql AS $$ SELECT rs_payload.given(m::text || ' | ' || rs_payload.describe(d)) $$;
SELECT ruststream.subscribe('mail', 'mail', 'take_delivery', workers => 0);
INSERT INTO mail VALUES ('00000000-0000-0000-0000-000000000001', NULL, '{"trace": "abc"}', '{}'),
	('00000000-0000-0000-0000-000000000002', 5, NULL, '{}');
CALL ruststream.drain('mail');
SELECT ruststream.alter_subscription('mail', handler => 'take_row');
INSERT INTO mail VALUES ('00000000-0000-0000-0000-000000000003', 2, '{}', '{"a": [1, 2]}');
CALL ruststream.drain('mail');
SELECT what FROM given ORDER BY n;
-- outside a handler there is no delivery; nor is there after one
SELECT ruststream.attempt() IS NULL AS no_attempt, ruststream.delivery() IS NULL AS no_delivery;

-- headers as json, and a queue without roles
TRUNCATE given;
CREATE TABLE letters (id int PRIMARY KEY, headers json, payload jsonb);
SELECT ruststream.attach_queue('letters', 'id', headers_column => 'headers', payload_column => 'payload');
SELECT ruststream.subscribe('letters', 'letters', 'take_delivery', workers => 0, on_decode_error => 'discard', retry_delay => '0');
INSERT INTO letters VALUES (1, '{"b":  "x", "a": "y"}'), (2, NULL), (3, '{"a": "\u0000"}');
CALL ruststream.drain('letters', 3);
SELECT what FROM given ORDER BY n;
SELECT id, sqlstate, message FROM ruststream.failure WHERE subscription = 'letters';
TRUNCATE given;
CREATE TABLE cards (id int PRIMARY KEY);
SELECT ruststream.attach_queue('cards', 'id');
CREATE FUNCTION take_card(c cards, d ruststream.delivery) RETURNS void
LANGUAGE sql AS $$ SELECT rs_payload.given(c::text || ' | ' || rs_payload.describe(d)) $$;
SELECT ruststream.subscribe('cards', 'cards', 'take_card', workers => 0);
INSERT INTO cards VALUES (1);
CALL ruststream.drain('cards');
SELECT what FROM given ORDER BY n;

-- the row is given as it was before the claim; the attempt counts up
TRUNCATE given;
CREATE TABLE tries (id int PRIMARY KEY, attempt int NOT NULL DEFAULT 1, payload jsonb);
SELECT ruststream.attach_queue('tries', 'id', attempt_column => 'attempt', payload_column => 'payload');
CREATE FUNCTION take_try(t tries) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'given % as attempt %', t, ruststream.attempt();
	RETURN CASE WHEN t.attempt < 3 THEN ruststream.retry() ELSE ruststream.ack() END;
END $$;
SELECT ruststream.subscribe('tries', 'tries', 'take_try', workers => 0);
INSERT INTO tries (id) VALUES (1);
CALL ruststream.drain('tries');

----------------------------------------------------------- which function it is

TRUNCATE given, empty;
CREATE FUNCTION twice(jsonb) RETURNS void LANGUAGE sql AS $$ SELECT rs_payload.given('jsonb') $$;
CREATE FUNCTION twice(text) RETURNS void LANGUAGE sql AS $$ SELECT rs_payload.given('text') $$;
CREATE FUNCTION twice(int) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION once(jsonb) RETURNS void LANGUAGE sql AS $$ SELECT rs_payload.given('once') $$;
CREATE FUNCTION once(int) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION once(jsonb, jsonb) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('empty', 'empty', 'twice', workers => 0);
SELECT ruststream.subscribe('empty', 'empty', 'rs_payload.twice(int)', workers => 0);
SELECT ruststream.subscribe('empty', 'empty', 'twice(text)', workers => 0);
INSERT INTO empty VALUES (1);
CALL ruststream.drain('empty');
SELECT ruststream.subscribe('empty', 'empty', 'rs_payload.once', workers => 0);
INSERT INTO empty VALUES (2);
CALL ruststream.drain('empty');
SELECT id, what FROM given ORDER BY n;

-- not a function of C's only, but one of the server's own: its error is the handler's
CREATE TABLE seeds (id int PRIMARY KEY, payload float8);
SELECT ruststream.attach_queue('seeds', 'id', payload_column => 'payload');
SELECT ruststream.subscribe('seeds', 'seeds', 'pg_catalog.setseed', workers => 0, on_error => 'discard');
INSERT INTO seeds VALUES (1, 0.5), (2, 7), (3, NULL);
CALL ruststream.drain('seeds', 3);
SELECT id FROM seeds;
SELECT id, sqlstate, message FROM ruststream.failure WHERE subscription = 'seeds';

-- a handler may be replaced, and its subscription sees that
TRUNCATE given, empty;
CREATE OR REPLACE FUNCTION once(jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM rs_payload.given('one');
	IF (ruststream.delivery()).id = '1' THEN
		CREATE OR REPLACE FUNCTION rs_payload.once(jsonb) RETURNS void LANGUAGE plpgsql AS
			$body$ BEGIN PERFORM rs_payload.given('two'); END $body$;
	END IF;
END $$;
INSERT INTO empty VALUES (1), (2);
CALL ruststream.drain('empty');
SELECT id, what FROM given ORDER BY n;

SET client_min_messages = error;
DROP SCHEMA rs_payload CASCADE;
