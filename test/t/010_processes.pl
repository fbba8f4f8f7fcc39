# Launcher, supervisor and workers: they start, hold nothing while idle, answer
# signals, come back when they end, and leave when they are told to.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $ours = "backend_type LIKE 'ruststream %'";

sub workers
{
	my ($subscription, $count) = @_;
	return "SELECT count(*) = $count FROM pg_stat_activity"
	  . " WHERE backend_type = 'ruststream worker' AND application_name = 'ruststream: $subscription'"
	  . " AND state = 'idle'";
}

# ----------------------------------------------------------------- the start

my $node = new_node('processes', conf => "restart_after_crash = on\nruststream.crash_restart_delay = 100ms");

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE done (id bigint UNIQUE, pid int DEFAULT pg_backend_pid());
SELECT ruststream.create_queue('jobs');
-- inserts the id; a gate holds it up as long as somebody has the lock
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO done (id) VALUES (job.id);
	IF job.payload ? 'gate' THEN
		PERFORM pg_advisory_xact_lock_shared((job.payload->>'gate')::int);
	END IF;
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle', workers => 2);
SQL

wait_for($node, workers('jobs', 2), 'both workers of a new subscription are idle');
is( $node->safe_psql('postgres',
		"SELECT string_agg(application_name, ', ' ORDER BY application_name)"
		  . " FROM pg_stat_activity WHERE $ours"),
	'ruststream launcher, ruststream supervisor: postgres, ruststream: jobs, ruststream: jobs',
	'the application name says for whom');

# ------------------------------------------------------------- nothing is held

is( $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE $ours"
		  . " AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL OR xact_start IS NOT NULL)"),
	'0', 'idle processes are in no transaction');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE $ours"),
	'0', 'idle processes hold no locks');

# ------------------------------------------------------------------- signals

sub pids
{
	return $node->safe_psql('postgres',
		"SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM pg_stat_activity WHERE $ours");
}

my $before = pids();
$node->safe_psql('postgres', "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE $ours");
$node->safe_psql('postgres', "INSERT INTO jobs (payload) VALUES ('{}')");
wait_for_empty($node, 'jobs', 'after a cancel, rows are delivered');
is(pids(), $before, 'a cancel does nothing to idle processes');

for my $kind ('worker', 'supervisor', 'launcher')
{
	my $others = "SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM pg_stat_activity"
	  . " WHERE $ours AND backend_type <> 'ruststream $kind'";
	my $stay = $node->safe_psql('postgres', $others);
	my $old = $node->safe_psql('postgres',
		"SELECT string_agg(pid::text, ',') FROM pg_stat_activity WHERE backend_type = 'ruststream $kind'");
	my $count = scalar(my @all = split /,/, $old);

	$node->safe_psql('postgres', "SELECT pg_terminate_backend(pid, 10000) FROM unnest('{$old}'::int[]) pid");
	wait_for($node,
		"SELECT count(*) = $count FROM pg_stat_activity WHERE backend_type = 'ruststream $kind'"
		  . " AND state = 'idle' AND pid NOT IN ($old)",
		"a terminated $kind comes back");
	is($node->safe_psql('postgres', $others), $stay, "and the other processes stay");
	$node->safe_psql('postgres', "INSERT INTO jobs (payload) VALUES ('{}')");
	wait_for_empty($node, 'jobs', 'and rows are delivered');
}

# A new supervisor knows the workers it did not start.
$node->safe_psql('postgres', "SELECT ruststream.alter_subscription('jobs', workers => 1)");
wait_for($node, workers('jobs', 1), 'a worker too many leaves');
$node->safe_psql('postgres', "SELECT ruststream.alter_subscription('jobs', workers => 3)");
wait_for($node, workers('jobs', 3), 'more workers start');
$node->safe_psql('postgres', "SELECT ruststream.alter_subscription('jobs', workers => 2)");

# -------------------------------------------------------------------- leaving

$node->safe_psql('postgres', "SELECT ruststream.pause('jobs')");
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
	'workers of a paused subscription leave');
# A change that commits while the supervisor waits for a lock, with a snapshot
# that does not show it, is not overlooked: such a wait resets the latch.
my $locker = $node->background_psql('postgres');
$locker->query_safe('BEGIN; LOCK TABLE ruststream.subscription IN ACCESS EXCLUSIVE MODE');
$node->reload;
wait_for($node,
	"SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE backend_type = 'ruststream supervisor'",
	'the supervisor waits for a lock');
$locker->query_safe("SELECT ruststream.resume('jobs'); COMMIT");
wait_for($node, workers('jobs', 2), 'and sees what has changed meanwhile: workers come back');
$locker->quit;

# An orderly stop waits for the delivery in work.
my $gate = $node->background_psql('postgres');
my $in_work = "SELECT count(*) = 1 FROM pg_stat_activity"
  . " WHERE backend_type = 'ruststream worker' AND wait_event = 'advisory'";
$gate->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('postgres', q(INSERT INTO jobs (payload) VALUES ('{"gate": 1}')));
wait_for($node, $in_work, 'a delivery is in work');
$node->append_conf('postgresql.conf', 'ruststream.workers = off');
$node->reload;
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
	'with ruststream.workers = off idle workers leave, the busy one stays');
$gate->query_safe('SELECT pg_advisory_unlock(1)');
wait_for($node, "SELECT NOT EXISTS (SELECT FROM jobs)"
	  . " AND count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
	'it finishes its delivery, and leaves');
$node->append_conf('postgresql.conf', 'ruststream.workers = on');
$node->reload;
wait_for($node, workers('jobs', 2), 'with ruststream.workers = on they come back');

# ------------------------------------------------- a delivery that is cut short

$gate->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('postgres', q(INSERT INTO jobs (payload) VALUES ('{"gate": 1}')));
wait_for($node, $in_work, 'a delivery is in work');
is( $node->safe_psql('postgres',
		"SELECT w.subscription, w.id = j.id::text, w.attempt FROM ruststream.delivery_in_work w, jobs j"),
	'jobs|t|1', 'and can be seen');
$node->safe_psql('postgres',
	"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
	  . " WHERE backend_type = 'ruststream worker' AND wait_event = 'advisory'");
wait_for($node, $in_work, 'when its worker is terminated, another one takes the row');
is($node->safe_psql('postgres', 'SELECT attempt FROM jobs'), '1', 'the attempt is not counted');
$gate->query_safe('SELECT pg_advisory_unlock(1)');
wait_for_empty($node, 'jobs', 'and ends it');

# kill -9: the server restarts, says what was in work, and delivers it.
$gate->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('postgres', q(INSERT INTO jobs (payload) VALUES ('{"gate": 1}')));
wait_for($node, $in_work, 'a delivery is in work');
my $id = $node->safe_psql('postgres', 'SELECT id FROM jobs');
my $victim = $node->safe_psql('postgres',
	"SELECT pid FROM pg_stat_activity WHERE backend_type = 'ruststream worker' AND wait_event = 'advisory'");
my $offset = -s $node->logfile;
ok(kill('KILL', $victim), 'kill -9 of the worker');
$node->wait_for_log(qr/ruststream had row $id of public\.jobs in work for subscription "jobs"/, $offset);
$node->wait_for_log(qr/ruststream starts again in \d+ ms, after 1 crash of the server/, $offset);
wait_for_empty($node, 'jobs', 'the row is delivered after the restart');
is($node->safe_psql('postgres', "SELECT count(*) FROM done WHERE id = $id"), '1', 'once');
eval { $gate->quit };

# The postmaster as well: a restart finds everything.
$node->safe_psql('postgres', "INSERT INTO jobs (payload) VALUES ('{}')");
$node->stop('immediate');
$node->start;
wait_for_empty($node, 'jobs', 'after a restart of the server rows are delivered');

# ---------------------------------------------------------------- what is broken

$node->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('brittle');
CREATE FUNCTION brittle_handler(job brittle) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('brittle', 'brittle', 'brittle_handler');
SQL
wait_for($node, workers('brittle', 1), 'a subscription works');
$node->safe_psql('postgres', 'DROP FUNCTION brittle_handler(brittle)');
$node->safe_psql('postgres', "INSERT INTO brittle (payload) VALUES ('{}')");
wait_for($node,
	"SELECT state LIKE 'broken: %brittle_handler%' FROM ruststream.status WHERE subscription = 'brittle'",
	'without its handler it is broken, and says why');
is($node->safe_psql('postgres', "SELECT state FROM ruststream.status WHERE subscription = 'jobs'"),
	'running', 'and no other one is');
$node->safe_psql('postgres',
	q(CREATE FUNCTION brittle_handler(job brittle) RETURNS void LANGUAGE sql AS ''));
wait_for_empty($node, 'brittle', 'with the handler back it recovers');
wait_for($node, "SELECT state = 'running' FROM ruststream.status WHERE subscription = 'brittle'",
	'and shows it');
$node->safe_psql('postgres', "SELECT ruststream.unsubscribe('brittle')");
wait_for($node,
	"SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'ruststream: brittle'",
	'workers of a subscription that is gone leave');

# An owner who may not connect.
$node->safe_psql('postgres', <<'SQL');
CREATE ROLE clerk LOGIN;
GRANT CREATE ON SCHEMA public TO clerk;
SET SESSION AUTHORIZATION clerk;
SELECT ruststream.create_queue('letters');
CREATE FUNCTION letters_handler(letter letters) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('letters', 'letters', 'letters_handler');
SQL
wait_for($node,
	"SELECT usename = 'clerk' FROM pg_stat_activity WHERE application_name = 'ruststream: letters'",
	'a worker is connected as the owner of its subscription');
$node->safe_psql('postgres', 'REVOKE CONNECT ON DATABASE postgres FROM PUBLIC');
$node->safe_psql('postgres',
	"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'ruststream: letters'");
wait_for($node,
	"SELECT state = 'broken: its owner \"clerk\" may not CONNECT to this database'"
	  . " FROM ruststream.status WHERE subscription = 'letters'",
	'an owner who may not connect is told so');
$node->safe_psql('postgres', 'GRANT CONNECT ON DATABASE postgres TO PUBLIC');
$node->safe_psql('postgres', "SELECT ruststream.alter_subscription('letters', workers => 1)");
wait_for($node, workers('letters', 1), 'and served once he may');

# ---------------------------------------------------------------------- the end

my $start = time;
$node->stop('fast');
cmp_ok(time - $start, '<', 10, 'a fast shutdown does not wait');

# --------------------------------------------------------------- too few slots

my $small = new_node('small', conf => "ruststream.max_workers = 1");
$small->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('first', 'jobs', 'handle');
SQL
wait_for($small, workers('first', 1), 'the only worker slot is taken');
$small->safe_psql('postgres', "SELECT ruststream.subscribe('second', 'jobs', 'handle')");
wait_for($small,
	"SELECT state LIKE '%waiting for a worker slot: raise%' FROM ruststream.status WHERE subscription = 'second'",
	'a subscription without a slot says so');
$small->safe_psql('postgres', "SELECT ruststream.unsubscribe('first')");
wait_for($small, workers('second', 1), 'and gets the slot when it is free');
$small->stop;

# The launcher, the launcher of logical replication, one supervisor, one worker.
$small->append_conf('postgresql.conf', "ruststream.max_workers = 8\nmax_worker_processes = 4");
$small->start;
wait_for($small, workers('second', 1), 'one worker finds a process');
$small->safe_psql('postgres', "SELECT ruststream.subscribe('third', 'jobs', 'handle')");
wait_for($small,
	"SELECT state LIKE '%waiting for a worker slot: raise%' FROM ruststream.status WHERE subscription = 'third'",
	'a subscription without a process says so');
$small->safe_psql('postgres', "SELECT ruststream.pause('second')");
wait_for($small, workers('third', 1), 'and gets the process when it is free');
$small->stop;

# -------------------------------------------------------------- not preloaded

my $plain = new_node('plain', preload => 0);
$plain->safe_psql('postgres', <<'SQL');
CREATE TABLE done (id bigint UNIQUE);
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE sql AS 'INSERT INTO done VALUES (job.id)';
SELECT ruststream.subscribe('jobs', 'jobs', 'handle');
INSERT INTO jobs (payload) VALUES ('{}'), ('{}');
CALL ruststream.drain('jobs');
SQL
is($plain->safe_psql('postgres', 'SELECT count(*) FROM done'), '2',
	'without preload, inserting and draining work');
is($plain->safe_psql('postgres', 'SELECT count(*) FROM ruststream.stat_worker'), '0',
	'and there are no workers to see');
is($plain->safe_psql('postgres', "LOAD 'ruststream'; SHOW ruststream.max_workers"), '8',
	'settings are defined');
$plain->safe_psql('postgres', 'DROP EXTENSION ruststream CASCADE');
$plain->stop;

done_testing();
