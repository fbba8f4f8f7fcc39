# The lease and advisory lock lanes: for each, 200 times kill -9, spread over its
# named failure points, of a worker, of the heartbeat and of the postmaster.
# Afterwards every task has had exactly one effect, none is lost, and every claim
# that was committed has counted one attempt.  A row whose delivery died was claimed
# again not before its lease had ended, and, of the time in which the server
# accepted connections, within a poll interval after: in the advisory lock form
# after the crash itself.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamCrash;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $poll_interval = '100 ms';
my $slack = '60 s';       # for a busy machine to start workers and run them
my $lease = '1 s';

my @delivery_points = qw(after_begin_delivery after_handler after_rollback
  after_settle before_commit after_commit);
my @extension_points = qw(extension_due extension_announced extension_written
  extension_committed);
my @lanes = (
	{   queue => 'leased',
		form => "form => 'lease'",
		points => [ qw(after_claim after_claim_commit), @delivery_points, @extension_points ],
		process_kills => 14,
		postmaster_kills => 3 },
	{   queue => 'keyed',
		form => "form => 'advisory_lock', lock_key => 'tasks-{id}'",
		points => [ qw(after_lock after_take), @delivery_points, 'after_unlock' ],
		process_kills => 20,
		postmaster_kills => 3 });

my $crash = RuststreamCrash->new('lane_crash');
my $node = $crash->node;

sub ask
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# A trigger notes what is done to a row, in the transaction that does it: its
# claims, the extensions of its lease, and its return to the queue.
ask(<<'SQL');
CREATE TABLE event (
	n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	queue text, task bigint, what text, attempt integer, locked_until timestamptz, retry_after timestamptz,
	at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
	task record := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
	locked_until timestamptz := to_jsonb(task) ->> 'locked_until';
	what text := CASE WHEN TG_OP = 'DELETE' THEN 'ended' WHEN NEW.attempt <> OLD.attempt THEN 'claimed'
		WHEN locked_until IS NULL THEN 'returned' ELSE 'extended' END;
BEGIN
	INSERT INTO event (queue, task, what, attempt, locked_until, retry_after)
	VALUES (TG_TABLE_NAME, task.id, what, task.attempt, locked_until, task.retry_after);
	RETURN NULL;
END $$;
CREATE TABLE up (since timestamptz, until timestamptz);
SQL

# As in the row lock lane: a task's effect can be written once; of three tasks one
# is acked at once, one asks to be tried again and one raises an error on its first
# attempt, having written all the same.  Some outlive half their lease.
sub create_lane
{
	my ($lane) = @_;
	my $queue = $lane->{queue};

	ask(<<"SQL");
SELECT ruststream.create_queue('$queue', $lane->{form});
CREATE TRIGGER note AFTER UPDATE OR DELETE ON $queue FOR EACH ROW EXECUTE FUNCTION note();
CREATE TABLE ${queue}_published (id bigint);
CREATE TABLE ${queue}_effect (id bigint UNIQUE, attempt integer);
CREATE FUNCTION $queue(task $queue) RETURNS ruststream.outcome LANGUAGE plpgsql AS \$\$
BEGIN
	INSERT INTO ${queue}_effect VALUES (task.id, ruststream.attempt());
	PERFORM pg_sleep((task.payload ->> 'seconds')::float);
	IF ruststream.attempt() = 1 AND task.id % 3 = 1 THEN
		RETURN CASE WHEN task.id % 2 = 0 THEN ruststream.retry() ELSE ruststream.retry_after('1 ms') END;
	ELSIF ruststream.attempt() = 1 AND task.id % 3 = 2 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	RETURN ruststream.ack();
END \$\$;
SELECT ruststream.subscribe('$queue', '$queue', '$queue', workers => 4, lease => '$lease',
	poll_interval => '$poll_interval', retry_delay => '1 ms');
SQL
	return;
}

# Tasks that take so long, whenever there are few.  Each carries a time, which has
# what returns to the queue go before what is new.
sub publish
{
	my ($queue, $seconds, $few, $number) = @_;

	$crash->try_sql(<<"SQL");
WITH task AS (
	INSERT INTO $queue (payload, retry_after)
	SELECT '{"seconds": $seconds}', clock_timestamp() FROM generate_series(1, $number)
	WHERE (SELECT count(*) FROM (SELECT FROM $queue LIMIT $few) AS waiting) < $few
	RETURNING id)
INSERT INTO ${queue}_published SELECT id FROM task
SQL
	return;
}

sub run_lane
{
	my ($lane) = @_;
	my $queue = $lane->{queue};
	my $total = 0;

	create_lane($lane);
	foreach my $point (@{ $lane->{points} })
	{
		my $extension = $point =~ /^extension/;

		# A lease is extended at half its length.  No more such tasks than workers: each
		# that returns finds a worker.
		$crash->publish_by($extension ? sub { publish($queue, 0.7, 4, 1) }
			: sub { publish($queue, 0, 15, 30) });
		$total += $crash->kill_at($point, $lane->{process_kills}, $lane->{postmaster_kills},
			$extension ? 2 : 3);
	}
	cmp_ok($total, '>=', 200, "$queue: kills in all");
	note "$queue: $total kills in all";
	$crash->end_kills;
	wait_for_empty($node, $queue, "$queue: every task comes to its end");
	is(ask("SELECT state FROM ruststream.status WHERE subscription = '$queue'"), 'running',
		"$queue: the subscription is at work");
	ask("SELECT ruststream.pause('$queue')");
	return;
}

sub check_effects
{
	my ($queue) = @_;

	$crash->check_effects("${queue}_", 100);
	note "$queue: " . ask(
		"SELECT string_agg(what || ' ' || n, ', ' ORDER BY what) FROM (SELECT what, count(*) AS n FROM event"
		  . " WHERE queue = '$queue' GROUP BY what) AS counted");
	return;
}

sub check_attempts
{
	my ($queue) = @_;

	is(ask(<<"SQL"), '0', "$queue: each committed claim has counted one attempt, and nothing else has");
SELECT count(*) FROM (
	SELECT attempt, 1 + count(*) FILTER (WHERE what = 'claimed') OVER (PARTITION BY task ORDER BY n) AS counted
	FROM event WHERE queue = '$queue') AS e
WHERE attempt <> counted
SQL
	is(ask(<<"SQL"), '0', "$queue: a delivery read how many claims there were, its own included");
SELECT count(*) FROM ${queue}_effect AS e
JOIN (SELECT task, count(*) AS claims FROM event WHERE queue = '$queue' AND what = 'claimed' GROUP BY task) AS c
	ON c.task = e.id
WHERE e.attempt <> c.claims
SQL
	is(ask("SELECT count(*) FROM ${queue}_effect WHERE attempt = 1 AND id % 3 <> 0"), '0',
		"$queue: no first attempt that was to fail has acked");
	cmp_ok(ask("SELECT count(*) FROM ${queue}_effect WHERE attempt > CASE WHEN id % 3 = 0 THEN 1 ELSE 2 END"),
		'>', 0, "$queue: deliveries died after their claims");
	return;
}

# The settlement of a failure returns the row, records the failure, or does neither.
sub check_failures
{
	my ($queue) = @_;

	is(ask(<<"SQL"), '0', "$queue: every failure is recorded once, with its settlement, and no others");
WITH failed AS (
	SELECT r.task::text FROM event AS r
	WHERE r.queue = '$queue' AND r.what = 'returned' AND r.attempt = 2 AND r.task % 3 = 2),
recorded AS (
	SELECT id AS task FROM ruststream.failure
	WHERE subscription = '$queue' AND message = 'the first attempt fails')
SELECT (SELECT count(*) FROM ((TABLE failed EXCEPT ALL TABLE recorded) UNION ALL
	(TABLE recorded EXCEPT ALL TABLE failed)) AS differs)
	+ (SELECT count(*) FROM ruststream.failure WHERE subscription = '$queue'
		AND message <> 'the first attempt fails')
SQL
	return;
}

# A claim is due when the lease of the delivery before it ends, as the row said it
# last; without a lease at once.  What was returned by its settlement is due when
# that says so, but takes its place behind the rows that were due before, so
# nothing limits how long it waits.
sub check_redelivery
{
	my ($lane) = @_;
	my $queue = $lane->{queue};

	ask('TRUNCATE up; INSERT INTO up VALUES '
		  . join(', ', map { "('$_->[0]', '$_->[1]')" } $crash->intervals_up));
	ask(<<"SQL");
DROP TABLE IF EXISTS redelivery;
CREATE TABLE redelivery AS
SELECT task, n, died, due, at, extract(epoch FROM (
	SELECT sum(least(until, at) - greatest(since, due)) FROM up WHERE since < at AND until > due)) AS waited
FROM (
	SELECT task, n, what, at, before <> 'returned' AS died,
		greatest(CASE WHEN before = 'returned' THEN retry_after ELSE locked_until END, before_at) AS due
	FROM (
		SELECT task, n, what, at, lag(what) OVER w AS before, lag(at) OVER w AS before_at,
			lag(locked_until) OVER w AS locked_until, lag(retry_after) OVER w AS retry_after
		FROM event WHERE queue = '$queue' WINDOW w AS (PARTITION BY task ORDER BY n)) AS e) AS e
WHERE what = 'claimed' AND due IS NOT NULL
SQL
	note "$queue: " . ask(<<'SQL');
SELECT format('%s redeliveries after a death, waiting %s s at most, %s s in the middle', count(*),
	round(max(waited), 3), round(percentile_cont(0.5) WITHIN GROUP (ORDER BY waited)::numeric, 3))
FROM redelivery WHERE died
SQL
	cmp_ok(ask('SELECT count(*) FROM redelivery WHERE died'), '>', 50,
		"$queue: rows were delivered again after a death");
	is(ask("SELECT count(*) FROM redelivery WHERE at < due"), '0',
		"$queue: nothing is delivered again before it is due");
	is( ask("SELECT coalesce(string_agg(format('%s: %s s', task, waited), ', '), '') FROM redelivery"
			  . " WHERE died AND waited > extract(epoch FROM interval '$poll_interval' + interval '$slack')"),
		'', "$queue: what died is delivered again within a poll interval after it is due");
	return;
}

foreach my $lane (@lanes)
{
	run_lane($lane);
	check_effects($lane->{queue});
	check_attempts($lane->{queue});
	check_failures($lane->{queue});
	check_redelivery($lane);
}
is(ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', 'no key is left locked');

$node->stop;
done_testing();
