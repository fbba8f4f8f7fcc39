-- Subscriptions: what subscribe accepts and refuses, what may be changed and
-- by whom, and what the views show to whom.  No worker takes part.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS ruststream;
CREATE ROLE sub_owner LOGIN;
CREATE ROLE sub_member LOGIN IN ROLE sub_owner;
CREATE ROLE sub_stranger LOGIN;
CREATE ROLE sub_monitor LOGIN IN ROLE pg_monitor;
CREATE SCHEMA sub_test AUTHORIZATION sub_owner;
GRANT USAGE ON SCHEMA sub_test TO sub_stranger, sub_monitor;
RESET client_min_messages;
SET search_path = sub_test;

CREATE FUNCTION refused(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    message text; code text; detail text; hint text;
BEGIN
    EXECUTE statement;
    RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, code = RETURNED_SQLSTATE,
        detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN format(E'%s %s%s\n-> %s', code, regexp_replace(message, 'pg_temp_\d+', 'pg_temp'),
        E'\n   ' || nullif(regexp_replace(detail, 'as ' || session_user, 'as a superuser'), ''), hint);
END $$;

-- A subscription's settings that differ from those of one with the defaults.
CREATE FUNCTION settings(subscription text) RETURNS text LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT string_agg(s.key || '=' || s.value, ' ' ORDER BY s.key)
    FROM ruststream.subscription AS r,
        jsonb_each_text(to_jsonb(r) - '{id,name,queue,handler_oid,owner,database,system_identifier}'::text[]) AS s
    WHERE r.name = subscription AND s.value IS NOT NULL
      AND (s.key, s.value) NOT IN (VALUES ('backoff', 'exponential'), ('lease', '00:00:30'),
          ('deliveries_per_commit', '1'), ('max_commit_wait', '00:00:00.01'),
          ('max_retry_delay', '01:00:00'), ('poll_interval', '00:00:01'),
          ('retry_delay', '00:00:01'), ('paused', 'false'))
$$;

SET ROLE sub_owner;
SELECT ruststream.create_queue('jobs');
SELECT ruststream.create_queue('mail', groups => true);
CREATE TABLE dead_jobs (LIKE jobs);

CREATE FUNCTION handle(job jobs) RETURNS ruststream.outcome LANGUAGE sql AS 'SELECT ruststream.ack()';
CREATE FUNCTION handle(job jsonb) RETURNS ruststream.outcome LANGUAGE sql AS 'SELECT ruststream.ack()';
CREATE FUNCTION note(job jsonb, d ruststream.delivery) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';

--
-- The outcomes, inlined: nothing of a user's path is needed
--
SELECT ruststream.ack();
SELECT ruststream.retry('later');
SELECT ruststream.retry_after('5 min', 'busy'), ruststream.retry_after(NULL);
SELECT ruststream.discard(), ruststream.dead_letter('why not');
EXPLAIN (VERBOSE, COSTS OFF) SELECT ruststream.retry_after('1 s'::interval * n) FROM generate_series(1, 2) AS n;
SELECT ruststream.attempt(), ruststream.delivery();

--
-- Subscribing
--
SELECT ruststream.subscribe('plain', 'jobs', 'note', workers => 0);
SELECT settings('plain');
SELECT ruststream.subscribe('full', 'mail', 'sub_test.handle(jsonb)', group_name => 'bulk',
    transactional => true, workers => 0, max_attempts => 3, dead_letter => 'bulk failures',
    on_error => 'retry', on_decode_error => 'discard', retry_delay => '0',
    backoff => 'linear', max_retry_delay => '1 month', lease => '0.5 s', poll_interval => '10 ms',
    max_commit_wait => '0');
SELECT settings('full');
SELECT ruststream.subscribe('to table', 'jobs', 'note', workers => 0, dead_letter => 'dead_jobs');
SELECT settings('to table');

-- Two subscriptions may share a group.
SELECT ruststream.subscribe('full too', 'mail', 'handle(jsonb)', group_name => 'bulk', workers => 0);

-- An existing name is replaced, its settings by the defaults.
SELECT ruststream.subscribe('full too', 'jobs', 'handle(jsonb)', workers => 0);
SELECT settings('full too');
SELECT count(*) FROM ruststream.status WHERE subscription = 'full too';
SELECT ruststream.unsubscribe('full too');

--
-- What is refused
--
CREATE TABLE bare (id int PRIMARY KEY);
SELECT ruststream.attach_queue('bare', 'id');
CREATE TABLE dead_bare (id int, extra text NOT NULL);
CREATE TABLE dead_other (id bigint);
CREATE TEMP TABLE dead_temp (id int);
CREATE TABLE slow (id int PRIMARY KEY, prio int);
SET client_min_messages = warning;
SELECT ruststream.attach_queue('slow', 'id', priority_column => 'prio');
RESET client_min_messages;
CREATE FUNCTION on_bare(bare) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION on_slow(slow) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
SELECT ruststream.create_queue('leased', form => 'lease');
SELECT ruststream.create_queue('leased_rr', form => 'lease', isolation => 'repeatable read');
SELECT ruststream.create_queue('keyed', form => 'advisory_lock', lock_key => '{id}');
SELECT ruststream.create_queue('ordered', groups => true, fifo => true);
SELECT ruststream.create_queue('keys', partition_key => true);
CREATE FUNCTION takes_number(numeric) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION answers_text(jsonb) RETURNS text LANGUAGE sql AS 'SELECT $1::text';
CREATE PROCEDURE proc(jsonb) LANGUAGE sql AS '';

SELECT refused(format('SELECT ruststream.subscribe(%s)', a)) FROM (VALUES
    ($$NULL, 'jobs', 'note'$$),
    ($$'a', NULL, 'note'$$),
    ($$'a', 'jobs', NULL$$),
    ($$'', 'jobs', 'note'$$),
    ($$repeat('x', 64), 'jobs', 'note'$$),
    ($$'a', 'dead_jobs', 'note'$$),
    ($$'a', 'jobs', 'nothing'$$),
    ($$'a', 'jobs', 'handle'$$),
    ($$'a', 'jobs', 'takes_number'$$),
    ($$'a', 'jobs', 'answers_text'$$),
    ($$'a', 'jobs', 'proc'$$),
    ($$'a', 'bare', 'note'$$),
    ($$'a', 'jobs', 'note', group_name => 'g'$$),
    ($$'a', 'jobs', 'note', workers => -1$$),
    ($$'a', 'jobs', 'note', max_attempts => 3$$),
    ($$'a', 'jobs', 'note', max_attempts => 0, dead_letter => 'dead_jobs'$$),
    ($$'a', 'bare', 'on_bare', max_attempts => 1, dead_letter => 'dead_bare'$$),
    ($$'a', 'bare', 'on_bare', dead_letter => 'dead_other'$$),
    ($$'a', 'bare', 'on_bare', dead_letter => 'dead_temp'$$),
    ($$'a', 'bare', 'on_bare', dead_letter => 'bare'$$),
    ($$'a', 'bare', 'on_bare', dead_letter => 'missing'$$),
    ($$'a', 'jobs', 'note', dead_letter => 'dead_other'$$),
    ($$'a', 'mail', 'note', dead_letter => 'a'$$),
    ($$'a', 'jobs', 'note', on_error => 'ack'$$),
    ($$'a', 'jobs', 'note', on_error => 'dead_letter'$$),
    ($$'a', 'jobs', 'note', on_decode_error => 'explode'$$),
    ($$'a', 'jobs', 'note', backoff => 'random'$$),
    ($$'a', 'jobs', 'note', retry_delay => '-1 s'$$),
    ($$'a', 'jobs', 'note', retry_delay => '1000 years'$$),
    ($$'a', 'jobs', 'note', poll_interval => '0'$$),
    ($$'a', 'jobs', 'note', lease => '0'$$),
    ($$'a', 'slow', 'on_slow'$$),
    ($$'a', 'leased_rr', 'note'$$),
    ($$'a', 'mail', 'note', group_name => '*'$$),
    ($$'a', 'jobs', 'proc', transactional => false$$),
    ($$'a', 'leased', 'proc'$$),
    ($$'a', 'jobs', 'note', timeout => '0'$$),
    ($$'a', 'jobs', 'note', deliveries_per_commit => 0$$),
    ($$'a', 'jobs', 'note', max_commit_wait => '61 s'$$),
    ($$'a', 'jobs', 'note', batch_size => 10, deliveries_per_commit => 2$$),
    ($$'a', 'leased', 'note', deliveries_per_commit => 2, max_attempts => 3, dead_letter => 'dead_jobs'$$),
    ($$'a', 'keyed', 'note', deliveries_per_commit => 2$$)
) AS v (a);

-- Once there is the index, the slow one is served.
CREATE INDEX ON slow (prio NULLS FIRST, id);
SELECT ruststream.subscribe('slow', 'slow', 'on_slow', workers => 0);

-- At these levels deliveries meet.
SELECT ruststream.create_queue('strict', isolation => 'serializable');
SELECT ruststream.subscribe('strict', 'strict', 'note', workers => 0);

--
-- Rights
--
-- A stranger needs each right on the table, and the handler.
RESET ROLE;
CREATE FUNCTION private(jsonb) RETURNS void LANGUAGE sql AS '';
REVOKE EXECUTE ON FUNCTION private FROM PUBLIC;
SET ROLE sub_stranger;
SELECT refused($$SELECT ruststream.subscribe('mine', 'jobs', 'note', workers => 0)$$);
SET ROLE sub_owner;
GRANT SELECT, UPDATE ON jobs TO sub_stranger;
SET ROLE sub_stranger;
SELECT refused($$SELECT ruststream.subscribe('mine', 'jobs', 'note', workers => 0)$$);
SET ROLE sub_owner;
GRANT DELETE ON jobs TO sub_stranger;
SET ROLE sub_stranger;
SELECT refused($$SELECT ruststream.subscribe('mine', 'jobs', 'private', workers => 0)$$);
SELECT refused($$SELECT ruststream.subscribe('mine', 'jobs', 'note', workers => 0, dead_letter => 'dead_jobs')$$);
SELECT ruststream.subscribe('mine', 'jobs', 'note', workers => 0);
-- Other people's subscriptions
SELECT refused($$SELECT ruststream.subscribe('plain', 'jobs', 'note', workers => 0)$$);
SELECT refused($$SELECT ruststream.alter_subscription('plain', workers => 1)$$);
SELECT refused($$SELECT ruststream.pause('plain')$$);
SELECT refused($$SELECT ruststream.resume('plain')$$);
SELECT refused($$SELECT ruststream.unsubscribe('plain')$$);
-- of one's own a member may do everything
SET ROLE sub_member;
SELECT ruststream.pause('plain');
SELECT ruststream.resume('plain');
SELECT ruststream.alter_subscription('plain', retry_delay => '2 s');
SELECT settings('plain');

-- A superuser stays away from other people's tables.
RESET ROLE;
SELECT refused($$SELECT ruststream.subscribe('root', 'jobs', 'note', workers => 0)$$);
-- but may change the settings, which leaves the owner alone.
SELECT ruststream.alter_subscription('plain', retry_delay => '1 s');
SELECT settings('plain');

--
-- Changing
--
SET ROLE sub_owner;
SELECT ruststream.alter_subscription('full', workers => NULL, max_attempts => 7, dead_letter => 'elsewhere',
    reset => '{group_name,on_error,retry_delay,max_retry_delay,lease}');
SELECT settings('full');
SELECT ruststream.alter_subscription('to table', reset => '{dead_letter}', handler => 'handle(jobs)');
SELECT settings('to table');
SELECT refused($$SELECT ruststream.alter_subscription('full', reset => '{dead_letter}')$$);
SELECT refused($$SELECT ruststream.alter_subscription('full', reset => '{handler}')$$);
SELECT refused($$SELECT ruststream.alter_subscription('full', reset => ARRAY[NULL])$$);
SELECT refused($$SELECT ruststream.alter_subscription('full', dead_letter => 'full')$$);
SELECT refused($$SELECT ruststream.alter_subscription('full', on_error => 'sometimes')$$);
SELECT refused($$SELECT ruststream.alter_subscription('none', workers => 1)$$);
SELECT refused($$SELECT ruststream.alter_subscription(NULL)$$);
SELECT refused($$SELECT ruststream.unsubscribe('none')$$);
SELECT settings('full');

--
-- Seeing
--
INSERT INTO jobs (payload) SELECT to_jsonb(n) FROM generate_series(1, 3) AS n;
INSERT INTO jobs (payload, retry_after) VALUES ('4', now() + interval '1 day');
INSERT INTO mail (group_name, payload) VALUES ('full', '1'), ('elsewhere', '1'), ('elsewhere', '2'), ('nobody', '1');
SELECT ruststream.pause('slow');
SELECT subscription, queue, owner, state, workers, workers_wanted, ready, waiting, in_work, dead, capped,
    delivered, failed, last_error
FROM ruststream.status ORDER BY 1;
SELECT queue, subscriptions, ready, waiting, in_work, dead, capped FROM ruststream.stat_queue
ORDER BY queue::text COLLATE "C";
SELECT subscription, queue, owner, workers, deliveries, failed FROM ruststream.stat_subscription ORDER BY 1;
SELECT count(*) AS workers FROM ruststream.stat_worker;
SELECT count(*) AS deliveries FROM ruststream.delivery_in_work;

-- A broken one shows its reason and fails nobody else's row.
ALTER TABLE slow RENAME COLUMN prio TO priority;
DROP FUNCTION on_bare, handle(jobs);
SELECT refused($$SELECT ruststream.resume('slow')$$);
SELECT subscription, state, ready FROM ruststream.status ORDER BY 1;
SELECT refused($$SELECT ruststream.alter_subscription('to table', poll_interval => '2 s')$$);
-- mended by a new handler
SELECT ruststream.alter_subscription('to table', handler => 'note');
SELECT subscription, state, ready FROM ruststream.status WHERE subscription = 'to table';

-- A stranger sees what is his; a monitor sees figures, and no text of errors.
SET ROLE sub_stranger;
SELECT subscription, state, ready FROM ruststream.status ORDER BY 1;
SELECT count(*) FROM generate_series(1, 1000) AS id, ruststream.internal_depth(id) AS d WHERE d.ready IS NOT NULL;
SET ROLE sub_monitor;
SELECT subscription, state, ready FROM ruststream.status ORDER BY 1;
SELECT count(*) FROM ruststream.stat_queue;
SELECT count(*) FROM ruststream.failure;
RESET ROLE;

-- Failures are shown to members of the owner only, newest last.
INSERT INTO ruststream.failure_history (at, subscription_id, subscription, queue, row_id, attempt, sqlstate, message, hint)
SELECT now(), id, name, queue, n::text, n, 'P0001', 'failure ' || n, 'a hint'
FROM ruststream.subscription, generate_series(1, 2) AS n WHERE name IN ('plain', 'mine');
SET ROLE sub_owner;
SELECT subscription, queue, id, attempt, sqlstate, message, detail, hint, context FROM ruststream.failure;
SELECT subscription, last_error FROM ruststream.status WHERE last_error IS NOT NULL;
SET ROLE sub_monitor;
SELECT count(*) FROM ruststream.failure;
SELECT count(*) FROM ruststream.status WHERE last_error IS NOT NULL;
SET ROLE sub_stranger;
SELECT subscription, message FROM ruststream.failure;
-- They go with the subscription.
SELECT ruststream.unsubscribe('mine');
RESET ROLE;
SELECT DISTINCT subscription FROM ruststream.failure_history;

-- The plan is the contract's.
SELECT form, transactional, outcome, string_agg(action, ', ' ORDER BY step) AS steps
FROM ruststream.transaction_plan GROUP BY form, transactional, outcome ORDER BY form, transactional DESC, outcome;

--
-- Copies: what was made in another database is quiet until it is resumed here
--
SET ROLE sub_owner;
SELECT ruststream.unsubscribe('slow'), ruststream.unsubscribe('strict'), ruststream.unsubscribe('to table');
RESET ROLE;
UPDATE ruststream.subscription SET database = 1, owner = 1;
SET ROLE sub_owner;
SELECT subscription, owner, state, ready FROM ruststream.status ORDER BY 1;
SELECT refused($$SELECT ruststream.alter_subscription('plain', workers => 1)$$);
SET ROLE sub_stranger;
SELECT refused($$SELECT ruststream.resume('plain')$$);
SELECT count(*) FROM ruststream.status;
SET ROLE sub_owner;
SELECT ruststream.resume('plain');
SELECT subscription, owner, state, ready FROM ruststream.status ORDER BY 1;
RESET ROLE;
UPDATE ruststream.subscription SET owner_name = 'sub_nobody' WHERE name = 'full';
SELECT subscription, owner, state FROM ruststream.status WHERE subscription = 'full';
-- The table's owner, too, can do something about it.
SET ROLE sub_owner;
SELECT refused($$SELECT ruststream.resume('full')$$);
SELECT ruststream.subscribe('full', 'mail', 'handle(jsonb)', workers => 0);
SELECT subscription, owner, state FROM ruststream.status ORDER BY 1;

--
-- The end
--
SELECT ruststream.detach_queue('mail');
DROP TABLE jobs CASCADE;
SELECT count(*) FROM ruststream.status;
RESET ROLE;
SELECT count(*) AS subscriptions FROM ruststream.subscription;
SELECT count(*) AS failures FROM ruststream.failure_history;
SET client_min_messages = warning;
DROP FUNCTION private;
DROP OWNED BY sub_owner, sub_stranger CASCADE;
DROP ROLE sub_owner, sub_member, sub_stranger, sub_monitor;
