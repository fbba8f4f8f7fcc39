# FIFO groups and partition keys with several workers: order within a line, no two of
# a line at a time, nothing lost, while publishers publish, workers are told to go, and
# processes are killed.  Polling is off as far as it may be: what is not woken is
# not delivered.  And what a claim reads where one key has almost all rows.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use IPC::Run ();
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('lines', conf => <<'CONF');
max_worker_processes = 40
max_connections = 60
ruststream.max_workers = 24
restart_after_crash = on
ruststream.crash_restart_delay = 100ms
synchronous_commit = off
CONF

sub ask
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

my @fifo = ('fifo', 'fifo_leased', 'fifo_strict');
my @keys = ('keys', 'keys_leased', 'keys_locked', 'keys_strict');
my @all = (@fifo, @keys);

ask(<<'SQL');
SELECT ruststream.create_queue('fifo', groups => true, fifo => true);
SELECT ruststream.create_queue('fifo_leased', 'lease', groups => true, fifo => true);
SELECT ruststream.create_queue('fifo_strict', groups => true, fifo => true, isolation => 'repeatable read');
SELECT ruststream.create_queue('keys', partition_key => true);
SELECT ruststream.create_queue('keys_leased', 'lease', partition_key => true);
SELECT ruststream.create_queue('keys_locked', 'advisory_lock', partition_key => true, lock_key => 'keys-{id}');
SELECT ruststream.create_queue('keys_strict', partition_key => true, isolation => 'repeatable read');

CREATE TABLE published (queue text, line text, id bigint, PRIMARY KEY (queue, id));
CREATE TABLE done (queue text, line text, id bigint, n bigint, attempt integer);
CREATE SEQUENCE calls;

-- One task for the line in every queue.
CREATE FUNCTION publish(line text) RETURNS void LANGUAGE sql AS $$
	INSERT INTO published
	SELECT q, line, ruststream.publish(q::regclass, jsonb_build_object('line', line), CASE WHEN q ~ 'fifo' THEN line END,
		partition_key => CASE WHEN q ~ 'keys' THEN line END)::bigint
	FROM unnest('{fifo,fifo_leased,fifo_strict,keys,keys_leased,keys_locked,keys_strict}'::text[]) AS q $$;

-- The session's lock shows whether another handler is at this line; each fifth task is tried again first.
CREATE FUNCTION work(p jsonb, d ruststream.delivery) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
DECLARE
	line integer := hashtext(d.queue::text || (p->>'line'));
BEGIN
	IF NOT pg_try_advisory_lock(1, line) THEN
		RAISE EXCEPTION 'overlap';
	END IF;
	INSERT INTO done VALUES (d.queue::text, p->>'line', d.id::bigint, nextval('calls'), d.attempt);
	PERFORM pg_sleep(0.0005);
	PERFORM pg_advisory_unlock(1, line);
	RETURN CASE WHEN d.id::bigint % 5 = 0 AND d.attempt = 1 THEN ruststream.retry() ELSE ruststream.ack() END;
END $$;
SQL
ask("SELECT ruststream.subscribe('$_', '$_', 'work', group_name => '*', workers => 3, lease => '2 s', poll_interval => '"
	  . ($_ eq 'fifo_leased' ? '1 s' : '1 day') . "')")
  foreach @fifo;
ask("SELECT ruststream.subscribe('$_', '$_', 'work', workers => 3, lease => '2 s', poll_interval => '"
	  . ($_ eq 'keys_leased' ? '1 s' : '1 day') . "')")
  foreach @keys;
wait_for($node, "SELECT count(*) = 21 FROM ruststream.stat_worker WHERE state = 'idle'", 'workers wait');

# Each client has lines of its own, so that their tasks have ids in the order of the commits.
sub start_publishers
{
	my ($name, $times) = @_;
	my $script = $node->basedir . "/$name.sql";

	append_to_file($script, "\\set line random(1, 5)\nSELECT publish('$name' || :client_id || '-' || :line);\n");
	my ($out, $err) = ('', '');
	my $run = IPC::Run::start(['pgbench', '-n', '-c', '3', '-t', $times, '-f', $script, '-d', $node->connstr('postgres')],
		'>', \$out, '2>', \$err);
	return $run;
}

sub check
{
	my ($when) = @_;

	wait_for_empty($node, $_, "$when: $_ drains") foreach @all;
	foreach my $queue (@all)
	{
		is(ask("SELECT count(*) FROM published AS p FULL JOIN (SELECT id, count(*) FROM done WHERE queue = '$queue' GROUP BY id) AS d"
				. " USING (id) WHERE p.queue = '$queue' AND d.count IS DISTINCT FROM 1"),
			'0', "$when: $queue: each task once");
		is(ask("SELECT count(*) FROM (SELECT id, lag(id) OVER (PARTITION BY line ORDER BY n) AS before FROM done WHERE queue = '$queue') AS d"
				. " WHERE id < before"),
			'0', "$when: $queue: in order");
	}
	is(ask("SELECT string_agg(DISTINCT subscription, ' ') FROM ruststream.failure WHERE message ~ 'overlap'"), '', "$when: no overlap");
	return;
}

# -------------------------------------------------- many lines, and one alone

start_publishers('many', 60)->finish;
ask("SELECT publish('alone') FROM generate_series(1, 100)");
check('publishing');
is(ask("SELECT sum(transient) FROM ruststream.stat_subscription WHERE subscription = 'fifo_strict'"), '0',
	'no snapshot is older than its guard');
cmp_ok(ask("SELECT count(*) FROM done WHERE attempt = 2"), '>', 0, 'some were tried again');

# A line's next task is published while the one before it is in work, one at a time.
ask("SELECT publish('trickle')"), wait_for_empty($node, 'fifo', 'a single task is delivered') foreach 1 .. 20;
check('trickling');

# --------------------------------------- workers that come and go, or are killed

my $run = start_publishers('going', 60);
foreach my $workers (1, 3, 2, 3)
{
	ask("SELECT ruststream.alter_subscription(subscription, workers => $workers) FROM ruststream.status");
	ask("SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM ruststream.stat_worker WHERE state = 'delivering' LIMIT 2) AS w");
}
$run->finish;
check('workers come and go');

foreach my $kill (1 .. 2)
{
	$run = start_publishers("killing$kill", 40);
	my $offset = -s $node->logfile;

	$node->poll_query_until('postgres', "SELECT count(*) > 0 FROM ruststream.stat_worker WHERE state = 'delivering'");
	kill 'KILL', ask("SELECT pid FROM ruststream.stat_worker ORDER BY state = 'delivering' DESC, pid LIMIT 1");
	$run->finish;
	$node->wait_for_log(qr/ready to accept connections/, $offset);
}
wait_for($node, "SELECT count(*) = 21 FROM ruststream.stat_worker", 'workers are there again');
check('killed');

# ------------------------------------------------------- what a claim reads

# So many blocks of the queue are read per delivery, on average of some.
sub blocks
{
	my ($subscription, $queue) = @_;
	my $sum = "SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit) FROM pg_statio_user_tables"
	  . " WHERE relid = '$queue'::regclass";
	my $flush = "DO 'BEGIN PERFORM pg_stat_force_next_flush(); END'";
	my $result = $node->safe_psql('postgres', "$flush;\n$sum;\nCALL ruststream.drain('$subscription', 200);\n$flush;\n$sum;\n"
		. "SELECT count(*) FROM $queue");
	my ($before, $after) = split /\n/, $result;

	return ($after - $before) / 200;
}

ask('CREATE FUNCTION nothing(jsonb) RETURNS void LANGUAGE sql AS $$$$');
foreach my $form ('row_lock', 'lease', 'advisory_lock')
{
	my $lock_key = $form eq 'advisory_lock' ? "'$form-{id}'" : 'NULL';

	foreach my $name ('ten', 'many', 'busy')
	{
		my $queue = "${form}_$name";

		ask("SELECT ruststream.create_queue('$queue', '$form', partition_key => true, lock_key => $lock_key)");
		ask("ALTER TABLE $queue SET (autovacuum_enabled = false)");
		ask("SELECT ruststream.subscribe('$queue', '$queue', 'nothing', workers => 0)");
	}
	# their plans are made while they are empty, and the statistics never hear of it
	ask("INSERT INTO ${form}_ten (partition_key, payload) SELECT i % 10, '1' FROM generate_series(1, 50000) AS i");
	ask("INSERT INTO ${form}_many (partition_key, payload) SELECT i, '1' FROM generate_series(1, 50000) AS i");
	ask("INSERT INTO ${form}_busy (partition_key, payload) SELECT 'busy', '1' FROM generate_series(1, 100000) AS i");
	ask("INSERT INTO ${form}_busy (partition_key, payload) SELECT i % 10, '1' FROM generate_series(1, 2000) AS i");

	# somebody is at the key with almost all rows, and no statement of theirs runs
	my ($in, $out) = ('', '');
	my $holder = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres') ], '<', \$in, '>', \$out);
	$in .= "SELECT pg_advisory_lock(hashtextextended('public.${form}_busy:key:busy', 0));\n\\echo locked\n";
	$holder->pump until $out =~ /locked/;

	# How often a claim begins at the front goes by the clock (claim.c), and more often
	# costs more: so it counts what they cost at best.
	my ($ten, $many, $busy);
	my $left = 2000;
	while ($left > 1000)
	{
		$left -= 200;
		$ten = blocks("${form}_ten", "${form}_ten");
		$many = blocks("${form}_many", "${form}_many");
		$busy = blocks("${form}_busy", "${form}_busy");
		last if $many <= 2 * $ten && $busy <= 2 * $ten;
	}

	note "$form: blocks per delivery: ten keys $ten, 50,000 keys $many, 100,000 rows behind a busy key $busy";
	cmp_ok($many, '<=', 2 * $ten, "$form: many keys cost a claim no more than twice what ten cost");
	cmp_ok($busy, '<=', 2 * $ten, "$form: so do many rows behind a busy key");
	is(ask("SELECT count(*) FILTER (WHERE partition_key = 'busy'), count(*) FILTER (WHERE partition_key <> 'busy') FROM ${form}_busy"),
		"100000|$left", "$form: the others are delivered beside it");
	$in .= "\\q\n";
	$holder->finish;
}

done_testing();
