# The wake-up at commit.  The poll interval is an hour, so whatever is
# delivered here was told to a worker.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('wake', conf => "max_prepared_transactions = 2\nlog_min_messages = log");

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE done (queue text, id text, pid int DEFAULT pg_backend_pid(), UNIQUE (queue, id));
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handle(job jobs, d ruststream.delivery) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO done (queue, id) VALUES (d.subscription, d.id);
	IF job.payload ? 'gate' THEN
		PERFORM pg_advisory_xact_lock_shared(1);
	END IF;
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle', workers => 3, poll_interval => '1 h');
SQL

# Idle for a while, so that no wake-up is under way.
sub idle
{
	my ($subscription, $count) = @_;
	return "SELECT count(*) = $count FROM ruststream.stat_worker"
	  . " WHERE subscription = '$subscription' AND state = 'idle' AND since < clock_timestamp() - interval '100 ms'";
}

wait_for($node, idle('jobs', 3), 'three workers are idle');

$node->safe_psql('postgres', "INSERT INTO jobs (payload) VALUES ('{}')");
wait_for_empty($node, 'jobs', 'an INSERT wakes a worker');

$node->safe_psql('postgres', "SELECT ruststream.publish('jobs', '{}')");
wait_for_empty($node, 'jobs', 'so does publish');

wait_for($node, idle('jobs', 3), 'all are idle again');
$node->safe_psql('postgres', "COPY jobs (payload) FROM PROGRAM 'echo {}; echo {}; echo {}'");
wait_for_empty($node, 'jobs', 'so does COPY');

wait_for($node, idle('jobs', 3), 'all are idle again');
$node->safe_psql('postgres',
	"BEGIN; SAVEPOINT s; INSERT INTO jobs (payload) VALUES ('{}'); RELEASE s; COMMIT");
wait_for_empty($node, 'jobs', 'so does an INSERT in a savepoint');

# Nobody is woken in the middle of a transaction, or for nothing.
wait_for($node, idle('jobs', 3), 'all are idle again');
my $since = "SELECT string_agg(since::text, ' ' ORDER BY pid) FROM ruststream.stat_worker";
my $before = $node->safe_psql('postgres', $since);
$node->safe_psql('postgres', "BEGIN; INSERT INTO jobs (payload) VALUES ('{}'); ROLLBACK");
is($node->safe_psql('postgres', $since), $before, 'an INSERT that is rolled back wakes nobody');

$node->safe_psql('postgres',
	"BEGIN; INSERT INTO jobs (payload) VALUES ('{}'); PREPARE TRANSACTION 'p'");
is($node->safe_psql('postgres', $since), $before, 'a prepared one wakes nobody');
$node->safe_psql('postgres', "COMMIT PREPARED 'p'");
is($node->safe_psql('postgres', 'SELECT count(*) FROM jobs'), '1', 'and is left to the poll interval');
$node->safe_psql('postgres', "INSERT INTO jobs (payload) VALUES ('{}')");
wait_for_empty($node, 'jobs', 'or to the next INSERT');

# One commit of many rows wakes as many workers as there is work for.
my $gate = $node->background_psql('postgres');
$gate->query_safe('SELECT pg_advisory_lock(1)');
wait_for($node, idle('jobs', 3), 'all are idle again');
$node->safe_psql('postgres',
	q(INSERT INTO jobs (payload) SELECT '{"gate": 1}' FROM generate_series(1, 3)));
wait_for($node, "SELECT count(*) = 3 FROM ruststream.delivery_in_work",
	'one commit of three rows sets three workers to work');
$gate->query_safe('SELECT pg_advisory_unlock(1)');
wait_for_empty($node, 'jobs', 'and they end them');
$gate->quit;

# A busy worker finds what came meanwhile.
$node->safe_psql('postgres', "INSERT INTO jobs (payload) SELECT '{}' FROM generate_series(1, 200)");
wait_for_empty($node, 'jobs', 'many rows are delivered by few workers');

# Each group of a queue has workers of its own, and one commit may be for all.
$node->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('grouped', groups => true);
CREATE FUNCTION grouped_handler(job grouped) RETURNS void LANGUAGE sql
AS 'INSERT INTO done (queue, id) VALUES (job.group_name, job.id)';
SELECT ruststream.subscribe('red', 'grouped', 'grouped_handler', poll_interval => '1 h');
SELECT ruststream.subscribe('blue', 'grouped', 'grouped_handler', poll_interval => '1 h');
SQL
wait_for($node, idle('red', 1), 'the worker of one group is idle');
wait_for($node, idle('blue', 1), 'the worker of the other group is idle');
for my $group ('red', 'blue')
{
	$node->safe_psql('postgres', "INSERT INTO grouped (group_name, payload) VALUES ('$group', '{}')");
	wait_for_empty($node, 'grouped', "a row for group $group wakes its worker");
}

# The trigger of a partitioned queue fires for the table that is named.
$node->safe_psql('postgres', <<'SQL');
CREATE TABLE parted (id bigint PRIMARY KEY, payload jsonb) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (1000);
SELECT ruststream.attach_queue('parted', 'id', payload_column => 'payload');
CREATE FUNCTION parted_handler(job parted) RETURNS void LANGUAGE sql
AS 'INSERT INTO done (queue, id) VALUES (''parted'', job.id)';
SELECT ruststream.subscribe('parted', 'parted', 'parted_handler', poll_interval => '1 h');
SQL
wait_for($node, idle('parted', 1), 'the worker of a partitioned queue is idle');
$node->safe_psql('postgres', "INSERT INTO parted VALUES (1, '{}')");
wait_for_empty($node, 'parted', 'an INSERT into it wakes the worker');

# A row that comes due wakes its worker by a timer.
$node->safe_psql('postgres',
	"INSERT INTO jobs (payload, retry_after) VALUES ('{}', clock_timestamp() + '1 s')");
wait_for_empty($node, 'jobs', 'a row that comes due is delivered without a poll');

is($node->safe_psql('postgres', 'SELECT count(*) FROM ruststream.failure'), '0', 'nothing has failed');
$node->stop;

done_testing();
