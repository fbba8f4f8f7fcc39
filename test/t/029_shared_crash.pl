# kill -9 at every named failure point of a commit that several deliveries share, at its
# first deliveries and at later ones, of a worker and of the postmaster with it.
# All of them return at once, with none of their effects: afterwards every task
# has had exactly one, none is lost, and a crash has counted no attempt.
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
my $worker_kills = 7;         # of each point
my $postmaster_kills = 2;     # of each point
my $last = 7;                 # up to so many times that a process is there

my $crash = RuststreamCrash->new('shared_crash');
my $node = $crash->node;

# A task's effect can be written once.  Of four tasks one fails and one asks to be
# tried again on its first attempt, having written all the same.
$node->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('tasks');
CREATE TABLE published (id bigint);
CREATE TABLE effect (id bigint UNIQUE, attempt integer, xact xid8 DEFAULT pg_current_xact_id());
CREATE FUNCTION work(task tasks) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect VALUES (task.id, ruststream.attempt());
	IF ruststream.attempt() = 1 AND task.id % 4 = 1 THEN
		RETURN ruststream.retry_after('1 ms');
	ELSIF ruststream.attempt() = 1 AND task.id % 4 = 2 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('work', 'tasks', 'work', workers => 2, retry_delay => '1 ms',
	deliveries_per_commit => 20, max_commit_wait => '10 s');
SQL

$crash->publish_by(sub {
	$crash->try_sql(<<'SQL');
WITH task AS (
	INSERT INTO tasks (payload) SELECT '{}' FROM generate_series(1, 100)
	WHERE (SELECT count(*) FROM (SELECT FROM tasks LIMIT 50) AS waiting) < 50
	RETURNING id)
INSERT INTO published SELECT id FROM task
SQL
});

# ------------------------------------------------------------------ the kills

my $total = 0;
foreach my $point (@points)
{
	$total += $crash->kill_at($point, $worker_kills, $postmaster_kills, $last);
}
note "$total kills in all";

# ---------------------------------------------------------------- the outcome

# What is left is delivered in peace.
$crash->end_kills;
wait_for_empty($node, 'tasks', 'every task comes to its end');

$crash->check_effects('', 200);
is( $node->safe_psql('postgres',
		'SELECT count(*) FROM effect WHERE attempt <> CASE WHEN id % 4 IN (1, 2) THEN 2 ELSE 1 END'),
	'0', 'no crash has counted an attempt, and every answer has');
cmp_ok($node->safe_psql('postgres',
		'SELECT max(n) FROM (SELECT count(*) AS n FROM effect GROUP BY xact) AS c'),
	'>', 7, 'they did share commits');

$crash->check_failures('id % 4 = 2');

$node->stop;
done_testing();
