# 200 times kill -9, spread over every named failure point of the lane, of a
# worker (the server restarts after the crash) and of the postmaster with it
# (the whole server is gone and is started again).  Afterwards every task has
# had exactly one effect, none is lost, and a crash has counted no attempt.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamCrash;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my @points = qw(after_begin after_claim after_savepoint after_handler
  after_rollback_to after_settle before_commit after_commit);
my $worker_kills = 19;        # of each point
my $postmaster_kills = 6;     # of each point

my $crash = RuststreamCrash->new('crash');
my $node = $crash->node;

# A task's effect can be written once.  Of three tasks one is acked at
# once, one asks to be tried again and one raises an error on its first
# attempt, having written all the same.
$node->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('tasks');
CREATE TABLE published (id bigint);
CREATE TABLE effect (id bigint UNIQUE, attempt integer);
CREATE FUNCTION work(task tasks) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect VALUES (task.id, ruststream.attempt());
	IF ruststream.attempt() = 1 AND task.id % 3 = 1 THEN
		RETURN CASE WHEN task.id % 2 = 0 THEN ruststream.retry() ELSE ruststream.retry_after('1 ms') END;
	ELSIF ruststream.attempt() = 1 AND task.id % 3 = 2 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('work', 'tasks', 'work', workers => 2, retry_delay => '1 ms');
SQL

$crash->publish_by(sub {
	$crash->try_sql(<<'SQL');
WITH task AS (
	INSERT INTO tasks (payload) SELECT '{}' FROM generate_series(1, 30)
	WHERE (SELECT count(*) FROM (SELECT FROM tasks LIMIT 15) AS waiting) < 15
	RETURNING id)
INSERT INTO published SELECT id FROM task
SQL
});

# ------------------------------------------------------------------ the kills

# Of the first, second and third delivery of a process.
my $total = 0;
foreach my $point (@points)
{
	$total += $crash->kill_at($point, $worker_kills, $postmaster_kills, 3);
}
cmp_ok($total, '>=', 200, 'kills in all');
note "$total kills in all";

# ---------------------------------------------------------------- the outcome

# What is left is delivered in peace.
$crash->end_kills;
wait_for_empty($node, 'tasks', 'every task comes to its end');

$crash->check_effects('', 200);
is( $node->safe_psql('postgres',
		'SELECT count(*) FROM effect WHERE attempt <> CASE WHEN id % 3 = 0 THEN 1 ELSE 2 END'),
	'0', 'no crash has counted an attempt, and every answer has');

$crash->check_failures('id % 3 = 2');

is($node->safe_psql('postgres', 'SELECT state FROM ruststream.status'), 'running',
	'the subscription is at work');
like(slurp_file($node->logfile),
	qr/ruststream had row \d+ of public\.tasks in work for subscription "work" when the server crashed/,
	'the log names what was in work');

$node->stop;
done_testing();
