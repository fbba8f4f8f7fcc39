-- From version 1 to 2: batches.
--
-- ALTER TABLE is done as a whole or not at all, and commits by itself.  An upgrade that was broken off
-- behind it finds the column, and so does the installation of new tables.

SET @ruststream_step = IF(
	(SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()
		AND table_name = 'ruststream_subscription' AND column_name = 'batch_size') > 0,
	'DO 0',
	'ALTER TABLE ruststream_subscription
		ADD COLUMN batch_size INT COMMENT ''the handler takes so many rows at once'' CHECK (batch_size BETWEEN 1 AND 10000),
		ADD CONSTRAINT `batches are not transactional: leave out one of the two`
			CHECK (batch_size IS NULL OR transactional IS NULL OR transactional <> ''on'')');
PREPARE ruststream_step FROM @ruststream_step;
EXECUTE ruststream_step;
DEALLOCATE PREPARE ruststream_step;

INSERT IGNORE INTO ruststream_version VALUES (2);
