-- What `ruststream install` makes in a PostgreSQL database, in one transaction.
--
-- Queues and subscriptions are rows of ordinary tables, so describing, subscribing, pausing and
-- looking work in SQL as well as by the command line.  Everything belongs to whoever installs it, and
-- so does the right to write to it: a subscription's handler is run by whoever runs its workers.
--
-- What differs from an earlier version is made there by upgrade_postgres_N.sql, to the same effect: so
-- a new column is the last one of its table.

CREATE TABLE public.ruststream_version (
	version integer NOT NULL
);

INSERT INTO public.ruststream_version VALUES (2);

-- A table's name as our tables have it: with its schema, quoted where SQL needs it.
CREATE FUNCTION public.ruststream_table_name(name text)
RETURNS text
LANGUAGE sql STABLE
AS $$
	SELECT coalesce((SELECT pg_catalog.format('%I.%I', n.nspname, c.relname)
		FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n
			ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
		WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(name)), name)
$$;

-- Which columns of a table play which roles.
CREATE TABLE public.ruststream_queue (
	name text NOT NULL PRIMARY KEY, -- the table; with its schema, whatever way it was written
	id_column text NOT NULL,
	group_column text,
	priority_column text,
	partition_key_column text,
	retry_after_column text,
	attempt_column text,
	processed_at_column text,
	locked_until_column text, -- the lease form
	headers_column text,
	payload_column text,
	fifo boolean NOT NULL DEFAULT false,
	lock_key text,            -- or the advisory lock form; neither: the row lock form
	isolation text CONSTRAINT "read committed, repeatable read, serializable, or NULL for the default"
		CHECK (lower(isolation) IN ('read committed', 'repeatable read', 'serializable')),
	mode text CONSTRAINT "only SQLite has transaction modes: declare an isolation level"
		CHECK (mode IS NULL),
	CONSTRAINT "a queue cannot have both a lease column and a lock key"
		CHECK (locked_until_column IS NULL OR lock_key IS NULL)
);

-- Who delivers a queue's rows, and how.
CREATE TABLE public.ruststream_subscription (
	name text NOT NULL PRIMARY KEY,
	queue text NOT NULL REFERENCES public.ruststream_queue (name),
	handler text,          -- SQL
	program text,          -- or a command for /bin/sh; neither: a callback of a program of yours
	group_name text,       -- the name, unless given
	transactional text CHECK (transactional IN ('on', 'off')),
	workers integer NOT NULL DEFAULT 1 CHECK (workers BETWEEN 0 AND 64),
	max_attempts integer CHECK (max_attempts >= 1),
	dead_letter text,      -- a group, or a table where the queue has no groups
	on_error text CHECK (on_error IN ('retry', 'retry_after', 'discard', 'dead_letter')),
	on_decode_error text CHECK (on_decode_error IN ('retry', 'retry_after', 'discard', 'dead_letter')),
	decode text NOT NULL DEFAULT 'any' CHECK (decode IN ('any', 'text', 'json')),
	retry_delay_ms bigint NOT NULL DEFAULT 1000 CHECK (retry_delay_ms >= 0),
	backoff text NOT NULL DEFAULT 'exponential' CHECK (backoff IN ('constant', 'linear', 'exponential')),
	max_retry_delay_ms bigint NOT NULL DEFAULT 3600000 CHECK (max_retry_delay_ms >= 0),
	lease_ms bigint NOT NULL DEFAULT 30000 CHECK (lease_ms > 0),
	timeout_ms bigint CHECK (timeout_ms > 0),
	poll_interval_ms bigint NOT NULL DEFAULT 1000 CHECK (poll_interval_ms > 0),
	paused boolean NOT NULL DEFAULT false,
	batch_size integer CHECK (batch_size BETWEEN 1 AND 10000), -- the handler takes so many rows at once
	CONSTRAINT "a subscription has a handler or a program, not both"
		CHECK (handler IS NULL OR program IS NULL),
	CONSTRAINT "batches are not transactional: leave out one of the two"
		CHECK (batch_size IS NULL OR transactional IS DISTINCT FROM 'on')
);

CREATE INDEX ON public.ruststream_subscription (queue);

CREATE FUNCTION public.ruststream_full_name()
RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
	IF TG_ARGV[0] OPERATOR(pg_catalog.=) 'queue' THEN
		NEW.name := public.ruststream_table_name(NEW.name);
	ELSE
		NEW.queue := public.ruststream_table_name(NEW.queue);
	END IF;
	RETURN NEW;
END
$$;

CREATE TRIGGER ruststream_full_name BEFORE INSERT OR UPDATE OF name ON public.ruststream_queue
	FOR EACH ROW EXECUTE FUNCTION public.ruststream_full_name('queue');
CREATE TRIGGER ruststream_full_name BEFORE INSERT OR UPDATE OF queue ON public.ruststream_subscription
	FOR EACH ROW EXECUTE FUNCTION public.ruststream_full_name('subscription');

-- The newest failures of each subscription, 1,000 at most.
CREATE TABLE public.ruststream_failure (
	number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	at timestamptz NOT NULL,
	subscription text NOT NULL,
	queue text NOT NULL,
	id text,
	attempt bigint,
	sqlstate text,
	message text NOT NULL,
	hint text
);

CREATE INDEX ON public.ruststream_failure (subscription, number);

-- What each subscription has done; a worker adds its share once a second.
CREATE TABLE public.ruststream_counter (
	subscription text NOT NULL PRIMARY KEY,
	acked bigint NOT NULL DEFAULT 0,
	retried bigint NOT NULL DEFAULT 0,
	delayed bigint NOT NULL DEFAULT 0,
	discarded bigint NOT NULL DEFAULT 0,
	dead_lettered bigint NOT NULL DEFAULT 0,
	failed bigint NOT NULL DEFAULT 0,
	lease_lost bigint NOT NULL DEFAULT 0,
	transient bigint NOT NULL DEFAULT 0
);

-- Workers that are there, as long as they say so every few seconds.
CREATE TABLE public.ruststream_worker (
	id text NOT NULL PRIMARY KEY, -- host:pid:number
	subscription text NOT NULL,
	started_at timestamptz NOT NULL,
	seen_at timestamptz NOT NULL,
	state text NOT NULL           -- 'running', or 'broken: ..'
);

-- One row a subscription: what it is doing, in words and figures.
CREATE VIEW public.ruststream_status AS
SELECT s.name AS subscription, s.queue,
	CASE
		WHEN s.paused THEN 'paused'
		WHEN w.broken IS NOT NULL THEN w.broken
		WHEN w.workers > 0 THEN 'running'
		ELSE 'no worker'
	END AS state,
	coalesce(w.workers, 0) AS workers,
	s.workers AS workers_wanted,
	coalesce(c.acked, 0) AS delivered,
	coalesce(c.failed, 0) AS failed,
	f.message AS last_error,
	f.at AS last_error_at
FROM public.ruststream_subscription AS s
	LEFT JOIN public.ruststream_counter AS c ON c.subscription = s.name
	LEFT JOIN (
		SELECT subscription, count(*) AS workers,
			max(state) FILTER (WHERE state LIKE 'broken%') AS broken
		FROM public.ruststream_worker
		WHERE seen_at >= clock_timestamp() - interval '30 seconds'
		GROUP BY subscription) AS w ON w.subscription = s.name
	LEFT JOIN LATERAL (
		SELECT h.message, h.at FROM public.ruststream_failure AS h WHERE h.subscription = s.name
		ORDER BY h.number DESC LIMIT 1) AS f ON true;

-- What a handler that is SQL answers.  Each sends a message to the worker, which takes no notice of it
-- anywhere else, and returns the outcome's word.  The last answer of a handler counts, none is ack.
CREATE FUNCTION public.ruststream_answer(outcome text, delay double precision, reason text)
RETURNS text
LANGUAGE plpgsql
AS $$
BEGIN
	IF delay OPERATOR(pg_catalog.<) 0 OR delay OPERATOR(pg_catalog.>) 3.2e9 THEN
		RAISE EXCEPTION 'a row cannot be delayed by % seconds', delay
			USING ERRCODE = 'invalid_parameter_value';
	END IF;
	RAISE INFO USING ERRCODE = 'RS0UT',
		MESSAGE = coalesce(reason, ''),
		DETAIL = pg_catalog.concat(outcome, ' ' OPERATOR(pg_catalog.||)
			(delay OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8::pg_catalog.text);
	RETURN outcome;
END
$$;

CREATE FUNCTION public.ruststream_ack() RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('ack', NULL, NULL)$$;
CREATE FUNCTION public.ruststream_retry(reason text DEFAULT NULL) RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('retry', NULL, reason)$$;
CREATE FUNCTION public.ruststream_retry_after() RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('retry_after', NULL, NULL)$$;
CREATE FUNCTION public.ruststream_retry_after(seconds double precision, reason text DEFAULT NULL) RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('retry_after', seconds, reason)$$;
CREATE FUNCTION public.ruststream_retry_after(delay interval, reason text DEFAULT NULL) RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('retry_after', pg_catalog.date_part('epoch', delay), reason)$$;
CREATE FUNCTION public.ruststream_discard(reason text DEFAULT NULL) RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('discard', NULL, reason)$$;
CREATE FUNCTION public.ruststream_dead_letter(reason text DEFAULT NULL) RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('dead_letter', NULL, reason)$$;
CREATE FUNCTION public.ruststream_undecodable(reason text DEFAULT NULL) RETURNS text
	LANGUAGE sql AS $$SELECT public.ruststream_answer('undecodable', NULL, reason)$$;

-- SELECT ruststream_wake('jobs'): inserts into the table wake idle workers, by NOTIFY; otherwise they look
-- once a poll interval.  A transaction that notifies takes a lock of the whole server's at its commit.
CREATE FUNCTION public.ruststream_notify()
RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM pg_catalog.pg_notify(pg_catalog.concat('ruststream_', TG_RELID), '');
	RETURN NULL;
END
$$;

CREATE FUNCTION public.ruststream_wake(queue text, wake boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF EXISTS (SELECT 1 FROM pg_catalog.pg_trigger AS t WHERE t.tgname OPERATOR(pg_catalog.=) 'ruststream_notify'
		AND t.tgrelid OPERATOR(pg_catalog.=) queue::pg_catalog.regclass::pg_catalog.oid) THEN
		EXECUTE pg_catalog.format('DROP TRIGGER ruststream_notify ON %s', queue::pg_catalog.regclass);
	END IF;
	IF wake THEN
		EXECUTE pg_catalog.format('CREATE TRIGGER ruststream_notify AFTER INSERT ON %s'
			' FOR EACH STATEMENT EXECUTE FUNCTION public.ruststream_notify()', queue::pg_catalog.regclass);
	END IF;
END
$$;
