-- Batches: the handler takes rows as one array, and writes all results by one
-- statement.  On the queue of the row lock form.
CREATE FUNCTION work_batch(tasks task[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO result (task, amount) SELECT t.id, (t.payload ->> 'amount')::int FROM unnest(tasks) AS t;
END $$;

SELECT ruststream.subscribe('batch', 'task', 'work_batch', batch_size => 1);
SELECT ruststream.pause('batch');
