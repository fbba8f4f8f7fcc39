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

SELECT ruststream.subscribe('bench', 'task', 'work', workers => 1);
SELECT ruststream.pause('bench');
