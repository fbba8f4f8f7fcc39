# The heartbeat: it extends the leases of deliveries in work, whatever blocks one
# of them; comes back when it ends; holds nothing while idle; runs as the owner
# and as nobody else; and a delivery that has lost its row settles nothing.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('heartbeat', conf => <<'CONF');
restart_after_crash = on
ruststream.crash_restart_delay = 100ms
ruststream.max_workers = 16
include_if_exists = 'failpoint.conf'
CONF

my $heartbeat = "backend_type = 'ruststream heartbeat' AND datname = 'postgres'";

sub heartbeat_of
{
	my ($role) = @_;
	return $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE $heartbeat AND usename = '$role'");
}

# Wait until the delivery of a row has run for so many leases of one second.
sub outlives
{
	my ($queue, $id, $leases, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return wait_for($node,
		"SELECT clock_timestamp() > since + interval '$leases s' FROM ruststream.delivery_in_work"
		  . " WHERE queue = '$queue'::regclass AND id = '$id'", $what);
}

# Wait until the lease of a row, as the row says it, has been extended that far.
sub is_extended
{
	my ($queue, $id, $leases, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return wait_for($node,
		"SELECT q.locked_until > w.since + interval '$leases s'"
		  . " FROM ruststream.delivery_in_work w JOIN $queue q ON w.id = q.id::text"
		  . " WHERE w.queue = '$queue'::regclass AND q.id = $id", $what);
}

sub in_work
{
	my ($queue, $ids, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return wait_for($node,
		"SELECT coalesce(string_agg(id, ' ' ORDER BY id), '') FROM ruststream.delivery_in_work"
		  . " WHERE queue = '$queue'::regclass", $what, $ids);
}

# How often a row's handler has begun, committed or not.
sub begun
{
	my ($id) = @_;
	return $node->safe_psql('postgres',
		"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM begun_$id");
}

# A row; its handler waits as long as somebody holds the advisory lock of its id.
sub publish
{
	my ($queue, $id, $payload) = @_;

	$node->safe_psql('postgres', "CREATE SEQUENCE begun_$id;"
		  . " GRANT ALL ON SEQUENCE begun_$id TO PUBLIC;"
		  . " INSERT INTO $queue (id, payload) OVERRIDING SYSTEM VALUE VALUES ($id, '$payload')");
	return;
}

$node->safe_psql('postgres', <<'SQL');
CREATE ROLE clerk LOGIN;
CREATE ROLE deputy LOGIN;
GRANT ALL ON SCHEMA public TO clerk, deputy;
SET SESSION AUTHORIZATION clerk;
CREATE TABLE done (queue text, id bigint, pid integer DEFAULT pg_backend_pid());
GRANT ALL ON done TO PUBLIC;
SELECT ruststream.create_queue('jobs', form => 'lease');
CREATE FUNCTION handle(job jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	PERFORM nextval('begun_' || job.id);
	INSERT INTO done VALUES ('jobs', job.id);
	IF job.payload ? 'touch' THEN
		UPDATE jobs SET headers = '{"touched": "yes"}' WHERE id = job.id;
	END IF;
	PERFORM pg_advisory_xact_lock_shared(job.id);
	RETURN CASE WHEN job.payload ? 'retry' AND ruststream.attempt() = 1
		THEN ruststream.retry() ELSE ruststream.ack() END;
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle', workers => 3, lease => '1 s', poll_interval => '100 ms');
SQL

wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE $heartbeat AND usename = 'clerk'"
	  . " AND application_name = 'ruststream heartbeat: clerk' AND state = 'idle'",
	'the owner of a lease subscription gets a heartbeat, connected as that owner');

# ------------------------------------------------------------ nothing is held

is( $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE $heartbeat"
		  . " AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL OR xact_start IS NOT NULL)"),
	'0', 'while idle it is in no transaction');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE $heartbeat"),
	'0', 'and holds no locks');
my $pid = heartbeat_of('clerk');
$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
$node->reload;

# ------------------------------------------------- a handler outlives its lease

my $gate = $node->background_psql('postgres');
$gate->query_safe('SELECT pg_advisory_lock(i) FROM generate_series(1, 99) i');

publish('jobs', 1, '{}');
publish('jobs', 2, '{"touch": true}');
publish('jobs', 3, '{"retry": true}');
is_extended('jobs', 1, 4, 'the lease of a delivery in work is extended, again and again');
outlives('jobs', 2, 4, 'a handler that has updated its own row outlives its lease as well');
in_work('jobs', '1 2 3', 'the rows are in work still');
is(join(' ', map { begun($_) } 1 .. 3), '1 1 1', 'and no second delivery of them has begun');
is(heartbeat_of('clerk'), $pid, 'a cancel did nothing to the idle heartbeat');
ok( $node->safe_psql('postgres',
		"SELECT lease_until > since + interval '4 s' FROM ruststream.delivery_in_work WHERE id = '1'") eq 't',
	'until when it is leased can be seen');

$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
is_extended('jobs', 1, 6, 'a cancel that hits an extension delays it at most');
$gate->query_safe('SELECT pg_advisory_unlock(i) FROM generate_series(1, 99) i');
wait_for_empty($node, 'jobs', 'the rows are acked');
is( $node->safe_psql('postgres', "SELECT string_agg(id::text, ' ' ORDER BY id) FROM done"),
	'1 2 3', 'once each');
is(join(' ', map { begun($_) } 1 .. 3), '1 1 2', 'after the deliveries they asked for');
is( $node->safe_psql('postgres',
		"SELECT lease_lost || ' ' || failed FROM ruststream.stat_subscription WHERE subscription = 'jobs'"),
	'0 0', 'and no lease was lost');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE $heartbeat AND pid = $pid"),
	'1', 'by the heartbeat that was there at the beginning');
wait_for($node,
	"SELECT state = 'idle' AND xact_start IS NULL FROM pg_stat_activity WHERE pid = $pid",
	'which is idle again');

# ------------------------------------------------ what blocks one delays no other

# Three ways to be blocked: the handler's own transaction has updated the row, a
# foreign session has locked it, and a trigger of the table sleeps.
$node->safe_psql('postgres', <<'SQL');
SET SESSION AUTHORIZATION clerk;
SELECT ruststream.create_queue('slow', form => 'lease');
CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('application_name') LIKE 'ruststream heartbeat%' THEN
		PERFORM pg_sleep(600);
	END IF;
	RETURN NEW;
END $$;
CREATE TRIGGER dawdle BEFORE UPDATE ON slow FOR EACH ROW EXECUTE FUNCTION dawdle();
CREATE FUNCTION handle(job slow) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM nextval('begun_' || job.id);
	PERFORM pg_advisory_xact_lock_shared(job.id);
END $$;
SELECT ruststream.subscribe('slow', 'slow', 'handle(slow)', workers => 2, lease => '2 s');
SQL
$gate->query_safe('SELECT pg_advisory_lock(i) FROM generate_series(1, 99) i');
publish('slow', 10, '{}');
publish('slow', 11, '{}');
publish('jobs', 12, '{"touch": true}');
publish('jobs', 13, '{}');
publish('jobs', 14, '{}');
in_work('jobs', '12 13 14', 'three rows are in work');
in_work('slow', '10 11', 'and two that cannot be extended');
my $locker = $node->background_psql('postgres');
$locker->query_safe('BEGIN; SELECT id FROM jobs WHERE id = 13 FOR UPDATE');

my $deadline = time + $PostgreSQL::Test::Utils::timeout_default;
my ($looks, $expired, $enough) = (0, 0, '');
while ($enough ne 't' && time < $deadline)
{
	my $live;
	($live, $enough) = split /\|/, $node->safe_psql('postgres',
		"SELECT q.locked_until > clock_timestamp(), clock_timestamp() > w.since + interval '6 s'"
		  . " FROM jobs q JOIN ruststream.delivery_in_work w ON w.id = q.id::text WHERE q.id = 14");
	$looks++;
	$expired++ if $live ne 't';
}
is($enough, 't', 'one row is in work for six leases');
is($expired, 0, "and its lease has never run out ($looks looks)");
is(join(' ', map { begun($_) } 12 .. 14), '1 1 1', 'no second delivery has begun');
$locker->query_safe('COMMIT');
is_extended('jobs', 13, 8, 'a row that was locked is extended once it is not');
$gate->query_safe('SELECT pg_advisory_unlock(i) FROM generate_series(1, 99) i');
wait_for_empty($node, 'jobs', 'the rows end');
is(join(' ', map { begun($_) } 12 .. 14), '1 1 1', 'after one delivery each');
wait_for_empty($node, 'slow', 'and so do those that were not extended');
$node->safe_psql('postgres', "SELECT ruststream.unsubscribe('slow')");
$locker->quit;

# ------------------------------------------------------------------ it comes back

$gate->query_safe('SELECT pg_advisory_lock(20)');
publish('jobs', 20, '{}');
is_extended('jobs', 20, 2, 'a lease is extended');
$pid = heartbeat_of('clerk');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid, 10000)");
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE $heartbeat AND usename = 'clerk' AND pid <> $pid",
	'a terminated heartbeat comes back');
is_extended('jobs', 20, 6, 'and goes on');
is(begun(20), '1', 'there was no second delivery');

# A new supervisor knows the heartbeat it did not start.
$pid = heartbeat_of('clerk');
$node->safe_psql('postgres',
	"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE backend_type = 'ruststream supervisor'");
wait_for($node,
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream supervisor' AND state = 'idle'",
	'a terminated supervisor comes back');
is(heartbeat_of('clerk'), $pid, 'the heartbeat stays');
is_extended('jobs', 20, 8, 'and goes on');

# kill -9: the server restarts, and the row comes back when its lease ends.
ok(kill('KILL', $pid), 'kill -9 of the heartbeat');
eval { $gate->quit };
poll_until($node, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)");
wait_for_empty($node, 'jobs', 'after the restart the row is delivered');
is($node->safe_psql('postgres', 'SELECT count(*) FROM done WHERE id = 20'), '1', 'with one effect');
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE $heartbeat AND usename = 'clerk' AND state = 'idle'",
	'and the heartbeat is there again');

# --------------------------------------------------- stopped until the row is lost

# Another client takes the row, as the contract has it.
my $take = "UPDATE jobs SET locked_until = clock_timestamp() + interval '1 h', attempt = attempt + 1"
  . " WHERE id = %d AND locked_until <= clock_timestamp() RETURNING locked_until";

sub worker_of
{
	my ($id) = @_;
	return $node->safe_psql('postgres', "SELECT pid FROM ruststream.delivery_in_work WHERE id = '$id'");
}

# With one worker only, stop it and the heartbeat, take the row once its lease
# has ended, and let them go on.
$node->safe_psql('postgres', "SELECT ruststream.alter_subscription('jobs', workers => 1)");
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
	'one worker stays');
for my $payload ('{}', '{"retry": true}')
{
	my $id = $payload eq '{}' ? 30 : 31;
	my $lost = $node->safe_psql('postgres',
		"SELECT lease_lost FROM ruststream.stat_subscription WHERE subscription = 'jobs'");

	$gate = $node->background_psql('postgres');
	$gate->query_safe("SELECT pg_advisory_lock($id)");
	publish('jobs', $id, $payload);
	is_extended('jobs', $id, 1, 'a lease is extended');
	my @stopped = (worker_of($id), heartbeat_of('clerk'));
	is(kill('STOP', @stopped), 2, 'worker and heartbeat are stopped');
	wait_for($node, "SELECT locked_until <= clock_timestamp() FROM jobs WHERE id = $id", 'the lease ends');
	my $theirs = $node->safe_psql('postgres', sprintf($take, $id));
	isnt($theirs, '', 'another client takes the row');
	$gate->quit;
	is(kill('CONT', @stopped), 2, 'worker and heartbeat go on');
	wait_for($node,
		"SELECT lease_lost = $lost + 1 FROM ruststream.stat_subscription WHERE subscription = 'jobs'",
		'the lease is counted as lost');
	wait_for($node,
		"SELECT message LIKE '%lease was lost%' FROM ruststream.failure WHERE id = '$id'", 'and recorded');
	is( $node->safe_psql('postgres', "SELECT locked_until, attempt FROM jobs WHERE id = $id"),
		"$theirs|3", 'nothing was settled');
	is($node->safe_psql('postgres', "SELECT count(*) FROM done WHERE id = $id"), '0',
		'and nothing that the handler wrote is there');
	$node->safe_psql('postgres', "UPDATE jobs SET locked_until = NULL WHERE id = $id");
	wait_for_empty($node, 'jobs', 'the other client gives it back: it is delivered');
	is($node->safe_psql('postgres', "SELECT count(*) FROM done WHERE id = $id"), '1', 'once');
}

# Another worker of the same subscription.
$node->safe_psql('postgres', "SELECT ruststream.alter_subscription('jobs', workers => 2)");
$gate = $node->background_psql('postgres');
$gate->query_safe('SELECT pg_advisory_lock(32)');
publish('jobs', 32, '{}');
in_work('jobs', '32', 'a row is in work');
my @stopped = (worker_of(32), heartbeat_of('clerk'));
is(kill('STOP', @stopped), 2, 'worker and heartbeat are stopped');
$gate->quit;
wait_for_empty($node, 'jobs', 'the other worker takes the row and ends it');
is(kill('CONT', @stopped), 2, 'worker and heartbeat go on');
wait_for($node,
	"SELECT count(*) = 1 FROM ruststream.failure WHERE id = '32' AND message LIKE '%lease was lost%'",
	'the first worker has lost the lease');
is($node->safe_psql('postgres', 'SELECT count(*) FROM done WHERE id = 32 AND pid <> ' . $stopped[0]), '1',
	'the effect is the other one\'s');
is($node->safe_psql('postgres', 'SELECT count(*) FROM done WHERE id = 32'), '1', 'and there is only one');

# ------------------------------------------------------------------ as the owner

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE extended_by (queue text, role text, kind text);
GRANT ALL ON extended_by TO PUBLIC;
CREATE FUNCTION note_extension() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO extended_by SELECT TG_TABLE_NAME, current_user, backend_type
	FROM pg_stat_activity WHERE pid = pg_backend_pid();
	PERFORM set_config('application_name', 'not any more', false), pg_advisory_lock(4711);
	EXECUTE 'DECLARE left_open CURSOR WITH HOLD FOR SELECT set_config(''application_name'', ''nor now'', false)';
	CREATE TEMPORARY TABLE litter ();
	RETURN NULL;
END $$;
CREATE TRIGGER note AFTER UPDATE OF locked_until ON jobs FOR EACH ROW
	WHEN (current_setting('application_name') LIKE 'ruststream heartbeat%') EXECUTE FUNCTION note_extension();
SET SESSION AUTHORIZATION deputy;
SELECT ruststream.create_queue('letters', form => 'lease');
CREATE FUNCTION handle(letter letters) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM nextval('begun_' || letter.id), pg_advisory_xact_lock_shared(letter.id);
END $$;
SELECT ruststream.subscribe('letters', 'letters', 'handle(letters)', lease => '1 s');
RESET SESSION AUTHORIZATION;
CREATE TRIGGER note AFTER UPDATE OF locked_until ON letters FOR EACH ROW
	WHEN (current_setting('application_name') LIKE 'ruststream heartbeat%') EXECUTE FUNCTION note_extension();
SQL
wait_for($node,
	"SELECT string_agg(usename, ' ' ORDER BY usename) = 'clerk deputy' FROM pg_stat_activity WHERE $heartbeat",
	'each owner has a heartbeat');
$gate = $node->background_psql('postgres');
$gate->query_safe('SELECT pg_advisory_lock(i) FROM generate_series(40, 41) i');
publish('jobs', 40, '{}');
publish('letters', 41, '{}');
is_extended('jobs', 40, 3, 'the lease of one is extended');
is_extended('letters', 41, 3, 'and that of the other');
is( $node->safe_psql('postgres',
		"SELECT string_agg(DISTINCT queue || ' ' || role || ' ' || kind, ', ') FROM extended_by"),
	'jobs clerk ruststream heartbeat, letters deputy ruststream heartbeat',
	'triggers of the table run as its owner');
cmp_ok($node->safe_psql('postgres', 'SELECT count(*) FROM extended_by'), '>=', 6,
	'at each extension: what they leave in the session is removed');
$node->safe_psql('postgres', "REVOKE UPDATE ON letters FROM deputy");
$node->wait_for_log(qr/cannot extend the lease of row 41 .*: permission denied for table letters/);
$node->safe_psql('postgres', "GRANT UPDATE ON letters TO deputy");
is_extended('letters', 41, 6, 'without the right to, a lease cannot be extended; with it again, it is');
$gate->quit;
wait_for_empty($node, 'jobs', 'the one is delivered');
wait_for_empty($node, 'letters', 'and the other');
$node->safe_psql('postgres', 'DROP TRIGGER note ON jobs; DROP TRIGGER note ON letters');

$node->safe_psql('postgres', "SELECT ruststream.pause('letters')");
wait_for($node,
	"SELECT string_agg(usename, ' ' ORDER BY usename) = 'clerk' FROM pg_stat_activity WHERE $heartbeat",
	'without a lease subscription that runs, the heartbeat leaves');

SKIP:
{
	skip 'a role without LOGIN can be served from PostgreSQL 17 on', 2
	  if $node->pg_version >= 17;
	$node->safe_psql('postgres', "SELECT ruststream.resume('letters')");
	wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE $heartbeat AND usename = 'deputy'",
		'with it, the heartbeat comes back');
	$node->safe_psql('postgres', 'ALTER ROLE deputy NOLOGIN;'
		  . " SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'deputy'");
	wait_for($node,
		"SELECT state LIKE '%its owner \"deputy\" has no LOGIN%' FROM ruststream.status WHERE subscription = 'letters'",
		'an owner that cannot be connected as is told so');
}
$node->safe_psql('postgres', "SELECT ruststream.unsubscribe('letters')");

# --------------------------------------------------------- it dies at each point

SKIP:
{
	skip 'this build has no failure points', 1
	  if $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_settings WHERE name = 'ruststream.failpoint'") eq '0';

	my $id = 50;
	for my $point (qw(extension_announced extension_written extension_committed))
	{
		append_to_file($node->data_dir . '/failpoint.conf', "ruststream.failpoint = '$point:2'\n");
		$node->reload;
		$gate = $node->background_psql('postgres');
		$gate->query_safe("SELECT pg_advisory_lock($id)");
		my $offset = -s $node->logfile;
		publish('jobs', $id, '{}');
		$node->wait_for_log(qr/failure point "$point:2" reached/, $offset);
		append_to_file($node->data_dir . '/failpoint.conf', "ruststream.failpoint = ''\n");
		poll_until($node, 'SELECT pg_reload_conf()');
		eval { $gate->quit };
		wait_for_empty($node, 'jobs', "after a death at $point the row is delivered");
		is($node->safe_psql('postgres', "SELECT count(*) FROM done WHERE id = $id"), '1', 'with one effect');
		$id++;
	}
}

# ------------------------------------------------------------------- it leaves

$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', <<'SQL');
CREATE EXTENSION ruststream;
SELECT ruststream.create_queue('jobs', form => 'lease');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE sql AS 'SELECT pg_sleep(600)';
SELECT ruststream.subscribe('jobs', 'jobs', 'handle', lease => '1 s');
INSERT INTO jobs (payload) VALUES ('{}');
SQL
wait_for($node, "SELECT lease_until > since + interval '2 s' FROM ruststream.delivery_in_work",
	'in another database a lease is extended', 't', 'other');
my $start = time;
$node->safe_psql('postgres', 'DROP DATABASE other');
cmp_ok(time - $start, '<', 4, 'DROP DATABASE is not delayed');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE $heartbeat"), '1',
	'the heartbeats of other databases stay');
$start = time;
$node->safe_psql('postgres', 'DROP EXTENSION ruststream CASCADE');
cmp_ok(time - $start, '<', 4, 'DROP EXTENSION is not delayed');
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'ruststream heartbeat'",
	'and the heartbeat is gone');
$start = time;
$node->stop('fast');
cmp_ok(time - $start, '<', 10, 'a fast shutdown does not wait');

# --------------------------------------------------------------- too few processes

# The launcher, the launcher of logical replication, one supervisor, and one more.
my $small = new_node('few', conf => 'max_worker_processes = 4');
$small->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('plain');
CREATE FUNCTION handle(job plain) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('plain', 'plain', 'handle(plain)');
SQL
wait_for($small, "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
	'the last process is a worker');
$small->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('jobs', form => 'lease');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('jobs', 'jobs', 'handle(jobs)');
SQL
wait_for($small,
	"SELECT state LIKE '%waiting for a process for its heartbeat: raise max_worker_processes%'"
	  . " FROM ruststream.status WHERE subscription = 'jobs'",
	'a subscription without a process for its heartbeat says so');
$small->safe_psql('postgres', "SELECT ruststream.unsubscribe('plain')");
wait_for($small, "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream heartbeat'",
	'the heartbeat gets the process when it is free');
wait_for($small,
	"SELECT state LIKE '%waiting for a worker slot: raise%' FROM ruststream.status WHERE subscription = 'jobs'",
	'then it is the worker that waits');
$small->stop;

done_testing();
