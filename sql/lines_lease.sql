-- FIFO groups and partition keys in the lease form: nothing is claimed of a line while
-- any of its rows holds a live lease.  Where the library is not preloaded leases are
-- not drained: lines_lease_1.out.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_lines;
SET search_path = rs_lines;

SELECT ruststream.create_queue('fifo', 'lease', groups => true, fifo => true);
SELECT ruststream.create_queue('keys', 'lease', partition_key => true);

CREATE TABLE noted (n int GENERATED ALWAYS AS IDENTITY, line text, job text, attempt int);
CREATE FUNCTION work(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_lines.noted (line, job, attempt) VALUES (p->>'line', p->>'job', d.attempt);
	IF d.attempt > coalesce((p->>'until')::int, 1000) THEN
		RETURN ruststream.ack();
	END IF;
	CASE p->>'do'
		WHEN 'fail' THEN RAISE EXCEPTION 'failed';
		WHEN 'retry' THEN RETURN ruststream.retry();
		WHEN 'retry_after' THEN RETURN ruststream.retry_after('1 hour');
		WHEN 'dead_letter' THEN RETURN ruststream.dead_letter();
		ELSE RETURN ruststream.ack();
	END CASE;
END $$;
CREATE FUNCTION handled() RETURNS text
LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM rs_lines.noted RETURNING *)
	SELECT string_agg(coalesce(line, '-') || job || CASE attempt WHEN 1 THEN '' ELSE '#' || attempt END, ' ' ORDER BY n) FROM gone $$;
CREATE FUNCTION add(queue regclass, line text, job text, payload jsonb DEFAULT '{}', priority int DEFAULT NULL, delay interval DEFAULT NULL) RETURNS void
LANGUAGE sql AS $$
	SELECT ruststream.publish(queue, payload || jsonb_build_object('line', line, 'job', job), CASE queue WHEN 'rs_lines.fifo'::regclass THEN line END,
		priority, delay, NULL, CASE queue WHEN 'rs_lines.keys'::regclass THEN line END) $$;

SELECT ruststream.subscribe('a', 'fifo', 'work', workers => 0, on_error => 'retry', retry_delay => '50 ms');
SELECT ruststream.subscribe('all', 'fifo', 'work', workers => 0, group_name => '*', dead_letter => 'dead', retry_delay => '50 ms', on_error => 'retry');
SELECT ruststream.subscribe('keys', 'keys', 'work', workers => 0, on_error => 'retry', retry_delay => '50 ms');

-- order, retries in their place, delays
SELECT count(add(q, l, i::text, priority => 3 - i / 3)) FROM generate_series(1, 4) AS i, unnest('{a,b}'::text[]) AS l, unnest('{fifo,keys}'::regclass[]) AS q;
CALL ruststream.drain('a', 2);
CALL ruststream.drain('a');
SELECT handled();
CALL ruststream.drain('all');
SELECT handled();
CALL ruststream.drain('keys');
SELECT handled();
SELECT add('fifo', 'a', '1', '{"do": "fail", "until": 2}'), add('fifo', 'a', '2', '{"do": "retry_after"}'), add('fifo', 'a', '3'), add('fifo', 'a', '4', priority => 1);
SET client_min_messages = error;
CALL ruststream.drain('a');
RESET client_min_messages;
SELECT handled(), count(*) AS left FROM fifo;
DELETE FROM fifo;
SELECT add('fifo', 'a', '1', '{"do": "dead_letter"}'), add('fifo', 'a', '2');
CALL ruststream.drain('all');
SELECT handled(), group_name, locked_until IS NULL AS free FROM fifo;
DELETE FROM fifo;
SELECT add('keys', 'a', '1', '{"do": "fail", "until": 2}'), add('keys', 'a', '2', '{"do": "retry_after"}'), add('keys', 'a', '3'), add('keys', 'a', '4', priority => 1);
SET client_min_messages = error;
CALL ruststream.drain('keys');
RESET client_min_messages;
SELECT handled(), count(*) AS left FROM keys;
DELETE FROM keys;

-- a live lease anywhere in the line keeps everybody from it, be its row the head or not;
-- one that has ended, or that is in another line, does not
SELECT add('fifo', 'a', '1', priority => 1), add('fifo', 'a', '2', priority => 2), add('fifo', 'a', '3', priority => 3), add('fifo', 'b', '1');
UPDATE fifo SET locked_until = now() + interval '1 hour' WHERE priority = 2;
CALL ruststream.drain('a');
SELECT handled(), count(*) AS left FROM fifo;
CALL ruststream.drain('all');
SELECT handled(), count(*) AS left FROM fifo;
UPDATE fifo SET locked_until = now() WHERE priority = 2;
CALL ruststream.drain('all');
SELECT handled(), count(*) AS left FROM fifo;
SELECT add('keys', 'a', '1', priority => 1), add('keys', 'a', '2', priority => 2), add('keys', 'a', '3', priority => 3), add('keys', 'b', '1', priority => 4),
	add('keys', NULL, '1'), add('keys', NULL, '2', priority => 1);
UPDATE keys SET locked_until = now() + interval '1 hour' WHERE partition_key = 'a' AND priority = 2 OR partition_key IS NULL AND priority IS NULL;
CALL ruststream.drain('keys');
SELECT handled(), count(*) AS left FROM keys;
UPDATE keys SET locked_until = now();
CALL ruststream.drain('keys');
SELECT handled(), count(*) AS left FROM keys;
-- more rows of a leased key in front than are looked at in order
SELECT count(add('keys', 'a', i::text)) FROM generate_series(1, 100) AS i;
SELECT count(add('keys', 'k' || lpad(i::text, 3, '0'), '', priority => 1, delay => CASE i % 20 WHEN 0 THEN NULL ELSE interval '1 hour' END)) FROM generate_series(1, 100) AS i;
SELECT add('keys', NULL, '', priority => 2);
UPDATE keys SET locked_until = now() + interval '1 hour' WHERE id = (SELECT min(id) FROM keys);
CALL ruststream.drain('keys');
SELECT handled(), count(*) AS left FROM keys;

SET client_min_messages = error;
DROP SCHEMA rs_lines CASCADE;
