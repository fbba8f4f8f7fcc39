-- What `ruststream install` makes in a SQLite database, in one transaction.
--
-- Queues and subscriptions are rows of ordinary tables, so describing, subscribing, pausing and
-- looking work in SQL as well as by the command line.  Times are text in UTC,
-- YYYY-MM-DDTHH:MM:SS[.fff]+00:00; flags are 0 and 1; delays are milliseconds.

CREATE TABLE ruststream_version (
	version INTEGER NOT NULL
);

INSERT INTO ruststream_version VALUES (1);

-- Which columns of a table play which roles.
CREATE TABLE ruststream_queue (
	name TEXT NOT NULL PRIMARY KEY, -- the table
	id_column TEXT NOT NULL,
	group_column TEXT,
	priority_column TEXT,
	partition_key_column TEXT,
	retry_after_column TEXT,
	attempt_column TEXT,
	processed_at_column TEXT,
	locked_until_column TEXT, -- the lease form
	headers_column TEXT,
	payload_column TEXT,
	fifo INTEGER NOT NULL DEFAULT 0 CHECK (fifo IN (0, 1)),
	lock_key TEXT,            -- or the advisory lock form
	isolation TEXT CONSTRAINT "SQLite is always serializable: declare a mode instead"
		CHECK (isolation IS NULL),
	mode TEXT CHECK (mode IN ('deferred', 'immediate', 'exclusive')),
	CONSTRAINT "SQLite has no row lock form: give locked_until_column or lock_key"
		CHECK (locked_until_column IS NOT NULL OR lock_key IS NOT NULL),
	CONSTRAINT "a queue cannot have both a lease column and a lock key"
		CHECK (locked_until_column IS NULL OR lock_key IS NULL)
);

-- Who delivers a queue's rows, and how.
CREATE TABLE ruststream_subscription (
	name TEXT NOT NULL PRIMARY KEY,
	queue TEXT NOT NULL REFERENCES ruststream_queue (name),
	handler TEXT,          -- SQL
	program TEXT,          -- or a command for /bin/sh; neither: a callback of a program of yours
	group_name TEXT,       -- the name, unless given
	transactional TEXT CHECK (transactional IN ('on', 'off')),
	workers INTEGER NOT NULL DEFAULT 1 CHECK (workers BETWEEN 0 AND 64),
	max_attempts INTEGER CHECK (max_attempts >= 1),
	dead_letter TEXT,      -- a group, or a table where the queue has no groups
	on_error TEXT CHECK (on_error IN ('retry', 'retry_after', 'discard', 'dead_letter')),
	on_decode_error TEXT CHECK (on_decode_error IN ('retry', 'retry_after', 'discard', 'dead_letter')),
	decode TEXT NOT NULL DEFAULT 'any' CHECK (decode IN ('any', 'text', 'json')),
	retry_delay_ms INTEGER NOT NULL DEFAULT 1000 CHECK (retry_delay_ms >= 0),
	backoff TEXT NOT NULL DEFAULT 'exponential' CHECK (backoff IN ('constant', 'linear', 'exponential')),
	max_retry_delay_ms INTEGER NOT NULL DEFAULT 3600000 CHECK (max_retry_delay_ms >= 0),
	lease_ms INTEGER NOT NULL DEFAULT 30000 CHECK (lease_ms > 0),
	timeout_ms INTEGER CHECK (timeout_ms > 0),
	poll_interval_ms INTEGER NOT NULL DEFAULT 1000 CHECK (poll_interval_ms > 0),
	paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
	CONSTRAINT "a subscription has a handler or a program, not both"
		CHECK (handler IS NULL OR program IS NULL)
);

CREATE INDEX ruststream_subscription_queue ON ruststream_subscription (queue);

-- The newest failures of each subscription, 1,000 at most.
CREATE TABLE ruststream_failure (
	number INTEGER PRIMARY KEY AUTOINCREMENT,
	at TEXT NOT NULL,
	subscription TEXT NOT NULL,
	queue TEXT NOT NULL,
	id TEXT,
	attempt INTEGER,
	sqlstate TEXT,
	message TEXT NOT NULL,
	hint TEXT
);

CREATE INDEX ruststream_failure_subscription ON ruststream_failure (subscription, number);

-- What each subscription has done; a worker adds its share once a second.
CREATE TABLE ruststream_counter (
	subscription TEXT NOT NULL PRIMARY KEY,
	acked INTEGER NOT NULL DEFAULT 0,
	retried INTEGER NOT NULL DEFAULT 0,
	delayed INTEGER NOT NULL DEFAULT 0,
	discarded INTEGER NOT NULL DEFAULT 0,
	dead_lettered INTEGER NOT NULL DEFAULT 0,
	failed INTEGER NOT NULL DEFAULT 0,
	lease_lost INTEGER NOT NULL DEFAULT 0,
	transient INTEGER NOT NULL DEFAULT 0
);

-- Workers that are there, as long as they say so every few seconds.
CREATE TABLE ruststream_worker (
	id TEXT NOT NULL PRIMARY KEY, -- host:pid:number
	subscription TEXT NOT NULL,
	started_at TEXT NOT NULL,
	seen_at TEXT NOT NULL,
	state TEXT NOT NULL           -- 'running', or 'broken: ..'
);

-- One row a subscription: what it is doing, in words and figures.
CREATE VIEW ruststream_status AS
SELECT s.name AS subscription, s.queue,
	CASE
		WHEN s.paused THEN 'paused'
		WHEN w.broken IS NOT NULL THEN w.broken
		WHEN w.workers > 0 THEN 'running'
		ELSE 'no worker'
	END AS state,
	ifnull(w.workers, 0) AS workers,
	s.workers AS workers_wanted,
	ifnull(c.acked, 0) AS delivered,
	ifnull(c.failed, 0) AS failed,
	(SELECT f.message FROM ruststream_failure AS f WHERE f.subscription = s.name
		ORDER BY f.number DESC LIMIT 1) AS last_error,
	(SELECT f.at FROM ruststream_failure AS f WHERE f.subscription = s.name
		ORDER BY f.number DESC LIMIT 1) AS last_error_at
FROM ruststream_subscription AS s
	LEFT JOIN ruststream_counter AS c ON c.subscription = s.name
	LEFT JOIN (
		SELECT subscription, count(*) AS workers,
			max(CASE WHEN state LIKE 'broken%' THEN state END) AS broken
		FROM ruststream_worker
		WHERE seen_at >= strftime('%Y-%m-%dT%H:%M:%S+00:00', 'now', '-30 seconds')
		GROUP BY subscription) AS w ON w.subscription = s.name;
