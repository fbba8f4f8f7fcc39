# Batches in workers: several of them, many batches, no row lost or handled twice;
# what a stop or a death in the middle of a batch leaves of all its rows; and the
# leases of batches, of which a server has so many.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('batch', conf => <<'CONF');
restart_after_crash = on
ruststream.crash_restart_delay = 100ms
ruststream.batch_leases = 40
CONF

sub ask
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

my %queues = (
	locked => '',
	leased => ", form => 'lease'",
	keyed => ", form => 'advisory_lock', lock_key => 'jobs-{id}'");

# ------------------------------------------------------- many batches, many workers

# Rows say what is to become of them; the first attempt of some is not the last.
ask('CREATE TABLE handled (queue text, id bigint, attempt integer, size integer)');
foreach my $queue (sort keys %queues)
{
	ask(<<"SQL");
SELECT ruststream.create_queue('$queue'$queues{$queue});
CREATE TABLE dead_$queue (LIKE $queue);
CREATE FUNCTION $queue(jobs ${queue}[], d ruststream.delivery[]) RETURNS ruststream.outcome[] LANGUAGE plpgsql AS \$\$
BEGIN
	INSERT INTO handled SELECT '$queue', t.id::bigint, t.attempt, cardinality(jobs) FROM unnest(d) AS t;
	RETURN (SELECT array_agg(CASE WHEN t.attempt > 1 OR j.id % 5 > 2 THEN ruststream.ack()
			WHEN j.id % 5 = 0 THEN ruststream.retry()
			WHEN j.id % 5 = 1 THEN ruststream.retry_after('1 ms')
			ELSE ruststream.dead_letter() END ORDER BY ordinality)
		FROM unnest(jobs) WITH ORDINALITY AS j JOIN unnest(d) WITH ORDINALITY AS t USING (ordinality));
END \$\$;
SELECT ruststream.subscribe('$queue', '$queue', '$queue', workers => 3, batch_size => 17, dead_letter => 'dead_$queue',
	poll_interval => '100 ms', retry_delay => '10 ms');
SQL
}
foreach my $queue (sort keys %queues)
{
	# in many transactions, and many rows at once
	ask("INSERT INTO $queue (payload) SELECT NULL;" x 100);
	ask("INSERT INTO $queue (payload) SELECT NULL FROM generate_series(1, 2000)");
}
foreach my $queue (sort keys %queues)
{
	wait_for_empty($node, $queue, "$queue: every row comes to its end");
	is(ask("SELECT count(*), count(DISTINCT id) FROM handled WHERE queue = '$queue' AND attempt = 1"), '2100|2100',
		"$queue: each was handled once");
	is(ask("SELECT count(*), count(DISTINCT id), min(attempt), max(attempt) FROM handled WHERE queue = '$queue' AND attempt > 1"),
		'840|840|2|2', "$queue: and once more, where it was to be tried again");
	is(ask("SELECT count(*), count(DISTINCT id), count(*) FILTER (WHERE id % 5 = 2) FROM dead_$queue"), '420|420|420',
		"$queue: the dead letters are there");
	cmp_ok(ask("SELECT max(size) FROM handled WHERE queue = '$queue'"), '==', 17, "$queue: in whole batches");
	is(ask("SELECT deliveries, acked, retried, delayed, dead_lettered, failed FROM ruststream.stat_subscription"
			  . " WHERE subscription = '$queue'"), '2940|1680|420|420|420|0', "$queue: the counters count rows");
}
is(ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', 'no key is left locked');

# ------------------------------------------------------------ stops in the middle

# The first time, it never comes to an end.
ask('TRUNCATE handled');
foreach my $queue (sort keys %queues)
{
	ask(<<"SQL");
CREATE FUNCTION slow_$queue(jobs ${queue}[]) RETURNS void LANGUAGE plpgsql AS \$\$
BEGIN
	INSERT INTO handled SELECT '$queue', j.id, j.attempt, cardinality(jobs) FROM unnest(jobs) AS j;
	WHILE EXISTS (SELECT FROM wait) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
END \$\$;
SELECT ruststream.alter_subscription('$queue', handler => 'slow_$queue', workers => 1);
SQL
}
ask('CREATE TABLE wait (); INSERT INTO wait DEFAULT VALUES');

sub start_slow
{
	my ($queue) = @_;
	ask("TRUNCATE handled, $queue RESTART IDENTITY; INSERT INTO wait DEFAULT VALUES");
	ask("INSERT INTO $queue (payload) SELECT NULL FROM generate_series(1, 8)");
	wait_for($node, "SELECT count(*) = 1 FROM ruststream.delivery_in_work WHERE subscription = '$queue'",
		"$queue: a batch is in work");
	is(ask("SELECT id FROM ruststream.delivery_in_work WHERE subscription = '$queue'"), '1',
		"$queue: it is shown by its first row");
	is(ask("SELECT ready, in_work FROM ruststream.status WHERE subscription = '$queue'"), '0|8',
		"$queue: and counted by all of them");
	return ask("SELECT pid FROM ruststream.delivery_in_work WHERE subscription = '$queue'");
}

my %attempt_after = (locked => 1, leased => 2, keyed => 2);
foreach my $queue (sort keys %queues)
{
	wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'ruststream: $queue'",
		"$queue: one worker");
	my $pid = start_slow($queue);
	ask('DELETE FROM wait');
	wait_for_empty($node, $queue, "$queue: a batch that comes to its end");
	$pid = start_slow($queue);
	ask("SELECT pg_terminate_backend($pid, 60000); DELETE FROM wait");
	wait_for_empty($node, $queue, "$queue: a terminated worker gives all its rows back at once");
	is(ask("SELECT count(*), count(DISTINCT id), min(attempt) FROM handled WHERE queue = '$queue'"),
		"8|8|$attempt_after{$queue}", "$queue: its writes are undone");
}

# Dead, not stopped: what a session held ends with it, leases do not.
foreach my $queue (sort keys %queues)
{
	my $pid = start_slow($queue);
	kill 'KILL', $pid;
	wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'ruststream: $queue'",
		'the server is back');
	if ($queue eq 'leased')
	{
		is(ask('SELECT count(*), min(attempt), count(*) FILTER (WHERE locked_until > now()) FROM leased'), '8|2|8',
			'leased: a killed worker leaves its leases');
		ask('UPDATE leased SET locked_until = now()');
	}
	ask('DELETE FROM wait');
	wait_for_empty($node, $queue, "$queue: and another batch has the rows");
	is(ask("SELECT count(*), count(DISTINCT id) FROM handled WHERE queue = '$queue'"), '8|8',
		"$queue: each with one effect");
}

# ----------------------------------------------------------------- leases of batches

# There are 40 beside one for each worker: what cannot be extended is not claimed.
ask("SELECT ruststream.alter_subscription('leased', batch_size => 100)");
ask('TRUNCATE handled, leased; INSERT INTO wait DEFAULT VALUES');
ask('INSERT INTO leased (payload) SELECT NULL FROM generate_series(1, 100)');
wait_for($node, "SELECT count(*) = 1 FROM ruststream.delivery_in_work WHERE subscription = 'leased'",
	'a batch is in work');
is(ask('SELECT count(*) FROM leased WHERE locked_until > now()'), '41', 'it has as many rows as there are leases');
ask("SELECT ruststream.alter_subscription('leased', workers => 2)");
wait_for($node, "SELECT count(*) = 2 FROM ruststream.delivery_in_work WHERE subscription = 'leased'",
	'a second worker has one of its own');
is(ask('SELECT count(*) FROM leased WHERE locked_until > now()'), '42', 'and no other');
ask('DELETE FROM wait');
wait_for_empty($node, 'leased', 'all come to their end');
is(ask('SELECT count(*), count(DISTINCT id) FROM handled'), '100|100', 'once');

# They are given back by whoever is done, stopped or dead.
foreach my $how ('pg_terminate_backend(pid, 60000)', 'pg_cancel_backend(pid)')
{
	ask('TRUNCATE handled, leased; INSERT INTO wait DEFAULT VALUES');
	ask('INSERT INTO leased (payload) SELECT NULL FROM generate_series(1, 100)');
	wait_for($node, "SELECT count(*) > 0 FROM ruststream.delivery_in_work WHERE subscription = 'leased'",
		'a batch is in work');
	ask("SELECT $how FROM ruststream.delivery_in_work WHERE subscription = 'leased'");
	ask('DELETE FROM wait');
	wait_for_empty($node, 'leased', "all come to their end after $how");
	ask("SELECT ruststream.alter_subscription('leased', workers => 1)");
	wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'ruststream: leased'",
		'one worker is left');
	ask('TRUNCATE handled; INSERT INTO wait DEFAULT VALUES');
	ask('INSERT INTO leased (payload) SELECT NULL FROM generate_series(1, 100)');
	wait_for($node, "SELECT count(*) = 41 FROM leased WHERE locked_until > now()", 'all leases are there again');
	ask('DELETE FROM wait');
	wait_for_empty($node, 'leased', 'all come to their end');
}

# ------------------------------------------- more failing rows than a worker minds

# They come back at once and cannot be delayed: so the worker rests.
ask(<<'SQL');
CREATE TABLE bare (id bigint PRIMARY KEY, payload integer);
SELECT ruststream.attach_queue('bare', 'id', payload_column => 'payload');
CREATE FUNCTION fail(bare[]) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'no good'; END $$;
INSERT INTO bare SELECT i FROM generate_series(1, 1500) AS i;
SELECT ruststream.subscribe('bare', 'bare', 'fail', batch_size => 1500, retry_delay => '1 h', poll_interval => '10 ms');
SQL
my $holding = "SELECT state = 'holding' FROM ruststream.stat_worker WHERE subscription = 'bare'";
wait_for($node, $holding, 'rows that fail and come back at once are left alone, however many');
ask('INSERT INTO bare VALUES (0)');
is(ask("SELECT deliveries, failed FROM ruststream.stat_subscription WHERE subscription = 'bare'"), '1500|1500',
	'each was delivered once');
is(ask('SELECT count(*) FROM bare'), '1501', 'none is lost');
is(ask($holding), 't', 'and a wake-up changes nothing');

$node->stop;
done_testing();
