-- What `ruststream install` makes in a database of MySQL or MariaDB.
--
-- Queues and subscriptions are rows of ordinary tables, so describing, subscribing, pausing and
-- looking work in SQL as well as by the command line.  Times are in UTC; flags are 0 and 1; delays
-- are milliseconds.  Statements that make tables commit: each may be run again, and the version
-- comes last.
--
-- What differs from an earlier version is made there by upgrade_mysql_N.sql, to the same effect: so a
-- new column is the last one of its table.

CREATE TABLE IF NOT EXISTS ruststream_version (
	version INT NOT NULL PRIMARY KEY
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Which columns of a table play which roles.
CREATE TABLE IF NOT EXISTS ruststream_queue (
	name VARCHAR(64) NOT NULL PRIMARY KEY COMMENT 'the table',
	id_column VARCHAR(64) NOT NULL,
	group_column VARCHAR(64),
	priority_column VARCHAR(64),
	partition_key_column VARCHAR(64),
	retry_after_column VARCHAR(64),
	attempt_column VARCHAR(64),
	processed_at_column VARCHAR(64),
	locked_until_column VARCHAR(64) COMMENT 'the lease form',
	headers_column VARCHAR(64),
	payload_column VARCHAR(64),
	fifo TINYINT NOT NULL DEFAULT 0 CHECK (fifo IN (0, 1)),
	lock_key VARCHAR(700) COMMENT 'or the advisory lock form; neither: the row lock form',
	isolation VARCHAR(20) CHECK (isolation IN ('read uncommitted', 'read committed', 'repeatable read', 'serializable')),
	mode VARCHAR(20),
	CONSTRAINT `only SQLite has transaction modes` CHECK (mode IS NULL),
	CONSTRAINT `a queue cannot have both a lease column and a lock key`
		CHECK (locked_until_column IS NULL OR lock_key IS NULL)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Who delivers a queue's rows, and how.
CREATE TABLE IF NOT EXISTS ruststream_subscription (
	name VARCHAR(190) NOT NULL PRIMARY KEY,
	queue VARCHAR(64) NOT NULL,
	handler TEXT COMMENT 'a stored procedure, or SQL',
	program TEXT COMMENT 'or a command for /bin/sh; neither: a callback of a program of yours',
	group_name VARCHAR(700) COMMENT 'the name, unless given',
	transactional VARCHAR(3) CHECK (transactional IN ('on', 'off')),
	workers INT NOT NULL DEFAULT 1 CHECK (workers BETWEEN 0 AND 64),
	max_attempts INT CHECK (max_attempts >= 1),
	dead_letter VARCHAR(700) COMMENT 'a group, or a table where the queue has no groups',
	on_error VARCHAR(20) CHECK (on_error IN ('retry', 'retry_after', 'discard', 'dead_letter')),
	on_decode_error VARCHAR(20) CHECK (on_decode_error IN ('retry', 'retry_after', 'discard', 'dead_letter')),
	decode VARCHAR(20) NOT NULL DEFAULT 'any' CHECK (decode IN ('any', 'text', 'json')),
	retry_delay_ms BIGINT NOT NULL DEFAULT 1000 CHECK (retry_delay_ms >= 0),
	backoff VARCHAR(20) NOT NULL DEFAULT 'exponential' CHECK (backoff IN ('constant', 'linear', 'exponential')),
	max_retry_delay_ms BIGINT NOT NULL DEFAULT 3600000 CHECK (max_retry_delay_ms >= 0),
	lease_ms BIGINT NOT NULL DEFAULT 30000 CHECK (lease_ms > 0),
	timeout_ms BIGINT CHECK (timeout_ms > 0),
	poll_interval_ms BIGINT NOT NULL DEFAULT 1000 CHECK (poll_interval_ms > 0),
	paused TINYINT NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
	batch_size INT COMMENT 'the handler takes so many rows at once' CHECK (batch_size BETWEEN 1 AND 10000),
	CONSTRAINT `a subscription has a handler or a program, not both`
		CHECK (handler IS NULL OR program IS NULL),
	CONSTRAINT `batches are not transactional: leave out one of the two`
		CHECK (batch_size IS NULL OR transactional IS NULL OR transactional <> 'on'),
	FOREIGN KEY (queue) REFERENCES ruststream_queue (name)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The newest failures of each subscription, 1,000 at most.
CREATE TABLE IF NOT EXISTS ruststream_failure (
	number BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
	at DATETIME(6) NOT NULL,
	subscription VARCHAR(190) NOT NULL,
	queue VARCHAR(64) NOT NULL,
	id VARCHAR(768),
	attempt BIGINT,
	`sqlstate` VARCHAR(24),
	message TEXT NOT NULL,
	hint TEXT,
	KEY ruststream_failure_subscription (subscription, number)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What each subscription has done; a worker adds its share once a second.
CREATE TABLE IF NOT EXISTS ruststream_counter (
	subscription VARCHAR(190) NOT NULL PRIMARY KEY,
	acked BIGINT NOT NULL DEFAULT 0,
	retried BIGINT NOT NULL DEFAULT 0,
	`delayed` BIGINT NOT NULL DEFAULT 0,
	discarded BIGINT NOT NULL DEFAULT 0,
	dead_lettered BIGINT NOT NULL DEFAULT 0,
	failed BIGINT NOT NULL DEFAULT 0,
	lease_lost BIGINT NOT NULL DEFAULT 0,
	transient BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Workers that are there, as long as they say so every few seconds.
CREATE TABLE IF NOT EXISTS ruststream_worker (
	id VARCHAR(190) NOT NULL PRIMARY KEY COMMENT 'host:pid:number',
	subscription VARCHAR(190) NOT NULL,
	started_at DATETIME(6) NOT NULL,
	seen_at DATETIME(6) NOT NULL,
	state VARCHAR(1024) NOT NULL COMMENT 'running, or broken: ..'
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row a subscription: what it is doing, in words and figures.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW ruststream_status AS
SELECT s.name AS subscription, s.queue,
	CASE
		WHEN s.paused <> 0 THEN 'paused'
		WHEN w.broken IS NOT NULL THEN w.broken
		WHEN w.workers > 0 THEN 'running'
		ELSE 'no worker'
	END AS state,
	COALESCE(w.workers, 0) AS workers,
	s.workers AS workers_wanted,
	COALESCE(c.acked, 0) AS delivered,
	COALESCE(c.failed, 0) AS failed,
	(SELECT f.message FROM ruststream_failure AS f WHERE f.subscription = s.name
		ORDER BY f.number DESC LIMIT 1) AS last_error,
	(SELECT f.at FROM ruststream_failure AS f WHERE f.subscription = s.name
		ORDER BY f.number DESC LIMIT 1) AS last_error_at
FROM ruststream_subscription AS s
	LEFT JOIN ruststream_counter AS c ON c.subscription = s.name
	LEFT JOIN (
		SELECT subscription, COUNT(*) AS workers,
			MAX(CASE WHEN state LIKE 'broken%' THEN state END) AS broken
		FROM ruststream_worker
		WHERE seen_at >= UTC_TIMESTAMP() - INTERVAL 30 SECOND
		GROUP BY subscription) AS w ON w.subscription = s.name;

-- The steps to later versions follow: where an installation of an earlier version was broken off, its tables
-- are kept above and are brought up to date like those of a whole one.
INSERT IGNORE INTO ruststream_version VALUES (1);
