-- What both sides of the benchmark work on.  Run as role bench, who is no
-- superuser.
SELECT ruststream.create_queue('task');

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
