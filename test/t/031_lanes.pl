# The lease and advisory lock lanes in workers: handlers that are procedures and
# COMMIT as they go; what a stop or a death in the middle of a delivery leaves; and
# a default level that changes under a running worker.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('lanes', conf => <<'CONF');
restart_after_crash = on
ruststream.crash_restart_delay = 100ms
CONF

sub ask
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

ask(<<'SQL');
SELECT ruststream.create_queue('leased', form => 'lease');
SELECT ruststream.create_queue('keyed', form => 'advisory_lock', lock_key => 'jobs-{id}');
CREATE TABLE ran (queue text, id text, attempt integer, what text, role name DEFAULT current_user,
	work_mem text DEFAULT current_setting('work_mem'), level text DEFAULT current_setting('transaction_isolation'));
SQL

# ------------------------------------------------------------------ procedures

# Two transactions; the second fails on the first two attempts.
ask(<<'SQL');
CREATE ROLE other;
CREATE PROCEDURE in_steps(job jsonb, d ruststream.delivery) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ran VALUES (d.queue::text, d.id, ruststream.attempt(), 'first');
	SET work_mem = '7MB';
	SET ROLE other;
	PREPARE left_behind AS SELECT 1;
	CREATE TEMPORARY TABLE left_behind (id integer);
	PERFORM pg_advisory_lock(1);
	RESET ROLE;
	COMMIT;
	INSERT INTO ran VALUES (d.queue::text, d.id, (ruststream.delivery()).attempt, 'second');
	IF d.attempt < 3 THEN
		RAISE EXCEPTION 'not yet';
	END IF;
	SET ROLE other;
	COMMIT;
END $$;
GRANT CREATE ON SCHEMA public TO other;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO other;
SELECT ruststream.subscribe('leased', 'leased', 'in_steps', transactional => false, retry_delay => '10 ms');
SELECT ruststream.subscribe('keyed', 'keyed', 'in_steps', transactional => false, retry_delay => '10 ms');
INSERT INTO leased (payload) VALUES ('1'), ('2');
INSERT INTO keyed (payload) VALUES ('1'), ('2');
SQL
for my $queue ('leased', 'keyed')
{
	wait_for_empty($node, $queue, "$queue: procedures that commit as they go");
	is(ask("SELECT string_agg(concat_ws(' ', id, attempt, what, role, work_mem), ', ' ORDER BY id, attempt, what)"
		  . " FROM ran WHERE queue = '$queue'"),
		join(', ', map { my $id = $_; "$id 1 first postgres 4MB", "$id 2 first postgres 4MB",
			"$id 3 first postgres 4MB", "$id 3 second postgres 7MB" } 1, 2),
		"$queue: what was committed stays, what failed is undone, and nothing is left to the next delivery");
	is(ask("SELECT count(*), min(message) FROM ruststream.failure WHERE subscription = '$queue'"), '4|not yet',
		"$queue: the failures are recorded");
}
is(ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', 'no lock is left');
is(ask("SELECT string_agg(application_name, ', ' ORDER BY application_name) FROM pg_stat_activity"
	  . " WHERE backend_type = 'ruststream worker'"), 'ruststream: keyed, ruststream: leased',
	'the workers still say for whom they work');

# The outcome of a procedure is its output.
ask(<<'SQL');
CREATE PROCEDURE answers(job jsonb, INOUT answer ruststream.outcome) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ran VALUES (job #>> '{}', '1', 1, 'before');
	COMMIT;
	INSERT INTO ran VALUES (job #>> '{}', '1', 1, 'after');
	answer := ruststream.retry_after('1 h', 'later');
END $$;
SELECT ruststream.alter_subscription('leased', handler => 'answers');
SELECT ruststream.alter_subscription('keyed', handler => 'answers');
INSERT INTO leased (payload) VALUES ('"answered leased"');
INSERT INTO keyed (payload) VALUES ('"answered keyed"');
SQL
for my $queue ('leased', 'keyed')
{
	wait_for($node, "SELECT retry_after > now() + '50 min' AND attempt = 2 FROM $queue",
		"$queue: a procedure answers by its last argument");
	is(ask("SELECT count(*) FROM ran WHERE queue = 'answered $queue'"), '2', "$queue: and its writes stay");
}
# a session drains it, too
ask("UPDATE leased SET retry_after = NULL; SELECT ruststream.alter_subscription('leased', workers => 0)");
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'ruststream: leased'",
	'no worker is left');
ask("UPDATE leased SET retry_after = NULL");
$node->safe_psql('postgres', "CALL ruststream.drain('leased')");
is(ask("SELECT retry_after > now() + '50 min' FROM leased"), 't', 'leased: drained in a session');
ask("SELECT ruststream.alter_subscription('leased', workers => 1)");

# ---------------------------------------------------------- stops in the middle

ask(<<'SQL');
DELETE FROM leased;
DELETE FROM keyed;
CREATE FUNCTION slow(job jsonb, d ruststream.delivery) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ran VALUES (d.queue::text, d.id, d.attempt, 'slow');
	IF d.attempt < 2 THEN
		PERFORM pg_sleep(3600);
	END IF;
END $$;
SELECT ruststream.alter_subscription('leased', handler => 'slow', transactional => true, lease => '1 hour');
SELECT ruststream.alter_subscription('keyed', handler => 'slow', transactional => true);
SQL

sub start_slow
{
	my ($queue) = @_;
	ask("DELETE FROM ran; INSERT INTO $queue (payload) VALUES ('1')");
	wait_for($node, "SELECT count(*) = 1 FROM ruststream.delivery_in_work WHERE subscription = '$queue'",
		"$queue: a delivery is in work");
	return ask("SELECT pid FROM ruststream.delivery_in_work WHERE subscription = '$queue'");
}

# The server's own triggers and functions are no reason to leave a row leased.
ask(<<'SQL');
CREATE TABLE account (id int PRIMARY KEY);
ALTER TABLE leased ADD COLUMN account int REFERENCES account, ADD CHECK (attempt > 0);
SQL
for my $queue ('leased', 'keyed')
{
	my $pid = start_slow($queue);
	ask("SELECT pg_terminate_backend($pid, 60000)");
	wait_for_empty($node, $queue, "$queue: a terminated worker gives its row back at once");
	is(ask("SELECT string_agg(attempt::text, ' ') FROM ran WHERE queue = '$queue'"), '2',
		"$queue: its writes are undone, its attempt was counted");
}

# A stop in the middle of the settlement is one, too.
ask(<<'SQL');
CREATE FUNCTION wait_for_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_advisory_xact_lock(7);
	RETURN OLD;
END $$;
CREATE TRIGGER settles_slowly BEFORE DELETE ON leased FOR EACH ROW EXECUTE FUNCTION wait_for_key();
CREATE FUNCTION quick(job jsonb) RETURNS void LANGUAGE sql AS $$
	INSERT INTO ran SELECT d.queue::text, d.id, d.attempt FROM ruststream.delivery() AS d $$;
SELECT ruststream.alter_subscription('leased', handler => 'quick');
SQL
my $holder = $node->background_psql('postgres');
$holder->query_safe('SELECT pg_advisory_lock(7)');
ask("DELETE FROM ran; INSERT INTO leased (payload) VALUES ('1')");
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'ruststream: leased' AND wait_event = 'advisory'",
	'leased: a settlement is under way');
ask("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'ruststream: leased'");
$holder->query_safe('SELECT pg_advisory_unlock(7)');
$holder->quit;
wait_for_empty($node, 'leased', 'leased: a worker terminated in the middle of its settlement gives its row back');
is(ask("SELECT string_agg(attempt::text, ' ') FROM ran WHERE queue = 'leased'"), '2',
	'leased: there too its writes are undone, its attempt was counted');
ask("DROP TRIGGER settles_slowly ON leased; SELECT ruststream.alter_subscription('leased', handler => 'slow')");

# A process that exits cannot be interrupted, and so runs nobody's code: here that
# of a partition.
ask(<<'SQL');
CREATE TABLE parted (id int PRIMARY KEY, payload jsonb, locked_until timestamptz) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (1) TO (9);
CREATE TRIGGER releases_slowly BEFORE UPDATE ON parted_1 FOR EACH ROW
	WHEN (NEW.locked_until IS NULL) EXECUTE FUNCTION wait_for_key();
SELECT ruststream.attach_queue('parted', 'id', payload_column => 'payload', locked_until_column => 'locked_until');
SELECT ruststream.subscribe('parted', 'parted', 'slow');
SQL
$holder = $node->background_psql('postgres');
$holder->query_safe('SELECT pg_advisory_lock(7)');
ask("DELETE FROM ran; INSERT INTO parted VALUES (1, '1')");
wait_for($node, "SELECT count(*) = 1 FROM ruststream.delivery_in_work WHERE subscription = 'parted'", 'parted: a delivery is in work');
is(ask("SELECT pg_terminate_backend(pid, 60000) FROM ruststream.delivery_in_work WHERE subscription = 'parted'"), 't',
	"parted: a terminated worker runs no trigger of a partition as it leaves");
$holder->query_safe('SELECT pg_advisory_unlock(7)');
$holder->quit;
ask("SELECT ruststream.unsubscribe('parted')");

# Dead, not stopped: the keys of a session end with it, a lease does not.
my $pid = start_slow('keyed');
kill 'KILL', $pid;
wait_for($node, "SELECT pg_postmaster_start_time() IS NOT NULL", 'the server is back');
wait_for_empty($node, 'keyed', 'keyed: a killed worker gives its row back at once');
$pid = start_slow('leased');
kill 'KILL', $pid;
wait_for($node, "SELECT pg_postmaster_start_time() IS NOT NULL", 'the server is back');
is(ask('SELECT attempt, locked_until > now() FROM leased'), '2|t', 'leased: a killed worker leaves its lease');
ask('UPDATE leased SET locked_until = now()');
wait_for_empty($node, 'leased', 'leased: whose end brings the row back');

# ------------------------------------------------------ the server's default

ask("ALTER SYSTEM SET default_transaction_isolation = 'repeatable read'; SELECT pg_reload_conf()");
ask("INSERT INTO leased (payload) VALUES ('1')");
wait_for($node, "SELECT state LIKE 'broken: a lease queue cannot be delivered transactionally at repeatable read%'"
	  . " FROM ruststream.status WHERE subscription = 'leased'", 'leased: a level that does not see its lease stops it');
ask('ALTER SYSTEM RESET default_transaction_isolation; SELECT pg_reload_conf()');
ask('UPDATE leased SET attempt = 2');
wait_for_empty($node, 'leased', 'leased: it goes on when that is mended');

$node->stop;
done_testing();
