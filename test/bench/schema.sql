-- What both sides of the benchmark work on.  Run as role bench, who is no
-- superuser.
SELECT ruststream.create_queue('task');

-- Dead entries at the front of the index slow every claim down, above all the
-- clients': so vacuum as soon as it may, as one would for a busy queue.
ALTER TABLE task SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
	autovacuum_vacuum_cost_delay = 0);

-- One row a task done, stamped as it is written: the rates are read from here.
CREATE TABLE result (
	task bigint NOT NULL,
	amount int NOT NULL,
	at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE FUNCTION work(t task) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO result (task, amount) VALUES (t.id, (t.payload ->> 'amount')::int);
END $$;

SELECT ruststream.subscribe('task', 'task', 'work(task)');
SELECT ruststream.pause('task');

-- The same in the two other forms.
SELECT ruststream.create_queue('leased', form => 'lease');
SELECT ruststream.create_queue('keyed', form => 'advisory_lock', lock_key => 'tasks-{id}');
ALTER TABLE leased SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
	autovacuum_vacuum_cost_delay = 0);
ALTER TABLE keyed SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
	autovacuum_vacuum_cost_delay = 0);

CREATE FUNCTION work(t leased) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO result (task, amount) VALUES (t.id, (t.payload ->> 'amount')::int);
END $$;
CREATE FUNCTION work(t keyed) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO result (task, amount) VALUES (t.id, (t.payload ->> 'amount')::int);
END $$;

SELECT ruststream.subscribe('leased', 'leased', 'work(leased)');
SELECT ruststream.pause('leased');
SELECT ruststream.subscribe('keyed', 'keyed', 'work(keyed)');
SELECT ruststream.pause('keyed');
