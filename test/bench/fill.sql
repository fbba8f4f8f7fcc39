-- A full queue and an empty result, both as a vacuumed and analyzed table is;
-- and nothing left over for the checkpointer.
TRUNCATE :queue, result;
INSERT INTO :queue (payload) SELECT jsonb_build_object('amount', i) FROM generate_series(1, :rows) AS i;
VACUUM (ANALYZE) :queue, result;
