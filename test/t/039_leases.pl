# Several leases in one claim, in workers: each row's lease is extended while others
# are in work; other workers take what is let go; what a stop and what a death between
# two deliveries leave; and that no lease is claimed that cannot be extended.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('leases', conf => <<'CONF');
restart_after_crash = on
ruststream.crash_restart_delay = 100ms
ruststream.batch_leases = 40
CONF

sub ask
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# A task stays in work as long as its number is in wait; its effect can be written once.
ask(<<'SQL');
SELECT ruststream.create_queue('tasks', form => 'lease');
CREATE TABLE wait (id bigint);
CREATE TABLE effect (id bigint UNIQUE, attempt integer);
CREATE FUNCTION work(task tasks, d ruststream.delivery) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect VALUES (task.id, d.attempt);
	WHILE EXISTS (SELECT FROM wait WHERE id = task.id) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
	RETURN CASE WHEN task.payload ->> 'do' = 'retry' AND d.attempt = 1 THEN ruststream.retry() ELSE ruststream.ack() END;
END $$;
SELECT ruststream.subscribe('work', 'tasks', 'work', lease => '1 s', deliveries_per_commit => 5, max_commit_wait => '60 s',
	poll_interval => '100 ms', retry_delay => '1 ms');
SQL

my $in_work = "SELECT id FROM ruststream.delivery_in_work WHERE subscription = 'work'";

# So many tasks, of which one stays in work.
sub start
{
	my ($number, $slow) = @_;
	ask('SELECT ruststream.pause(\'work\')');
	ask("TRUNCATE tasks, effect RESTART IDENTITY; INSERT INTO wait VALUES ($slow)");
	ask("INSERT INTO tasks (payload) SELECT NULL FROM generate_series(1, $number)");
	ask('SELECT ruststream.resume(\'work\')');
	wait_for($node, $in_work, "task $slow is in work", $slow);
	return ask("SELECT pid FROM ruststream.delivery_in_work WHERE subscription = 'work'");
}

# ------------------------------------------------- each row's lease is extended

start(8, 2);
my $leased = 'SELECT string_agg(id::text, \' \' ORDER BY id) FROM tasks WHERE locked_until > now()';
is(ask($leased), '2 3 4 5', 'the rows of one claim are leased');
is(ask('SELECT string_agg(id::text, \' \') FROM effect'), '1', 'the first of them is done, and to be seen');
my $first = ask('SELECT max(locked_until) FROM tasks');
wait_for($node, "SELECT count(*) = 4 FROM tasks WHERE locked_until > '$first'::timestamptz + interval '1 s'",
	'each lease outlives itself while a neighbour is in work');
is(ask("SELECT lease_until >= '$first'::timestamptz + interval '1 s' FROM ruststream.delivery_in_work"), 't',
	'and so it is shown');
ask('DELETE FROM wait');
wait_for_empty($node, 'tasks', 'all come to their end');
is(ask('SELECT count(*), max(attempt) FROM effect'), '8|1', 'once, at the first attempt');
is(ask("SELECT lease_lost, failed FROM ruststream.stat_subscription WHERE subscription = 'work'"), '0|0', 'none was lost');

# --------------------------------------------------- what is let go is anybody's

ask("SELECT ruststream.alter_subscription('work', max_commit_wait => '200 ms', workers => 2)");
wait_for($node, "SELECT count(*) = 2 FROM pg_stat_activity WHERE application_name = 'ruststream: work'", 'two workers');
ask('TRUNCATE tasks, effect RESTART IDENTITY; INSERT INTO wait VALUES (1)');
ask('INSERT INTO tasks (payload) SELECT NULL FROM generate_series(1, 5)');
wait_for($node, 'SELECT count(*) > 0 FROM ruststream.delivery_in_work', 'a task is in work');
ask('SELECT pg_sleep(0.3); DELETE FROM wait');
wait_for_empty($node, 'tasks', 'what one worker has let go comes to its end');
is(ask('SELECT count(*), max(attempt) FROM effect'), '5|1', 'at its first attempt, once');

# many tasks, several workers: every row is handled, and no attempt is counted twice
ask("SELECT ruststream.alter_subscription('work', max_commit_wait => '5 ms', workers => 4, deliveries_per_commit => 20)");
ask('TRUNCATE tasks, effect RESTART IDENTITY');
ask('ALTER TABLE effect DROP CONSTRAINT effect_id_key');
ask(q{INSERT INTO tasks (payload) SELECT CASE WHEN i % 10 = 0 THEN '{"do": "retry"}'::jsonb END FROM generate_series(1, 2000) AS i});
wait_for_empty($node, 'tasks', 'many tasks come to their end');
is(ask('SELECT count(*), count(DISTINCT id), count(*) FILTER (WHERE attempt = 2), max(attempt) FROM effect'), '2000|2000|200|2',
	'each once, those to be tried again at their second attempt');
ask('TRUNCATE effect; ALTER TABLE effect ADD UNIQUE (id)');
ask("SELECT ruststream.alter_subscription('work', max_commit_wait => '60 s', workers => 1, deliveries_per_commit => 5)");
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'ruststream: work'", 'one worker');

# -------------------------------------------------------------------- a stop

my $pid = start(5, 2);
ask("SELECT ruststream.alter_subscription('work', lease => '1 hour')");
ask('DELETE FROM wait');
wait_for_empty($node, 'tasks', 'a longer lease');
$pid = start(5, 2);
ask("SELECT pg_terminate_backend($pid, 60000)");
# its successor begins with the row that was in work, claimed a second time
wait_for($node, $in_work, 'a terminated worker gives everything back at once', '2');
is(ask('SELECT string_agg(id || \' at \' || attempt, \', \' ORDER BY id) FROM tasks'), '2 at 3, 3 at 2, 4 at 2, 5 at 2',
	'and takes back the attempts of rows that it has not begun');
ask('DELETE FROM wait');
wait_for_empty($node, 'tasks', 'all come to their end');
is(ask('SELECT string_agg(id || \' at \' || attempt, \', \' ORDER BY id) FROM effect'),
	'1 at 1, 2 at 2, 3 at 1, 4 at 1, 5 at 1', 'each with one effect');

# told to leave between two deliveries
$pid = start(5, 2);
ask("SELECT ruststream.pause('work'); DELETE FROM wait");
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'ruststream: work'", 'a paused worker leaves');
is(ask('SELECT string_agg(id || \' at \' || attempt || \' \' || (locked_until IS NULL), \', \' ORDER BY id) FROM tasks'),
	'3 at 1 true, 4 at 1 true, 5 at 1 true', 'what it has not begun is as it was');
ask("SELECT ruststream.resume('work')");
wait_for_empty($node, 'tasks', 'all come to their end');

# -------------------------------------------------------------------- a death

$pid = start(5, 3);
kill 'KILL', $pid;
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'ruststream: work'", 'the server is back');
is(ask('SELECT string_agg(id || \' at \' || attempt || \' \' || (locked_until > now()), \', \' ORDER BY id) FROM tasks'),
	'3 at 2 true, 4 at 2 true, 5 at 2 true', 'a killed worker leaves its leases, and attempts counted');
is(ask('SELECT string_agg(id::text, \' \' ORDER BY id) FROM effect'), '1 2', 'what was done is done');
ask('DELETE FROM wait; UPDATE tasks SET locked_until = now()');
wait_for_empty($node, 'tasks', 'after their leases the rows are delivered');
is(ask('SELECT string_agg(id || \' at \' || attempt, \', \' ORDER BY id) FROM effect'),
	'1 at 1, 2 at 1, 3 at 2, 4 at 2, 5 at 2', 'each with one effect');

# -------------------------------------------------------- no more than can be extended

ask("SELECT ruststream.alter_subscription('work', deliveries_per_commit => 100)");
start(100, 1);
is(ask('SELECT count(*) FROM tasks WHERE locked_until > now()'), '41', 'it claims as many rows as there are leases');
ask('DELETE FROM wait');
wait_for_empty($node, 'tasks', 'all come to their end');
is(ask('SELECT count(*), max(attempt) FROM effect'), '100|1', 'once');

$node->stop;
done_testing();
