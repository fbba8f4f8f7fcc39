-- From version 1 to 2, in one transaction: batches.

ALTER TABLE ruststream_subscription ADD COLUMN batch_size INTEGER
	CHECK (batch_size BETWEEN 1 AND 10000)
	CONSTRAINT "batches are not transactional: leave out one of the two"
		CHECK (batch_size IS NULL OR transactional IS NOT 'on');

UPDATE ruststream_version SET version = 2;
