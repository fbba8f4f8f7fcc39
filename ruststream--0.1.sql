/* ruststream--0.1.sql: the SQL face of ruststream */

-- complain if the script is sourced in psql rather than run by CREATE EXTENSION
\echo Use "CREATE EXTENSION ruststream" to load this file. \quit

/*
 * Order of this file: schema and types, what a handler says and asks, the
 * tables, registration, publishing, delivering, the views, and the rights.
 *
 * Everything lives in a schema of its own.  Only plain CREATE is used, so that
 * an object which is there already stops the installation: nothing foreign is
 * ever adopted.  Names are written in full, and while this runs the search
 * path is pg_catalog.
 *
 * Functions whose name begins with internal_ are not part of the interface.
 * Those the views read are executable by everybody, since a function in a view
 * runs with the rights of whoever reads the view; they show each caller only
 * what it may see.
 */

CREATE SCHEMA ruststream;
COMMENT ON SCHEMA ruststream IS 'ruststream: any table a transactional task queue';

---------------------------------------------------------------------- types

-- How rows of a queue are taken.
CREATE TYPE ruststream.form AS ENUM ('row_lock', 'lease', 'advisory_lock');

-- What a handler returns.  Made by the functions below.
CREATE TYPE ruststream.outcome AS (
	action text,
	delay interval,
	reason text
);

-- What a handler may ask about the delivery it serves.
CREATE TYPE ruststream.delivery AS (
	subscription text,
	queue regclass,
	id text,
	attempt integer,
	headers jsonb,
	claimed_at timestamptz,
	lease_until timestamptz
);

COMMENT ON TYPE ruststream.form IS 'how rows of a queue are taken';
COMMENT ON TYPE ruststream.outcome IS 'what a handler answers; made by ruststream.ack(), retry(), retry_after(), discard() and dead_letter()';
COMMENT ON TYPE ruststream.delivery IS 'the delivery a handler serves: second argument of a handler, and result of ruststream.delivery()';

------------------------------------------------------------------- outcomes

/*
 * The outcomes.  reason is kept in ruststream.failure where the outcome is
 * not an ack.
 *
 *	ack			the task is done: the handler's writes and its end are one commit
 *	retry		undo the handler's writes, deliver again at once
 *	retry_after	undo, deliver again after delay; NULL: after the subscription's
 *				backoff; zero or negative: at once
 *	discard		undo, end the task without delivering it again
 *	dead_letter	undo, move the task to the subscription's dead-letter destination
 */
CREATE FUNCTION ruststream.ack()
RETURNS ruststream.outcome
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW('ack'::text, NULL::interval, NULL::text)::ruststream.outcome;

CREATE FUNCTION ruststream.retry(reason text DEFAULT NULL)
RETURNS ruststream.outcome
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW('retry'::text, NULL::interval, reason)::ruststream.outcome;

CREATE FUNCTION ruststream.retry_after(delay interval, reason text DEFAULT NULL)
RETURNS ruststream.outcome
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW('retry_after'::text, delay, reason)::ruststream.outcome;

CREATE FUNCTION ruststream.discard(reason text DEFAULT NULL)
RETURNS ruststream.outcome
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW('discard'::text, NULL::interval, reason)::ruststream.outcome;

CREATE FUNCTION ruststream.dead_letter(reason text DEFAULT NULL)
RETURNS ruststream.outcome
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW('dead_letter'::text, NULL::interval, reason)::ruststream.outcome;

COMMENT ON FUNCTION ruststream.ack() IS 'outcome: the task is done; the handler''s writes and its end are one commit';
COMMENT ON FUNCTION ruststream.retry(text) IS 'outcome: undo the handler''s writes and deliver again at once';
COMMENT ON FUNCTION ruststream.retry_after(interval, text) IS 'outcome: undo the handler''s writes and deliver again after the delay (NULL: the subscription''s backoff)';
COMMENT ON FUNCTION ruststream.discard(text) IS 'outcome: undo the handler''s writes and end the task';
COMMENT ON FUNCTION ruststream.dead_letter(text) IS 'outcome: undo the handler''s writes and move the task to the dead-letter destination';

------------------------------------------------------------ inside a handler

/*
 * attempt: the delivery's attempt as it stood before its claim, so that the
 * first delivery reads 1.  delivery: everything known about the delivery.
 * Both are NULL outside a handler.
 */
CREATE FUNCTION ruststream.attempt()
RETURNS integer
LANGUAGE c VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'rs_sql_attempt';

CREATE FUNCTION ruststream.delivery()
RETURNS ruststream.delivery
LANGUAGE c VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'rs_sql_delivery';

/*
 * autonomous: execute SQL in a session of its own, as the current user, and
 * commit it, whatever becomes of the caller's transaction.  args are the values
 * of $1, $2, ..  Returns how many rows the (last) statement has processed.
 *
 * Errors: those of the SQL; 42501 where the current user is not the owner of
 * the delivery, or outside a handler the session's user, and in SECURITY
 * DEFINER functions; 40P01 where it waits for a lock that the caller holds;
 * 2D000 a COMMIT; 54001 more than three in one another; 25006 in a read-only transaction; 53400 no worker process is
 * free; 08006, 08007 the session has ended before it began, before it answered.
 */
CREATE FUNCTION ruststream.autonomous(sql text)
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'rs_sql_autonomous';

CREATE FUNCTION ruststream.autonomous(sql text, VARIADIC args "any")
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'rs_sql_autonomous';

COMMENT ON FUNCTION ruststream.autonomous(text) IS 'execute SQL in a session of its own and commit it, whatever becomes of this transaction; returns the number of rows';
COMMENT ON FUNCTION ruststream.autonomous(text, "any") IS 'execute SQL with parameters in a session of its own and commit it, whatever becomes of this transaction; returns the number of rows';

COMMENT ON FUNCTION ruststream.attempt() IS 'in a handler: which attempt this delivery is, the first being 1; else NULL';
COMMENT ON FUNCTION ruststream.delivery() IS 'in a handler: the delivery it serves; else NULL';

---------------------------------------------------------------------- tables

/*
 * The tables are written by the functions below only, and read through the
 * views.  Neither refers to anything by an object identifier that pg_upgrade
 * would not carry over: handlers are text (handler_oid is
 * looked at only in the database it was made in, where it follows renames), and the owner and the database a
 * subscription was made in are remembered so that a copy of the database can
 * tell that it is one.
 *
 * src/backend/catalog.h numbers the columns of the first two: keep the order.
 */
CREATE TABLE ruststream.queue (
	relation regclass PRIMARY KEY,
	id_column name NOT NULL,
	group_column name,
	fifo boolean NOT NULL,
	priority_column name,
	partition_key_column name,
	retry_after_column name,
	attempt_column name,
	processed_at_column name,
	locked_until_column name,
	headers_column name,
	payload_column name,
	lock_key text,
	isolation text,
	wake boolean NOT NULL
);

CREATE SEQUENCE ruststream.subscription_id AS integer;

-- NULL in a setting means its default, where that depends on the queue.
CREATE TABLE ruststream.subscription (
	id integer PRIMARY KEY DEFAULT pg_catalog.nextval('ruststream.subscription_id'),
	name text NOT NULL UNIQUE,
	queue regclass NOT NULL REFERENCES ruststream.queue ON DELETE CASCADE,
	handler text NOT NULL,
	handler_oid oid NOT NULL,
	owner oid NOT NULL,
	owner_name name NOT NULL,
	database oid NOT NULL,
	system_identifier bigint NOT NULL,
	paused boolean NOT NULL,
	group_name text,
	transactional boolean,
	workers integer NOT NULL,
	batch_size integer,
	max_attempts integer,
	dead_letter_group text,
	dead_letter_table regclass,
	on_error text,
	on_decode_error text,
	retry_delay interval NOT NULL,
	backoff text NOT NULL,
	max_retry_delay interval NOT NULL,
	lease interval NOT NULL,
	timeout interval,
	poll_interval interval NOT NULL,
	deliveries_per_commit integer NOT NULL,
	max_commit_wait interval NOT NULL
);
CREATE INDEX subscription_queue ON ruststream.subscription (queue);

-- Each subscription's newest failures; a history, so not part of a dump.
CREATE TABLE ruststream.failure_history (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	at timestamptz NOT NULL,
	subscription_id integer NOT NULL,
	subscription text NOT NULL,
	queue oid NOT NULL,
	row_id text,
	attempt bigint,
	sqlstate text NOT NULL,
	message text,
	detail text,
	hint text,
	context text
);
CREATE INDEX failure_history_subscription ON ruststream.failure_history (subscription_id, id);

COMMENT ON TABLE ruststream.queue IS 'the attached queues: which columns play which roles';
COMMENT ON TABLE ruststream.subscription IS 'the subscriptions and their settings';
COMMENT ON TABLE ruststream.failure_history IS 'recent failures of each subscription; read them in ruststream.failure';

SELECT pg_catalog.pg_extension_config_dump('ruststream.queue', '');
SELECT pg_catalog.pg_extension_config_dump('ruststream.subscription', '');
SELECT pg_catalog.pg_extension_config_dump('ruststream.subscription_id', '');

/*
 * Whoever writes the two tables, by whatever means: other sessions load their
 * subscriptions afresh, and the supervisor looks again.
 */
CREATE FUNCTION ruststream.internal_changed()
RETURNS trigger
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_changed';

CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON ruststream.queue
	FOR EACH STATEMENT EXECUTE FUNCTION ruststream.internal_changed();
CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON ruststream.subscription
	FOR EACH STATEMENT EXECUTE FUNCTION ruststream.internal_changed();
ALTER TABLE ruststream.queue ENABLE ALWAYS TRIGGER changed;
ALTER TABLE ruststream.subscription ENABLE ALWAYS TRIGGER changed;

/*
 * A dropped table is no queue any more.  This runs at the end of every DROP in
 * the database, so it must neither fail nor do anything unless a queue was
 * dropped; in particular it is PL/pgSQL, so that a missing or broken library
 * of ours stops nobody from dropping things.
 *
 * Tables directly manipulated: ruststream.queue, subscription, failure_history.
 */
CREATE FUNCTION ruststream.internal_forget_dropped()
RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	dropped oid[] := ARRAY(SELECT o.objid
						   FROM pg_event_trigger_dropped_objects() AS o
						   WHERE o.object_type = 'table'
							 AND o.classid = 'pg_class'::regclass
							 AND NOT o.is_temporary);
BEGIN
	IF dropped = '{}' OR to_regclass('ruststream.queue') IS NULL THEN
		RETURN;
	END IF;
	IF EXISTS (SELECT FROM ruststream.queue AS q WHERE q.relation = ANY (dropped)) THEN
		DELETE FROM ruststream.failure_history AS f
			USING ruststream.subscription AS s
			WHERE f.subscription_id = s.id AND s.queue = ANY (dropped);
		DELETE FROM ruststream.subscription AS s WHERE s.queue = ANY (dropped);
		DELETE FROM ruststream.queue AS q WHERE q.relation = ANY (dropped);
	END IF;
END $$;

CREATE EVENT TRIGGER ruststream_forget_dropped ON sql_drop
	EXECUTE FUNCTION ruststream.internal_forget_dropped();
ALTER EVENT TRIGGER ruststream_forget_dropped ENABLE ALWAYS;

---------------------------------------------------------------------- queues

/*
 * create_queue: make a table and attach it.
 *
 *	name			the table to make, as SQL writes it: "schema.table" or "table"
 *	form			how its rows are taken
 *	groups			a column group_name: a subscription reads one group
 *	fifo			one row of a group at a time, its head alone; needs groups
 *	partition_key	a column partition_key: one row of a key at a time, in order;
 *					not with fifo
 *	keep_processed	a column processed_at: a finished row stays, marked
 *	payload_type	type of the column payload
 *	lock_key		of an advisory_lock queue: template of the key, such as 'account-{id}'
 *	isolation		level of its deliveries; NULL: the server's default
 *
 * The table has id, priority, retry_after, attempt, headers and payload, what
 * the switches ask for, and the indexes its claims need.  Runs with the caller's
 * rights; returns the table.
 */
CREATE FUNCTION ruststream.create_queue(
	name text,
	form ruststream.form DEFAULT 'row_lock',
	groups boolean DEFAULT false,
	fifo boolean DEFAULT false,
	partition_key boolean DEFAULT false,
	keep_processed boolean DEFAULT false,
	payload_type regtype DEFAULT 'jsonb',
	lock_key text DEFAULT NULL,
	isolation text DEFAULT NULL)
RETURNS regclass
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_create_queue';

/*
 * attach_queue: make a queue of a table the caller owns, saying which columns
 * play which roles.  The columns' types, the uniqueness of the id and
 * everything else a delivery relies on are checked.  Where an index is missing
 * that claims need, a notice says which: nothing can subscribe before.
 *
 *	lock_key	template of the advisory lock form's key
 *	isolation	'read committed', 'repeatable read', 'serializable'; NULL: the
 *				server's default
 *	wake		a statement trigger wakes idle workers after an INSERT; without
 *				it they look every poll_interval
 *
 * Errors: 42501 not the owner, 42809 not a table, 42703 no such column, 42804
 * unsuitable type, 42710 attached already, 22023 a description that makes no
 * sense, 55000 an id that is not unique.
 */
CREATE FUNCTION ruststream.attach_queue(
	queue regclass,
	id_column name,
	group_column name DEFAULT NULL,
	fifo boolean DEFAULT false,
	priority_column name DEFAULT NULL,
	partition_key_column name DEFAULT NULL,
	retry_after_column name DEFAULT NULL,
	attempt_column name DEFAULT NULL,
	processed_at_column name DEFAULT NULL,
	locked_until_column name DEFAULT NULL,
	headers_column name DEFAULT NULL,
	payload_column name DEFAULT NULL,
	lock_key text DEFAULT NULL,
	isolation text DEFAULT NULL,
	wake boolean DEFAULT true)
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_attach_queue';

/*
 * detach_queue: forget a queue and its subscriptions, and remove its trigger.
 * The table and its rows stay.  Errors: 42704 not a queue, 42501 not the owner.
 */
CREATE FUNCTION ruststream.detach_queue(queue regclass)
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_detach_queue';

COMMENT ON FUNCTION ruststream.create_queue(text, ruststream.form, boolean, boolean, boolean, boolean, regtype, text, text) IS 'make a table and attach it as a queue';
COMMENT ON FUNCTION ruststream.attach_queue(regclass, name, name, boolean, name, name, name, name, name, name, name, name, text, text, boolean) IS 'make a queue of a table you own';
COMMENT ON FUNCTION ruststream.detach_queue(regclass) IS 'forget a queue and its subscriptions; the table stays';

-- The trigger attach_queue creates: wakes idle workers once the INSERT has committed.
CREATE FUNCTION ruststream.wake()
RETURNS trigger
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_wake_trigger';
COMMENT ON FUNCTION ruststream.wake() IS 'trigger function: wakes the queue''s idle workers after the commit of an INSERT';

--------------------------------------------------------------- subscriptions

/*
 * subscribe: have a function handle the rows of a queue.  The caller owns the
 * subscription: its claims, handlers and settlements run as that role.  An
 * existing subscription of this name is replaced, its settings starting from
 * their defaults, where the caller is a member of its owner.
 *
 *	name			of the subscription; up to 63 bytes
 *	queue			an attached queue
 *	handler			'schema.fn', or 'fn(argtype, ..)' where that names several; a procedure,
 *					which may COMMIT, where nothing is transactional about it
 *	group_name		the group it reads; NULL: the subscription's name; '*': every
 *					group of a fifo queue
 *	transactional	the handler's writes and the row's end are one commit; false: its
 *					writes stay, whatever it answers; NULL: true, but false for batches
 *	workers			processes of its own; 0: delivered by CALL ruststream.drain only
 *	batch_size		how many rows a handler takes at once, as an array; NULL: one row,
 *					not in an array.  Never transactional
 *	max_attempts	after so many failed attempts a row becomes a dead letter;
 *					needs dead_letter and the role attempt
 *	dead_letter		a group, or a table where the queue has no groups
 *	on_error		'retry', 'retry_after', 'discard' or 'dead_letter'; NULL:
 *					retry_after where the queue has that role, else retry
 *	on_decode_error	the same words, for rows whose payload does not decode; NULL:
 *					dead_letter where there is one, else as on_error's default
 *	retry_delay		delay after the first failure, and unit of the backoff
 *	backoff			'constant', 'linear' or 'exponential'
 *	max_retry_delay	no backoff is longer
 *	lease			how long a claim lasts in the lease form; rounded up to seconds
 *	timeout			of one delivery
 *	poll_interval	how long an idle worker sleeps where nothing wakes it
 *	deliveries_per_commit	how many deliveries may share a claim and, in the row lock
 *					form, a commit; not in the advisory lock form, nor of leases
 *					with max_attempts
 *	max_commit_wait	how long such a commit is put off for them, or leased rows wait
 *					for their turn, at most 60 s
 *
 * In intervals a month counts as 30 days.  Errors: 42704 no such queue, 42883
 * no such function, 42P13 a function that does not fit, 42501 a right that the
 * owner lacks, 22023 a setting that makes no sense, 55000 no index serves the
 * claims, 42P01 no such dead-letter table, 0A000 a lease queue to be
 * delivered transactionally above read committed.
 */
CREATE FUNCTION ruststream.subscribe(
	name text,
	queue regclass,
	handler text,
	group_name text DEFAULT NULL,
	transactional boolean DEFAULT NULL,
	workers integer DEFAULT 1,
	batch_size integer DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	dead_letter text DEFAULT NULL,
	on_error text DEFAULT NULL,
	on_decode_error text DEFAULT NULL,
	retry_delay interval DEFAULT '1 s',
	backoff text DEFAULT 'exponential',
	max_retry_delay interval DEFAULT '1 h',
	lease interval DEFAULT '30 s',
	timeout interval DEFAULT NULL,
	poll_interval interval DEFAULT '1 s',
	deliveries_per_commit integer DEFAULT 1,
	max_commit_wait interval DEFAULT '10 ms')
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_subscribe';

/*
 * alter_subscription: change settings.  NULL keeps a setting; reset names
 * those that return to their defaults.  Members of the owner only.  Running
 * workers take the change up before their next delivery.
 */
CREATE FUNCTION ruststream.alter_subscription(
	name text,
	handler text DEFAULT NULL,
	group_name text DEFAULT NULL,
	transactional boolean DEFAULT NULL,
	workers integer DEFAULT NULL,
	batch_size integer DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	dead_letter text DEFAULT NULL,
	on_error text DEFAULT NULL,
	on_decode_error text DEFAULT NULL,
	retry_delay interval DEFAULT NULL,
	backoff text DEFAULT NULL,
	max_retry_delay interval DEFAULT NULL,
	lease interval DEFAULT NULL,
	timeout interval DEFAULT NULL,
	poll_interval interval DEFAULT NULL,
	deliveries_per_commit integer DEFAULT NULL,
	max_commit_wait interval DEFAULT NULL,
	reset text[] DEFAULT NULL)
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_alter_subscription';

/*
 * pause: deliver no further row; a delivery in work comes to its end.
 * resume: deliver again.  In a copy of the database it is also what starts a
 * subscription there: its owner is looked up again by name.
 * unsubscribe: forget the subscription and its failures; the queue's rows stay.
 * Members of the owner only.  Errors: 42704 no such subscription, 42501.
 */
CREATE FUNCTION ruststream.unsubscribe(name text)
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_unsubscribe';

CREATE FUNCTION ruststream.pause(name text)
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_pause';

CREATE FUNCTION ruststream.resume(name text)
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_resume';

COMMENT ON FUNCTION ruststream.subscribe(text, regclass, text, text, boolean, integer, integer, integer, text, text, text, interval, text, interval, interval, interval, interval, integer, interval) IS 'have a function handle the rows of a queue';
COMMENT ON FUNCTION ruststream.alter_subscription(text, text, text, boolean, integer, integer, integer, text, text, text, interval, text, interval, interval, interval, interval, integer, interval, text[]) IS 'change settings of a subscription; NULL keeps, reset names what returns to its default';
COMMENT ON FUNCTION ruststream.unsubscribe(text) IS 'forget a subscription and its failures';
COMMENT ON FUNCTION ruststream.pause(text) IS 'have a subscription deliver nothing until it is resumed';
COMMENT ON FUNCTION ruststream.resume(text) IS 'have a paused or copied subscription deliver again';

------------------------------------------------------ publishing, delivering

/*
 * publish: add a task, in the caller's transaction and with the caller's
 * rights: INSERT on the table, and SELECT on its id column.
 *
 *	payload		stored as the payload column's type wants it: jsonb, json, text,
 *				or bytea (the UTF-8 of the JSON text)
 *	group_name	the group it is for; required where the queue has groups
 *	priority	smaller goes first
 *	delay		not due before this has passed
 *	headers		an object of strings
 *
 * Returns the new row's id.  Errors: 42704 not a queue, 22023 or 22004 an
 * argument that does not fit the queue, 42804 a payload column of another type.
 */
CREATE FUNCTION ruststream.publish(
	queue regclass,
	payload jsonb,
	group_name text DEFAULT NULL,
	priority integer DEFAULT NULL,
	delay interval DEFAULT NULL,
	headers jsonb DEFAULT NULL,
	partition_key text DEFAULT NULL)
RETURNS text
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_publish';
COMMENT ON FUNCTION ruststream.publish(regclass, jsonb, text, integer, interval, jsonb, text) IS 'add a task to a queue, in the caller''s transaction; returns its id';

/*
 * drain: deliver in the caller's session until nothing is due, or until
 * max_deliveries rows have been delivered.  Commits as it goes, so it is
 * refused in a transaction block.  Who has connected, the session user and the
 * current user must be the subscription's owner.  A lease queue needs the background process that extends
 * its leases: error 55000 where that is not there.
 */
CREATE PROCEDURE ruststream.drain(subscription text, max_deliveries bigint DEFAULT NULL)
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_drain';
COMMENT ON PROCEDURE ruststream.drain(text, bigint) IS 'deliver in this session until nothing is due';

------------------------------------------------------------------- operating

/*
 * cancel: cancel the delivery of a row while its handler runs, be it a worker's
 * or a drain's.  It counts as a failure: what the handler has written is undone, and
 * the error policy says what becomes of the row.  id is as in delivery_in_work.
 * Returns false where no handler serves that row.  Members of the subscription's
 * owner only.  Errors: 42704 not a queue, 42501, 55000 not preloaded.
 */
CREATE FUNCTION ruststream.cancel(queue regclass, id text)
RETURNS boolean
LANGUAGE c STRICT
AS 'MODULE_PATHNAME', 'rs_sql_cancel';
COMMENT ON FUNCTION ruststream.cancel(regclass, text) IS 'cancel the delivery of a row while its handler runs';

/*
 * redrive: move dead letters back where they came from, as if they had just been
 * published: their attempts begin anew, and the headers that told of their origin
 * go.  In the caller's transaction and with the caller's rights; what somebody else
 * has in work, or has locked, stays.
 *
 *	source			a dead-letter group, or a dead-letter table
 *	max_rows		no more than so many; NULL: all
 *	subscription	where rows go whose headers do not say where they came from;
 *					NULL: to the only queue and group that source is the dead letter of
 *
 * Returns how many rows were moved.  Members of the owner of the queue or of the
 * subscription only.  Errors: 42704 no dead letter, no such subscription, 42725
 * source is a group and a table, 42501, 55000 a row that can go nowhere, 23505 a row
 * whose id is in the queue again.
 */
CREATE FUNCTION ruststream.redrive(
	source text,
	max_rows bigint DEFAULT NULL,
	subscription text DEFAULT NULL)
RETURNS bigint
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_redrive';

/*
 * purge: delete the rows of a queue that were processed so long ago, in the
 * caller's transaction; rows that are locked stay.  An index on the processed_at
 * column has it read no more than it deletes.  Returns how many.  The table's owner and
 * its members only.  Errors: 42704 not a queue, 42501, 55000 it keeps no
 * processed rows.
 */
CREATE FUNCTION ruststream.purge(queue regclass, older_than interval)
RETURNS bigint
LANGUAGE c STRICT
AS 'MODULE_PATHNAME', 'rs_sql_purge';
/*
 * reset_stats: have the counters of a subscription begin at 0 again; NULL: of all
 * whose owner you are a member of.  Nothing else changes.  Errors: 42704 no such
 * subscription, 42501.
 */
CREATE FUNCTION ruststream.reset_stats(subscription text DEFAULT NULL)
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_reset_stats';
COMMENT ON FUNCTION ruststream.reset_stats(text) IS 'have the counters of a subscription, or of all of yours, begin at 0 again';
COMMENT ON FUNCTION ruststream.redrive(text, bigint, text) IS 'move dead letters back where they came from; returns how many';
COMMENT ON FUNCTION ruststream.purge(regclass, interval) IS 'delete rows that were processed so long ago; returns how many';

-------------------------------------------------------- what the views read

-- Counters of this database's subscriptions, from shared memory.
CREATE FUNCTION ruststream.internal_counters(
	OUT subscription_id integer,
	OUT workers integer,
	OUT deliveries bigint,
	OUT acked bigint,
	OUT retried bigint,
	OUT delayed bigint,
	OUT discarded bigint,
	OUT dead_lettered bigint,
	OUT failed bigint,
	OUT decode_failed bigint,
	OUT settle_failed bigint,
	OUT transient bigint,
	OUT lease_lost bigint,
	OUT rate double precision,
	OUT broken text,
	OUT stats_reset timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE ROWS 10
AS 'MODULE_PATHNAME', 'rs_sql_counters';

-- This database's workers and drains, from shared memory.
CREATE FUNCTION ruststream.internal_workers(
	OUT pid integer,
	OUT subscription_id integer,
	OUT state text,
	OUT since timestamptz,
	OUT row_id text,
	OUT attempt bigint,
	OUT delivery_since timestamptz,
	OUT lease_until timestamptz,
	OUT rows integer)
RETURNS SETOF record
LANGUAGE c VOLATILE ROWS 10
AS 'MODULE_PATHNAME', 'rs_sql_workers';

-- What waits in a subscription's queue, counted as its owner and up to 10,000
-- rows; or the problem that forbids it.
CREATE FUNCTION ruststream.internal_depth(
	subscription_id integer,
	OUT ready bigint,
	OUT waiting bigint,
	OUT dead bigint,
	OUT capped boolean,
	OUT oldest interval,
	OUT problem text)
RETURNS record
LANGUAGE c VOLATILE STRICT
AS 'MODULE_PATHNAME', 'rs_sql_depth';

-- Was a subscription made in this very database, not in one it is a copy of?
CREATE FUNCTION ruststream.internal_is_here(database oid, system_identifier bigint)
RETURNS boolean
LANGUAGE c STABLE STRICT
AS 'MODULE_PATHNAME', 'rs_sql_is_here';

-- Why no workers run on this server at all; NULL: they may.
CREATE FUNCTION ruststream.internal_no_workers()
RETURNS text
LANGUAGE c STABLE
AS 'MODULE_PATHNAME', 'rs_sql_no_workers';

CREATE FUNCTION ruststream.internal_transaction_plan(
	OUT form text,
	OUT transactional boolean,
	OUT outcome text,
	OUT step integer,
	OUT action text)
RETURNS SETOF record
LANGUAGE c STABLE ROWS 250
AS 'MODULE_PATHNAME', 'rs_sql_transaction_plan';

----------------------------------------------------------------------- views

/*
 * Who sees what.  A row of a subscription: members of its owner and of
 * pg_monitor.  The text of errors and the ids of rows: members of the owner.
 */
CREATE VIEW ruststream.internal_subscription WITH (security_barrier) AS
SELECT s.id, s.name, s.queue, s.workers, s.paused, NOT h.is_here AS copied,
	coalesce(r.rolname, s.owner_name) AS owner,
	coalesce(s.group_name, s.name) AS group_name,
	coalesce(s.dead_letter_group, s.dead_letter_table::oid::text) AS dead_letter,
	m.is_member
FROM ruststream.subscription AS s
	CROSS JOIN LATERAL (
		SELECT ruststream.internal_is_here(s.database, s.system_identifier) AS is_here) AS h
	LEFT JOIN pg_catalog.pg_roles AS r
		ON CASE WHEN h.is_here THEN r.oid = s.owner ELSE r.rolname = s.owner_name END
	CROSS JOIN LATERAL (
		SELECT pg_catalog.pg_has_role(coalesce(r.oid, 0), 'USAGE') AS is_member) AS m
WHERE m.is_member OR pg_catalog.pg_has_role('pg_monitor', 'USAGE');

-- One row a subscription: what it is doing, in words and figures.
CREATE VIEW ruststream.status WITH (security_barrier) AS
SELECT s.name AS subscription, s.queue, s.owner,
	CASE
		WHEN s.copied THEN 'copied: resume it to start it here'
		WHEN s.paused THEN 'paused'
		WHEN c.broken LIKE 'waiting for a worker slot%' AND d.problem IS NULL THEN c.broken
		WHEN d.problem LIKE 'locked: %' THEN d.problem
		WHEN coalesce(d.problem, c.broken) IS NOT NULL THEN
			CASE WHEN s.is_member THEN 'broken: ' || coalesce(d.problem, c.broken) ELSE 'broken' END
		WHEN s.workers = 0 THEN 'no workers: drained by CALL only'
		WHEN n.no_workers IS NOT NULL THEN n.no_workers
		WHEN coalesce(c.workers, 0) = 0 THEN 'waiting for a worker slot'
		ELSE 'running'
	END AS state,
	coalesce(c.workers, 0) AS workers,
	s.workers AS workers_wanted,
	CASE WHEN d.capped THEN d.ready ELSE d.ready - least(w.in_work, d.ready) END AS ready,
	d.waiting,
	w.in_work,
	d.dead,
	d.capped,
	d.oldest,
	c.rate,
	coalesce(c.acked, 0) AS delivered,
	coalesce(c.failed + c.decode_failed + c.settle_failed, 0) AS failed,
	f.message AS last_error,
	f.at AS last_error_at
FROM ruststream.internal_subscription AS s
	CROSS JOIN (SELECT ruststream.internal_no_workers() AS no_workers) AS n
	LEFT JOIN ruststream.internal_counters() AS c ON c.subscription_id = s.id
	CROSS JOIN LATERAL ruststream.internal_depth(s.id) AS d
	CROSS JOIN LATERAL (
		SELECT coalesce(sum(i.rows), 0)::bigint AS in_work
		FROM ruststream.internal_workers() AS i
		WHERE i.subscription_id = s.id AND i.delivery_since IS NOT NULL) AS w
	LEFT JOIN LATERAL (
		SELECT h.message, h.at
		FROM ruststream.failure_history AS h
		WHERE h.subscription_id = s.id AND s.is_member
		ORDER BY h.id DESC
		LIMIT 1) AS f ON true;

-- What a subscription has done since stats_reset.
CREATE VIEW ruststream.stat_subscription WITH (security_barrier) AS
SELECT s.name AS subscription, s.queue, s.owner,
	coalesce(c.workers, 0) AS workers,
	coalesce(c.deliveries, 0) AS deliveries,
	coalesce(c.acked, 0) AS acked,
	coalesce(c.retried, 0) AS retried,
	coalesce(c.delayed, 0) AS delayed,
	coalesce(c.discarded, 0) AS discarded,
	coalesce(c.dead_lettered, 0) AS dead_lettered,
	coalesce(c.failed, 0) AS failed,
	coalesce(c.decode_failed, 0) AS decode_failed,
	coalesce(c.settle_failed, 0) AS settle_failed,
	coalesce(c.transient, 0) AS transient,
	coalesce(c.lease_lost, 0) AS lease_lost,
	c.rate,
	c.stats_reset
FROM ruststream.internal_subscription AS s
	LEFT JOIN ruststream.internal_counters() AS c ON c.subscription_id = s.id;

/*
 * One row a queue, for members of the table's owner and for whoever sees one
 * of its subscriptions.  What is counted is what its subscriptions read: each
 * group once, and each dead-letter destination once.
 */
CREATE VIEW ruststream.stat_queue WITH (security_barrier) AS
SELECT q.relation AS queue,
	count(s.id)::integer AS subscriptions,
	(sum(s.ready - CASE WHEN s.capped THEN 0 ELSE least(s.group_in_work, s.ready) END)
		FILTER (WHERE s.nth_of_group = 1))::bigint AS ready,
	(sum(s.waiting) FILTER (WHERE s.nth_of_group = 1))::bigint AS waiting,
	coalesce(sum(s.in_work), 0)::bigint AS in_work,
	(sum(s.dead) FILTER (WHERE s.nth_of_dead_letter = 1))::bigint AS dead,
	bool_or(s.capped) AS capped,
	max(s.oldest) AS oldest
FROM ruststream.queue AS q
	JOIN pg_catalog.pg_class AS r ON r.oid = q.relation
	LEFT JOIN LATERAL (
		SELECT v.id, d.ready, d.waiting, d.dead, d.capped, d.oldest, w.in_work,
			sum(w.in_work) OVER (PARTITION BY g.group_name)::bigint AS group_in_work,
			row_number() OVER (PARTITION BY g.group_name
							   ORDER BY d.problem IS NOT NULL, v.group_name <> '*', v.id) AS nth_of_group,
			row_number() OVER (PARTITION BY v.dead_letter
							   ORDER BY d.dead IS NULL, v.id) AS nth_of_dead_letter
		FROM ruststream.internal_subscription AS v
			CROSS JOIN LATERAL ruststream.internal_depth(v.id) AS d
			CROSS JOIN LATERAL (
				SELECT CASE WHEN q.group_column IS NOT NULL AND NOT (q.fifo AND EXISTS (
							SELECT 1 FROM ruststream.internal_subscription AS o
							WHERE o.queue = q.relation AND o.group_name = '*'))
					THEN v.group_name END AS group_name) AS g
			CROSS JOIN LATERAL (
				SELECT coalesce(sum(i.rows), 0)::bigint AS in_work
				FROM ruststream.internal_workers() AS i
				WHERE i.subscription_id = v.id AND i.delivery_since IS NOT NULL) AS w
		WHERE v.queue = q.relation) AS s ON true
GROUP BY q.relation, r.relowner
HAVING pg_catalog.pg_has_role(r.relowner, 'USAGE')
	OR pg_catalog.pg_has_role('pg_monitor', 'USAGE')
	OR count(s.id) > 0;

-- Every process that delivers, workers and drains.
CREATE VIEW ruststream.stat_worker WITH (security_barrier) AS
SELECT w.pid, s.name AS subscription, w.state,
	CASE WHEN s.is_member THEN w.row_id END AS delivery,
	w.since
FROM ruststream.internal_workers() AS w
	JOIN ruststream.internal_subscription AS s ON s.id = w.subscription_id;

-- Every row whose handler is running.
CREATE VIEW ruststream.delivery_in_work WITH (security_barrier) AS
SELECT s.name AS subscription, s.queue, w.row_id AS id, w.attempt, w.pid,
	w.delivery_since AS since, w.lease_until
FROM ruststream.internal_workers() AS w
	JOIN ruststream.internal_subscription AS s ON s.id = w.subscription_id
WHERE s.is_member AND w.delivery_since IS NOT NULL;

-- The newest failures of each subscription.
CREATE VIEW ruststream.failure WITH (security_barrier) AS
SELECT f.at, s.name AS subscription, f.queue::regclass AS queue, f.row_id AS id, f.attempt,
	f.sqlstate, f.message, f.detail, f.hint, f.context
FROM ruststream.failure_history AS f
	JOIN ruststream.internal_subscription AS s ON s.id = f.subscription_id
WHERE s.is_member
ORDER BY f.id;

-- The steps of a delivery, by form, mode and outcome, from the table the engine itself obeys.
CREATE VIEW ruststream.transaction_plan AS
SELECT p.form::ruststream.form AS form, p.transactional, p.outcome, p.step, p.action
FROM ruststream.internal_transaction_plan() AS p;

COMMENT ON VIEW ruststream.status IS 'one row a subscription: state in words, workers, depth, rate, last error';
COMMENT ON VIEW ruststream.stat_subscription IS 'what each subscription has done since stats_reset';
COMMENT ON VIEW ruststream.stat_queue IS 'what waits in each queue; counted up to 10,000 rows a subscription';
COMMENT ON VIEW ruststream.stat_worker IS 'every process that delivers, and what it is doing';
COMMENT ON VIEW ruststream.delivery_in_work IS 'every row whose handler is running';
COMMENT ON VIEW ruststream.failure IS 'the newest failures of each subscription';
COMMENT ON VIEW ruststream.transaction_plan IS 'the steps of a delivery, by form, mode and outcome';

------------------------------------------------------------------------- end

-- Tell the launcher, once this has committed, that there is a database to look after.
CREATE FUNCTION ruststream.internal_announce()
RETURNS void
LANGUAGE c
AS 'MODULE_PATHNAME', 'rs_sql_announce';

/*
 * Who may do what.  What ALTER DEFAULT PRIVILEGES has granted or withheld while
 * the objects were made does not count: first everything is taken from everybody
 * but the owner.
 */
DO $$
DECLARE
	command text;
BEGIN
	FOR command IN
		SELECT DISTINCT format('REVOKE ALL ON %s FROM %s', o.object,
			CASE WHEN g.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(g.grantee)) END)
		FROM (
			SELECT 'SCHEMA ruststream', nspowner, nspacl
			FROM pg_namespace WHERE nspname = 'ruststream'
			UNION ALL
			SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || oid::regclass,
				relowner, relacl
			FROM pg_class WHERE relnamespace = 'ruststream'::regnamespace
			UNION ALL
			SELECT 'ROUTINE ' || oid::regprocedure, proowner,
				coalesce(proacl, acldefault('f', proowner))
			FROM pg_proc WHERE pronamespace = 'ruststream'::regnamespace
			UNION ALL
			SELECT 'TYPE ' || oid::regtype, typowner, typacl
			FROM pg_type WHERE typnamespace = 'ruststream'::regnamespace
		) AS o (object, owner, acl), aclexplode(o.acl) AS g
		WHERE g.grantee <> o.owner
	LOOP
		EXECUTE command;
	END LOOP;
END $$;

GRANT USAGE ON SCHEMA ruststream TO PUBLIC;
GRANT USAGE ON TYPE ruststream.form, ruststream.outcome, ruststream.delivery TO PUBLIC;
GRANT EXECUTE ON ALL ROUTINES IN SCHEMA ruststream TO PUBLIC;
REVOKE ALL ON FUNCTION ruststream.internal_changed(), ruststream.internal_forget_dropped(),
	ruststream.internal_announce() FROM PUBLIC;
GRANT SELECT ON ruststream.status, ruststream.stat_subscription, ruststream.stat_queue,
	ruststream.stat_worker, ruststream.delivery_in_work, ruststream.failure,
	ruststream.transaction_plan TO PUBLIC;

SELECT ruststream.internal_announce();
