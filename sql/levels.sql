-- The isolation level that a handler sees, and what is refused.
\set VERBOSITY terse
SET client_min_messages = error;
CREATE EXTENSION IF NOT EXISTS ruststream;
RESET client_min_messages;

CREATE SCHEMA rs_levels;
SET search_path = rs_levels;

CREATE TABLE seen (n int GENERATED ALWAYS AS IDENTITY, queue regclass, level text, who text);
CREATE FUNCTION note_level() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO rs_levels.seen (queue, level, who) VALUES (TG_RELID, current_setting('transaction_isolation'), lower(TG_OP));
	RETURN coalesce(NEW, OLD);
END $$;
CREATE FUNCTION handle(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	IF p->>'do' = 'ack' THEN
		INSERT INTO rs_levels.seen (queue, level, who) VALUES (d.queue, current_setting('transaction_isolation'), 'handler');
		RETURN ruststream.ack();
	END IF;
	RETURN ruststream.retry_after('1 hour');
END $$;
-- the second delete of a row goes well, where its first was refused
CREATE FUNCTION refuse_first() RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN IF OLD.attempt = 1 THEN RAISE EXCEPTION 'not at first'; END IF; RETURN OLD; END $$;

-- Queues that differ in their level only; none declared: the server's default.
CREATE PROCEDURE make(name text, level text)
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('CREATE TABLE rs_levels.%1$I (id int PRIMARY KEY, retry_after timestamptz, attempt int NOT NULL DEFAULT 1, payload jsonb);
		CREATE INDEX ON rs_levels.%1$I (retry_after NULLS FIRST, id);
		CREATE TRIGGER a BEFORE UPDATE OR DELETE ON rs_levels.%1$I FOR EACH ROW EXECUTE FUNCTION rs_levels.note_level()', name);
	PERFORM ruststream.attach_queue(format('rs_levels.%I', name)::regclass, 'id', retry_after_column => 'retry_after',
		attempt_column => 'attempt', payload_column => 'payload', isolation => level);
	PERFORM ruststream.subscribe(name, format('rs_levels.%I', name), 'rs_levels.handle', workers => 0, retry_delay => '1 hour');
	EXECUTE format('INSERT INTO rs_levels.%I VALUES (1, NULL, 1, ''{"do": "ack"}''), (2, NULL, 1, ''{"do": "retry_after"}'')', name);
END $$;

-- a row lock queue above READ COMMITTED is allowed, with a warning
CALL make('default', NULL);
CALL make('committed', 'read committed');
CALL make('repeatable', 'repeatable read');
CALL make('serial', 'serializable');
CALL make('capitals', 'Repeatable READ');
-- refused
CALL make('uncommitted', 'read uncommitted');
CALL make('snapshot', 'snapshot');
CALL make('empty', '');
SELECT relation, isolation FROM ruststream.queue WHERE relation::text ~ '^rs_levels|^"?(default|committed|repeatable|serial|capitals|uncommitted|snapshot|empty)' ORDER BY relation::text COLLATE "C";

CALL ruststream.drain('default');
CALL ruststream.drain('committed');
CALL ruststream.drain('repeatable');
CALL ruststream.drain('serial');
CALL ruststream.drain('capitals');
SELECT queue, level, who FROM seen ORDER BY n;

-- each delivery opens at the level in force, whatever the session was at
TRUNCATE seen;
INSERT INTO "default" VALUES (3, NULL, 1, '{"do": "ack"}');
INSERT INTO committed VALUES (3, NULL, 1, '{"do": "ack"}');
INSERT INTO repeatable VALUES (3, NULL, 1, '{"do": "ack"}');
SET default_transaction_isolation = serializable;
CALL ruststream.drain('default');
CALL ruststream.drain('committed');
CALL ruststream.drain('repeatable');
-- and leaves the session's own as it was
SHOW transaction_isolation;
RESET default_transaction_isolation;
SELECT queue, level, who FROM seen ORDER BY n;

-- a default of READ UNCOMMITTED is the server's business: it runs as READ COMMITTED
TRUNCATE seen;
INSERT INTO "default" VALUES (4, NULL, 1, '{"do": "ack"}');
SET default_transaction_isolation = 'read uncommitted';
CALL ruststream.drain('default');
RESET default_transaction_isolation;
SELECT queue, level, who FROM seen ORDER BY n;

-- a handler cannot change the level, nor the default for those after it
TRUNCATE seen;
CREATE FUNCTION change_level(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
BEGIN
	IF d.id = '11' THEN
		SET TRANSACTION ISOLATION LEVEL SERIALIZABLE;
	END IF;
	SET default_transaction_isolation = serializable;
	SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY, DEFERRABLE;
	RETURN rs_levels.handle(p, d);
END $$;
SELECT ruststream.alter_subscription('default', handler => 'change_level');
INSERT INTO "default" SELECT i, NULL, 1, '{"do": "ack"}' FROM generate_series(11, 13) AS i;
CALL ruststream.drain('default');
SELECT queue, level, who FROM seen ORDER BY n;
SELECT id, sqlstate FROM ruststream.failure WHERE subscription = 'default';
SHOW default_transaction_isolation;
SHOW default_transaction_read_only;

-- a failed ack is settled at READ COMMITTED, whatever the queue and the server say
CREATE TRIGGER b BEFORE DELETE ON serial FOR EACH ROW EXECUTE FUNCTION refuse_first();
CREATE TRIGGER b BEFORE DELETE ON "default" FOR EACH ROW EXECUTE FUNCTION refuse_first();
SELECT ruststream.alter_subscription('default', handler => 'handle');
TRUNCATE seen;
INSERT INTO serial VALUES (5, NULL, 1, '{"do": "ack"}');
CALL ruststream.drain('serial');
INSERT INTO "default" VALUES (5, NULL, 1, '{"do": "ack"}');
SET default_transaction_isolation = serializable;
CALL ruststream.drain('default');
RESET default_transaction_isolation;
SELECT queue, level, who FROM seen ORDER BY n;
TRUNCATE seen;
ALTER TABLE serial DISABLE TRIGGER a;
UPDATE serial SET retry_after = NULL WHERE id = 5;
ALTER TABLE serial ENABLE TRIGGER a;
CALL ruststream.drain('serial');
SELECT queue, level, who FROM seen ORDER BY n;

-- a session that is read only cannot deliver, and nothing happens
INSERT INTO committed VALUES (6, NULL, 1, '{"do": "ack"}');
SET default_transaction_read_only = on;
CALL ruststream.drain('committed');
RESET default_transaction_read_only;
SELECT id, attempt FROM committed WHERE id = 6;

SET client_min_messages = error;
DROP SCHEMA rs_levels CASCADE;
