# Workers: timeouts and cancels of their handlers, in each form, idle workers that
# redrive wakes, and counters that begin again.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use Test::More;

my $node = new_node('operating', conf => "ruststream.max_workers = 8\n");

sub sql { return $node->safe_psql('postgres', $_[0]) }

sql(<<'SQL');
CREATE ROLE app LOGIN;
CREATE ROLE member LOGIN IN ROLE app;
CREATE ROLE stranger LOGIN IN ROLE pg_monitor;
CREATE SCHEMA app AUTHORIZATION app;
GRANT USAGE ON SCHEMA app TO stranger;
SET SESSION AUTHORIZATION app;
CREATE TABLE app.done (queue text, id text, attempt int, pid int DEFAULT pg_backend_pid());

-- Takes an hour for its first attempt where it is told to.
CREATE FUNCTION app.serve(payload jsonb, d ruststream.delivery) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO app.done VALUES (d.subscription, d.id, d.attempt);
	IF payload ? 'fails' AND d.attempt = 1 THEN
		RAISE EXCEPTION 'it fails';
	ELSIF payload ? 'sleeps' AND d.attempt = 1 THEN
		PERFORM pg_sleep(3600);
	END IF;
END $$;
CREATE PROCEDURE app.steps(payload jsonb, d ruststream.delivery) LANGUAGE plpgsql AS $$
BEGIN
	COMMIT;
	INSERT INTO app.done VALUES (d.subscription, d.id, d.attempt);
	IF payload ? 'sleeps' AND d.attempt = 1 THEN
		PERFORM pg_sleep(3600);
	END IF;
END $$;
SELECT ruststream.create_queue('app.row_lock'),
	ruststream.create_queue('app.lease', form => 'lease'),
	ruststream.create_queue('app.keyed', form => 'advisory_lock', lock_key => 'keyed-{id}'),
	ruststream.create_queue('app.apart', form => 'lease'),
	ruststream.create_queue('app.steps', form => 'advisory_lock', lock_key => 'steps-{id}');
SELECT ruststream.subscribe('row_lock', 'app.row_lock', 'app.serve', retry_delay => '0', poll_interval => '1 h'),
	ruststream.subscribe('lease', 'app.lease', 'app.serve', retry_delay => '0', poll_interval => '1 h'),
	ruststream.subscribe('keyed', 'app.keyed', 'app.serve', retry_delay => '0', poll_interval => '1 h'),
	ruststream.subscribe('apart', 'app.apart', 'app.serve', retry_delay => '0', transactional => false, poll_interval => '1 h'),
	ruststream.subscribe('steps', 'app.steps', 'app.steps', retry_delay => '0', transactional => false, poll_interval => '1 h');
SQL
my @queues = qw(row_lock lease keyed apart steps);

sub has_failed
{
	my ($queue, $message) = @_;
	return sql(qq{SELECT count(*) FROM ruststream.failure
		WHERE subscription = '$queue' AND sqlstate = '57014' AND message LIKE '$message%'});
}

# Cancelled while it runs, and delivered again by the same process.
for my $queue (@queues)
{
	my $id = sql(qq{SELECT ruststream.publish('app.$queue', '{"sleeps": 1}')});

	wait_for($node,
		qq{SELECT ruststream.cancel('app.$queue', '$id')}, "$queue: a delivery in work can be cancelled");
	wait_for_empty($node, "app.$queue");
	is(has_failed($queue, 'the delivery was cancelled'), 1, "$queue: that was a failure");
	is(sql(qq{SELECT string_agg(attempt::text, ' ') FROM app.done WHERE queue = '$queue'}),
		'2', "$queue: what it had written is undone");
}

# The same by its timeout.  A worker that has been cancelled is as good as new.
for my $queue (@queues)
{
	my $pids = join ' ', sort(backends_of($node, 'ruststream worker'));

	sql(qq{SELECT ruststream.alter_subscription('$queue', timeout => '1 s')});
	sql(qq{SELECT ruststream.publish('app.$queue', '{"sleeps": 1}')});
	wait_for_empty($node, "app.$queue");
	is(has_failed($queue, 'the handler was cancelled after its timeout of 1 s'), 1, "$queue: cancelled in time");
	is(join(' ', sort(backends_of($node, 'ruststream worker'))), $pids, "$queue: no worker has left for it");
	sql(qq{SELECT ruststream.alter_subscription('$queue', reset => ARRAY['timeout'])});
}
# A cancel ends one delivery and never more: rows are cancelled over and over while many
# short ones run, and each that is said to have been cancelled has failed, and no other.
sql(<<'SQL');
TRUNCATE app.done, ruststream.failure_history;
SELECT ruststream.alter_subscription('row_lock', workers => 2);
INSERT INTO app.row_lock (payload) SELECT '{}' FROM generate_series(1, 4000);
SQL
my $cancelled = sql(<<'SQL');
SET SESSION AUTHORIZATION member;
CREATE TEMP TABLE hit (id text);
DO $$
BEGIN
	FOR i IN 1 .. 100000 LOOP
		INSERT INTO hit SELECT w.id FROM ruststream.delivery_in_work AS w
			WHERE w.subscription = 'row_lock' AND ruststream.cancel('app.row_lock', w.id);
		EXIT WHEN i % 100 = 0 AND NOT EXISTS (SELECT FROM app.row_lock);
		COMMIT;
	END LOOP;
END $$;
SELECT count(*) FROM hit;
SQL
wait_for_empty($node, 'app.row_lock');
is(sql(q{SELECT count(*) FROM ruststream.failure WHERE message = 'the delivery was cancelled by ruststream.cancel'}),
	$cancelled > 1000 ? 1000 : $cancelled, "as many deliveries have failed as were cancelled ($cancelled)");
is(sql(q{SELECT count(*) FROM ruststream.failure WHERE message <> 'the delivery was cancelled by ruststream.cancel'}),
	0, 'and none otherwise');
is(sql('SELECT count(*), count(DISTINCT id) FROM app.done'), '4000|4000', 'each row had its effect once');

# Who may.
my ($code, $out, $err) =
	$node->psql('postgres', q{SELECT ruststream.cancel('app.row_lock', '1')}, extra_params => [ '-U', 'stranger' ]);
like($err, qr/permission denied to cancel deliveries of queue app.row_lock/, 'a stranger cannot cancel');
($code, $out, $err) =
	$node->psql('postgres', q{SELECT ruststream.reset_stats('row_lock')}, extra_params => [ '-U', 'stranger' ]);
like($err, qr/permission denied for subscription "row_lock"/, 'nor reset counters');
$node->safe_psql('postgres', 'SELECT ruststream.reset_stats()', extra_params => [ '-U', 'stranger' ]);
cmp_ok(sql('SELECT min(deliveries) FROM ruststream.stat_subscription'), '>', 0, 'or all of them');

# Counters begin again.
sql(q{SELECT ruststream.reset_stats('row_lock')});
is(sql(q{SELECT deliveries + acked + failed, stats_reset > now() - interval '1 h' FROM ruststream.stat_subscription
	WHERE subscription = 'row_lock'}), '0|t', 'the counters of one subscription');
cmp_ok(sql(q{SELECT min(deliveries) FROM ruststream.stat_subscription WHERE subscription <> 'row_lock'}),
	'>', 0, 'and of no other');
$node->safe_psql('postgres', 'SELECT ruststream.reset_stats()', extra_params => [ '-U', 'member' ]);
is(sql('SELECT sum(deliveries) FROM ruststream.stat_subscription'), '0', 'and of all');
sql(q{SELECT ruststream.publish('app.row_lock', '{}')});
wait_for_empty($node, 'app.row_lock');
is(sql(q{SELECT deliveries, acked FROM ruststream.stat_subscription WHERE subscription = 'row_lock'}), '1|1',
	'they count on');

# Redriven rows wake a worker that would sleep for an hour.
sql(<<'SQL');
SET SESSION AUTHORIZATION app;
SELECT ruststream.create_queue('app.grouped', groups => true);
SELECT ruststream.subscribe('grouped', 'app.grouped', 'app.serve', poll_interval => '1 h', dead_letter => 'dead', max_attempts => 1);
SELECT ruststream.publish('app.grouped', '{"fails": 1}', 'grouped');
SQL
wait_for($node, q{SELECT group_name = 'dead' FROM app.grouped}, 'a row has become a dead letter');
wait_for($node, q{SELECT state = 'idle' FROM ruststream.stat_worker WHERE subscription = 'grouped'}, 'the worker is idle');
sql(q{UPDATE app.grouped SET payload = '{}'; SELECT ruststream.redrive('dead')});
wait_for_empty($node, 'app.grouped', 'a redriven row is delivered at once');

# A lease whose id does not fit is not extended, which is said once.
sql(<<'SQL');
SET SESSION AUTHORIZATION app;
CREATE TABLE app.long (id text PRIMARY KEY, payload jsonb DEFAULT '{}', locked_until timestamptz);
SELECT ruststream.attach_queue('app.long', 'id', payload_column => 'payload', locked_until_column => 'locked_until');
SELECT ruststream.subscribe('long', 'app.long', 'app.serve');
INSERT INTO app.long VALUES (repeat('x', 1023)), (repeat('y', 1024)), (repeat('z', 2000));
SQL
wait_for_empty($node, 'app.long');
my @warned = PostgreSQL::Test::Utils::slurp_file($node->logfile) =~ /does not extend the leases of rows whose id takes 1024 bytes/g;
is(scalar(@warned), 1, 'a lease that is not extended is warned of once a process');

$node->stop;
done_testing();
