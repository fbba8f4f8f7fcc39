# What a subscription depends on, and what becomes of it when that changes: its
# owner (settings, row-level security, LOGIN, name, rights, existence), its
# handler, its table's columns and index.  It stops alone, says why in
# ruststream.status, loses no task, and goes on when the cause is mended.
use strict;
use warnings;

use FindBin;
use IPC::Run;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('owner', conf => <<'CONF');
log_statement = none
ruststream.max_workers = 24
ruststream.crash_restart_delay = 50ms
CONF
my $version = $node->safe_psql('postgres', "SELECT current_setting('server_version_num')::integer / 10000");

sub as
{
	my ($role, $sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '-U', $role ]);
}

# Each owner has a schema, a queue and a handler that writes what it sees.
sub make_owner
{
	my ($role) = @_;

	$node->safe_psql('postgres', "CREATE ROLE $role LOGIN; CREATE SCHEMA $role AUTHORIZATION $role");
	as($role, <<"SQL");
CREATE TABLE $role.done (id bigint, who name DEFAULT current_user, settings text);
SELECT ruststream.create_queue('$role.jobs');
CREATE FUNCTION $role.handle(job $role.jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS \$\$
BEGIN
	IF job.payload ? 'sleep' THEN
		PERFORM pg_catalog.pg_sleep((job.payload OPERATOR(pg_catalog.->>) 'sleep')::float8);
	END IF;
	IF job.payload ? 'lock' THEN
		PERFORM pg_catalog.pg_advisory_xact_lock(4711);
	END IF;
	INSERT INTO $role.done (id, settings) VALUES (job.id,
		pg_catalog.concat_ws(' ', pg_catalog.current_setting('work_mem'), pg_catalog.current_setting('search_path'),
			pg_catalog.current_setting('transaction_isolation')));
	RETURN ruststream.ack();
END \$\$;
SELECT ruststream.subscribe('$role', '$role.jobs', '$role.handle', retry_delay => '10 ms');
SQL
}

sub put
{
	my ($role, $payload) = @_;
	$node->safe_psql('postgres', "INSERT INTO $role.jobs (payload) VALUES ('$payload')");
}

sub state_of
{
	my ($role) = @_;
	return "SELECT state FROM ruststream.status WHERE subscription = '$role'";
}

sub delivers
{
	my ($role, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	put($role, '{}');
	return wait_for_empty($node, "$role.jobs", $what);
}

# The subscription says why it does not work; its neighbour works; no task goes.
sub stops
{
	my ($role, $why, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	put($role, '{}');
	wait_for($node, "SELECT EXISTS (SELECT FROM ruststream.status WHERE subscription = '$role'"
		  . " AND state LIKE 'broken: $why')", "$what: it stops, and says why")
	  or diag($node->safe_psql('postgres', state_of($role)));
	note($node->safe_psql('postgres', state_of($role)));
	is($node->safe_psql('postgres', "SELECT count(*) > 0 FROM $role.jobs"), 't', "$what: its task waits");
	delivers('neighbour', "$what: others go on");
}

sub recovers
{
	my ($role, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	wait_for_empty($node, "$role.jobs", "$what: mended, it goes on");
	wait_for($node, state_of($role), "$what: and says so", 'running');
	# Starts that have failed put off the next ones, but not those of a changed
	# registration: so that this does not take minutes.
	$node->safe_psql('postgres', "UPDATE ruststream.subscription SET name = name WHERE name = '$role'");
}

# A fresh worker: settings of roles are read when it connects.
sub reconnect
{
	my ($role) = @_;
	$node->safe_psql('postgres', "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
		  . " WHERE backend_type = 'ruststream worker' AND application_name = 'ruststream: $role'");
}

make_owner('neighbour');
make_owner('app');
delivers('neighbour', 'the neighbour delivers');
delivers('app', 'the owner delivers');

# ------------------------------------------------------------------- settings

# Those that shape what the handler does apply to it, as in any session of the
# owner; our own statements resolve nothing through its path, whatever is there.
$node->safe_psql('postgres', 'CREATE SCHEMA trap AUTHORIZATION app');
as('app', <<'SQL');
CREATE FUNCTION trap.sprung(anyelement, anyelement) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'the trap has sprung';
END $$;
CREATE FUNCTION trap.sprung(bigint, bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'the trap has sprung';
END $$;
CREATE OPERATOR trap.= (FUNCTION = trap.sprung, LEFTARG = anyelement, RIGHTARG = anyelement);
CREATE OPERATOR trap.<= (FUNCTION = trap.sprung, LEFTARG = anyelement, RIGHTARG = anyelement);
CREATE OPERATOR trap.> (FUNCTION = trap.sprung, LEFTARG = anyelement, RIGHTARG = anyelement);
CREATE OPERATOR trap.+ (FUNCTION = trap.sprung, LEFTARG = bigint, RIGHTARG = bigint);
CREATE TABLE trap.jobs (id bigint);
CREATE DOMAIN trap.text AS pg_catalog.text CHECK (false);
CREATE DOMAIN trap.int8 AS pg_catalog.int8 CHECK (false);
ALTER ROLE app SET search_path = trap, pg_catalog, app;
ALTER ROLE app SET work_mem = '7MB';
ALTER ROLE app SET default_transaction_isolation = 'repeatable read';
ALTER ROLE app SET enable_indexscan = off;
SQL
reconnect('app');
delivers('app', 'with settings of its own the owner delivers');
is($node->safe_psql('postgres', 'SELECT settings FROM app.done ORDER BY id DESC LIMIT 1'),
	'7MB trap, pg_catalog, app repeatable read', 'which its handler sees');
$node->safe_psql('postgres', q{
	ALTER ROLE app RESET search_path;
	ALTER ROLE app RESET enable_indexscan;
	UPDATE ruststream.queue SET isolation = 'serializable' WHERE relation = 'app.jobs'::regclass});
reconnect('app');
delivers('app', 'with a level declared for its queue');
is($node->safe_psql('postgres', "SELECT settings FROM app.done ORDER BY id DESC LIMIT 1"),
	'7MB "$user", public serializable', 'that holds, whatever the default');
$node->safe_psql('postgres', q{
	ALTER ROLE app RESET ALL;
	UPDATE ruststream.queue SET isolation = NULL WHERE relation = 'app.jobs'::regclass});

# A delivery is no statement of a client: statement_timeout does not end it,
# as it ends no background worker's; lock_timeout ends a wait, which is a
# failure like any other.
$node->safe_psql('postgres', q{ALTER ROLE app SET statement_timeout = '20ms'; ALTER ROLE app SET lock_timeout = '20ms';
	ALTER ROLE app SET idle_in_transaction_session_timeout = '20ms'});
reconnect('app');
put('app', '{"sleep": "0.2"}');
wait_for_empty($node, 'app.jobs', 'statement_timeout does not end a delivery');
is($node->safe_psql('postgres', "SELECT count(*) FROM ruststream.failure WHERE subscription = 'app'"),
	'0', 'nor is it a failure');
my ($in, $out) = ("SELECT pg_advisory_lock(4711);\n\\echo held\n", '');
my $holder = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres') ], '<', \$in, '>', \$out);
IPC::Run::pump($holder) until $out =~ /held/;
put('app', '{"lock": true}');
wait_for($node, "SELECT count(*) > 0 FROM ruststream.failure WHERE subscription = 'app' AND sqlstate = '55P03'",
	'lock_timeout ends a wait for a lock, a failure');
$in .= "SELECT pg_advisory_unlock(4711);\n\\q\n";
IPC::Run::finish($holder);
wait_for_empty($node, 'app.jobs', 'the task is tried again');
$node->safe_psql('postgres', 'ALTER ROLE app RESET ALL');

# A session that may not write can deliver nothing.
$node->safe_psql('postgres', 'ALTER ROLE app SET default_transaction_read_only = on');
reconnect('app');
stops('app', '%read-only transaction%', 'a read-only owner');
$node->safe_psql('postgres', 'ALTER ROLE app RESET ALL');
recovers('app', 'a read-only owner');

# --------------------------------------------------------- row-level security

# Forced upon the owner it hides rows from its own subscription, and where it
# forbids a settlement the task is neither lost nor done.
as('app', <<'SQL');
ALTER TABLE app.jobs ENABLE ROW LEVEL SECURITY;
CREATE POLICY visible ON app.jobs FOR SELECT USING (NOT payload ? 'hidden');
CREATE POLICY inserted ON app.jobs FOR INSERT WITH CHECK (true);
CREATE POLICY changed ON app.jobs FOR UPDATE USING (NOT payload ? 'hidden');
CREATE POLICY ended ON app.jobs FOR DELETE USING (NOT payload ? 'undeletable');
SQL
put('app', '{"hidden": true, "undeletable": true}');
wait_for_empty($node, 'app.jobs', 'row-level security that is not forced does not bind the owner');
as('app', 'ALTER TABLE app.jobs FORCE ROW LEVEL SECURITY');
put('app', '{"hidden": true}');
put('app', '{"seen": true}');
wait_for($node, "SELECT count(*) = 0 FROM app.jobs WHERE payload ? 'seen'",
	'forced, what the owner may see is delivered');
is($node->safe_psql('postgres', 'SELECT count(*) FROM app.jobs'), '1', 'what it may not see waits');
as('app', 'ALTER POLICY visible ON app.jobs USING (true); ALTER POLICY changed ON app.jobs USING (true)');
wait_for_empty($node, 'app.jobs', 'until it may');

put('app', '{"undeletable": true}');
wait_for($node, q{SELECT count(*) > 1 FROM ruststream.failure
	WHERE subscription = 'app' AND message LIKE 'the settlement of row % changed nothing'},
	'a settlement that a policy forbids has failed');
is($node->safe_psql('postgres', 'SELECT count(*) FROM app.jobs AS j JOIN app.done AS d USING (id)'), '0',
	'the task has had no effect');
as('app', 'ALTER POLICY ended ON app.jobs USING (true)');
wait_for_empty($node, 'app.jobs', 'and is delivered when the policy lets it end');

# row_security = off says: rather an error than rows left out.
$node->safe_psql('postgres', 'ALTER ROLE app SET row_security = off');
reconnect('app');
stops('app', '%row-level security%', 'row_security = off');
$node->safe_psql('postgres', 'ALTER ROLE app RESET row_security');
recovers('app', 'row_security = off');
as('app', 'ALTER TABLE app.jobs NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY');

# ------------------------------------------------------------------ the owner

# From 17 on a worker needs no LOGIN.
$node->safe_psql('postgres', 'ALTER ROLE app NOLOGIN');
reconnect('app');
if ($version < 17)
{
	stops('app', '%LOGIN%', 'NOLOGIN');
}
else
{
	put('app', '{}');
	wait_for_empty($node, 'app.jobs', 'NOLOGIN: it delivers all the same');
}
$node->safe_psql('postgres', 'ALTER ROLE app LOGIN');
recovers('app', 'NOLOGIN');

$node->safe_psql('postgres', 'REVOKE CONNECT ON DATABASE postgres FROM PUBLIC; GRANT CONNECT ON DATABASE postgres TO neighbour');
reconnect('app');
stops('app', '%CONNECT%', 'no CONNECT');
$node->safe_psql('postgres', 'GRANT CONNECT ON DATABASE postgres TO PUBLIC');
recovers('app', 'no CONNECT');

$node->safe_psql('postgres', 'ALTER ROLE app RENAME TO application');
put('app', '{}');
wait_for_empty($node, 'app.jobs', 'renamed, the owner delivers');
is($node->safe_psql('postgres', 'SELECT who FROM app.done ORDER BY id DESC LIMIT 1'), 'application',
	'under its new name');
is($node->safe_psql('postgres', "SELECT owner FROM ruststream.status WHERE subscription = 'app'"), 'application',
	'which status shows');
reconnect('app');
put('app', '{}');
wait_for_empty($node, 'app.jobs', 'and a new worker does so too');
$node->safe_psql('postgres', 'ALTER ROLE application RENAME TO app');

# A right that is lost and granted again: of the handler, of the schema, of the
# table (somebody else's here).
$node->safe_psql('postgres', 'REVOKE ALL ON FUNCTION app.handle(app.jobs) FROM PUBLIC, app');
stops('app', '%may not execute%', 'no EXECUTE');
$node->safe_psql('postgres', 'GRANT EXECUTE ON FUNCTION app.handle(app.jobs) TO app');
recovers('app', 'no EXECUTE');

$node->safe_psql('postgres', 'ALTER TABLE app.jobs OWNER TO neighbour; GRANT USAGE ON SCHEMA app TO neighbour;
	GRANT SELECT, UPDATE, INSERT ON app.jobs TO app');
stops('app', '%DELETE%', 'a table given away');
$node->safe_psql('postgres', 'GRANT DELETE ON app.jobs TO app');
recovers('app', 'a table given away');
$node->safe_psql('postgres', 'ALTER TABLE app.jobs OWNER TO app');

# A superuser delivers no task of somebody else's table.
$node->safe_psql('postgres', 'ALTER ROLE app SUPERUSER; ALTER TABLE app.jobs OWNER TO neighbour');
stops('app', '%superuser%', 'a superuser and a table of somebody else');
$node->safe_psql('postgres', 'ALTER TABLE app.jobs OWNER TO app; ALTER ROLE app NOSUPERUSER');
recovers('app', 'a superuser and a table of somebody else');

# ------------------------------------------------- handler, columns and index

as('app', 'ALTER FUNCTION app.handle(app.jobs) RENAME TO gone');
delivers('app', 'a handler renamed is still the handler');
as('app', 'ALTER FUNCTION app.gone(app.jobs) RENAME TO handle');
delivers('app', 'and back again');

my $handler = $node->safe_psql('postgres', "SELECT pg_get_functiondef('app.handle'::regproc)");
as('app', 'DROP FUNCTION app.handle');
stops('app', '%does not exist', 'a handler dropped');
as('app', $handler);
recovers('app', 'a handler dropped');
# Found again by its name; registered again, it is known whatever its name.
as('app', q{SELECT ruststream.alter_subscription('app', handler => 'app.handle')});

as('app', q{CREATE OR REPLACE FUNCTION app.handle(job app.jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
	BEGIN INSERT INTO app.done (id, settings) VALUES (job.id, 'replaced'); RETURN ruststream.ack(); END $$});
delivers('app', 'a handler replaced is called');
is($node->safe_psql('postgres', 'SELECT settings FROM app.done ORDER BY id DESC LIMIT 1'), 'replaced',
	'as it is now');

as('app', 'ALTER TABLE app.jobs RENAME COLUMN attempt TO tries');
stops('app', '%attempt%', 'a column renamed');
as('app', 'ALTER TABLE app.jobs RENAME COLUMN tries TO attempt');
recovers('app', 'a column renamed');

as('app', 'ALTER TABLE app.jobs DROP COLUMN attempt');
stops('app', '%attempt%', 'a column dropped');
as('app', 'ALTER TABLE app.jobs ADD COLUMN attempt integer NOT NULL DEFAULT 1');
recovers('app', 'a column dropped');

# What the handler does not care about may come and go; the row is passed as it
# is at the time.
as('app', 'ALTER TABLE app.jobs ADD COLUMN note text');
delivers('app', 'a column added');
as('app', 'ALTER TABLE app.jobs DROP COLUMN note');
delivers('app', 'and dropped again');

my $index = $node->safe_psql('postgres', q{SELECT indexdef FROM pg_indexes WHERE schemaname = 'app' AND tablename = 'jobs'
	AND indexdef LIKE '%priority%'});
as('app', 'DROP INDEX ' . ($index =~ /INDEX (\S+)/ ? "app.$1" : ''));
stops('app', '%no index%', 'the claim index dropped');
as('app', $index);
recovers('app', 'the claim index dropped');

# The handler takes rows of the table's type, and follows it by whatever name.
as('app', 'ALTER TABLE app.jobs RENAME TO tasks');
as('app', q{INSERT INTO app.tasks (payload) VALUES ('{}')});
wait_for_empty($node, 'app.tasks', 'a table renamed: it goes on');
as('app', 'ALTER TABLE app.tasks RENAME TO jobs');
delivers('app', 'and back again');

# Here the handler fails, which names the schema in its body.
$node->safe_psql('postgres', 'ALTER SCHEMA app RENAME TO moved');
as('app', q{INSERT INTO moved.jobs (payload) VALUES ('{}')});
wait_for($node, "SELECT count(*) > 0 FROM ruststream.failure WHERE subscription = 'app' AND message LIKE '%app.done%'",
	'a schema renamed: the handler that names it fails');
$node->safe_psql('postgres', 'ALTER SCHEMA moved RENAME TO app');
recovers('app', 'a schema renamed');

# ------------------------------------------------------ changes while at work

as('app', q{SELECT ruststream.pause('app')});
put('app', '{}');
wait_for($node, state_of('app'), 'paused', 'paused');
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'ruststream: app'",
	'its worker leaves');
is($node->safe_psql('postgres', 'SELECT count(*) FROM app.jobs'), '1', 'what comes waits');
as('app', q{SELECT ruststream.resume('app')});
recovers('app', 'resumed');

# Deliveries go on while the subscription is altered: each is made by one handler
# or the other, none twice, none lost.
as('app', q{CREATE FUNCTION app.other(job app.jobs) RETURNS void LANGUAGE sql AS
	$$ INSERT INTO app.done (id, settings) VALUES (job.id, 'other') $$;
	CREATE TABLE app.dead (LIKE app.jobs INCLUDING ALL);
	TRUNCATE app.done});
as('app', q{INSERT INTO app.jobs (payload) SELECT '{}' FROM generate_series(1, 20000)});
for my $i (1 .. 10)
{
	as('app', q{SELECT ruststream.alter_subscription('app', workers => 2, handler => 'app.other')});
	as('app', q{SELECT ruststream.pause('app')});
	as('app', q{SELECT ruststream.alter_subscription('app', dead_letter => 'app.dead', max_attempts => 3)});
	as('app', q{SELECT ruststream.resume('app')});
	as('app', q{SELECT ruststream.alter_subscription('app', workers => 1, handler => 'app.handle',
		reset => '{dead_letter,max_attempts}')});
}
wait_for_empty($node, 'app.jobs', 'altered ten times while it works');
is($node->safe_psql('postgres', 'SELECT count(*), count(DISTINCT id) FROM app.done'), '20000|20000',
	'every task was delivered once');

# A queue is dropped with work in it, and forgotten.
make_owner('leaver');
delivers('leaver', 'another owner delivers');
as('leaver', q{INSERT INTO leaver.jobs (payload) SELECT '{}' FROM generate_series(1, 1000)});
as('leaver', 'DROP TABLE leaver.jobs CASCADE');
is($node->safe_psql('postgres', "SELECT count(*) FROM ruststream.status WHERE subscription = 'leaver'"), '0',
	'a dropped queue is forgotten, with its subscriptions');
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'ruststream: leaver'",
	'their workers leave');

# An owner that is dropped leaves a subscription that somebody can take over.
as('leaver', q{SELECT ruststream.create_queue('leaver.jobs');
	CREATE OR REPLACE FUNCTION leaver.handle(job leaver.jobs) RETURNS void LANGUAGE sql AS
		$$ INSERT INTO leaver.done (id) VALUES (job.id) $$;
	SELECT ruststream.subscribe('leaver', 'leaver.jobs', 'leaver.handle')});
delivers('leaver', 'a new queue of that name');
$node->safe_psql('postgres', 'REASSIGN OWNED BY leaver TO app; DROP OWNED BY leaver; DROP ROLE leaver');
stops('leaver', '%owner%', 'an owner dropped');
as('app', q{SELECT ruststream.subscribe('leaver', 'leaver.jobs', 'leaver.handle')});
recovers('leaver', 'an owner dropped');
is($node->safe_psql('postgres', q{SELECT count(*) FROM leaver.done WHERE who = 'app'}), '1', 'as its new owner');

# --------------------------------------------------------- another language

SKIP:
{
	skip 'PL/Perl is not installed', 2
	  if $node->safe_psql('postgres', "SELECT count(*) FROM pg_available_extensions WHERE name = 'plperl'") eq '0';
	$node->safe_psql('postgres', 'CREATE EXTENSION plperl');
	as('app', <<'SQL');
CREATE FUNCTION app.in_perl(app.jobs) RETURNS ruststream.outcome LANGUAGE plperl AS $$
	my ($job) = @_;
	my $plan = spi_prepare('INSERT INTO app.done (id, settings) VALUES ($1, $2)', 'bigint', 'text');
	spi_exec_prepared($plan, $job->{id}, 'perl');
	die "on its first attempt\n" if $job->{attempt} == 1;
	return { action => 'ack' };
$$;
SELECT ruststream.alter_subscription('app', handler => 'app.in_perl');
SQL
	delivers('app', 'a PL/Perl handler delivers');
	is($node->safe_psql('postgres', q{SELECT settings, (SELECT count(*) FROM ruststream.failure
			WHERE subscription = 'app' AND message LIKE 'on its first attempt%')
		FROM app.done ORDER BY id DESC LIMIT 1}), 'perl|1', 'its error undone, its effect once');
}

$node->stop;
done_testing();
