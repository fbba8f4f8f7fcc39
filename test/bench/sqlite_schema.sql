-- A lease queue of as many rows as :rows says, for the client's benchmark.
PRAGMA journal_mode = wal;
DROP TABLE IF EXISTS jobs;
DROP TABLE IF EXISTS effect;
CREATE TABLE jobs (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER, locked_until TEXT);
CREATE TABLE effect (job INTEGER, payload TEXT);
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows)
INSERT INTO jobs (payload) SELECT '{"n": ' || i || '}' FROM n;
