-- From version 1 to 2, in one transaction: batches; and a ruststream_wake() that gives no notice.

ALTER TABLE public.ruststream_subscription
	ADD COLUMN batch_size integer CHECK (batch_size BETWEEN 1 AND 10000),
	ADD CONSTRAINT "batches are not transactional: leave out one of the two"
		CHECK (batch_size IS NULL OR transactional IS DISTINCT FROM 'on');

CREATE OR REPLACE FUNCTION public.ruststream_wake(queue text, wake boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF EXISTS (SELECT 1 FROM pg_catalog.pg_trigger AS t WHERE t.tgname OPERATOR(pg_catalog.=) 'ruststream_notify'
		AND t.tgrelid OPERATOR(pg_catalog.=) queue::pg_catalog.regclass::pg_catalog.oid) THEN
		EXECUTE pg_catalog.format('DROP TRIGGER ruststream_notify ON %s', queue::pg_catalog.regclass);
	END IF;
	IF wake THEN
		EXECUTE pg_catalog.format('CREATE TRIGGER ruststream_notify AFTER INSERT ON %s'
			' FOR EACH STATEMENT EXECUTE FUNCTION public.ruststream_notify()', queue::pg_catalog.regclass);
	END IF;
END
$$;

UPDATE public.ruststream_version SET version = 2;
