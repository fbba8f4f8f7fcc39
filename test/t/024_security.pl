# As whom things run: a worker is its subscription's owner, whatever the owner's
# settings say and whoever the owner becomes; a superuser's worker runs nothing
# that others may change; and the functions behind the views tell everybody only
# what he may know.  What needs no worker is in sql/security.sql.
use strict;
use warnings;

use FindBin;
use IPC::Run;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('security', conf => <<'CONF');
log_statement = none
ruststream.crash_restart_delay = 50ms
CONF

sub sql
{
	my ($sql, $role) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => defined $role ? [ '-U', $role ] : []);
}

# What a role is told; an error is an answer, too.
sub asked
{
	my ($role, $sql) = @_;
	my ($status, $out, $err) = $node->psql('postgres', $sql, extra_params => [ '-U', $role ]);
	return $status == 0 ? $out : $err;
}

sub worker_of
{
	my ($name) = @_;
	return "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'ruststream worker'"
	  . " AND application_name = 'ruststream: $name'";
}

sub state_of
{
	my ($name) = @_;
	return "SELECT state FROM ruststream.status WHERE subscription = '$name'";
}

sql(<<'SQL');
CREATE ROLE bob LOGIN;
CREATE ROLE dora LOGIN IN ROLE bob;
CREATE ROLE stranger LOGIN;
CREATE ROLE monitor LOGIN IN ROLE pg_monitor;
CREATE ROLE member LOGIN IN ROLE dora;
CREATE SCHEMA work AUTHORIZATION dora;
GRANT ALL ON SCHEMA work TO bob;
CREATE TABLE work.done (id bigint, who text DEFAULT current_user || ' ' || session_user || ' ' || current_setting('role'));
GRANT ALL ON work.done TO PUBLIC;
SQL
sql(<<'SQL', 'dora');
SELECT ruststream.create_queue('work.jobs');
GRANT ALL ON work.jobs TO bob;
CREATE FUNCTION work.handle(job work.jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	IF job.payload ? 'lock' THEN
		PERFORM pg_catalog.pg_advisory_xact_lock(4711);
	END IF;
	IF job.payload ? 'fail' THEN
		RAISE EXCEPTION 'a secret';
	END IF;
	INSERT INTO work.done (id) VALUES (job.id);
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('jobs', 'work.jobs', 'work.handle');
SQL

# ---------------------------------------------------- a worker is the owner

for my $setting ("ALTER ROLE dora SET role = 'bob'", "ALTER ROLE dora IN DATABASE postgres SET role = 'bob'")
{
	sql($setting);
	sql("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE backend_type = 'ruststream worker'");
	sql(q{INSERT INTO work.jobs (payload) VALUES ('{}')}, 'bob');
	wait_for_empty($node, 'work.jobs', "$setting: its worker delivers");
	is(sql('SELECT DISTINCT who FROM work.done'), 'dora dora none', 'as the owner');
	sql('TRUNCATE work.done');
	sql('ALTER ROLE dora RESET ALL; ALTER ROLE dora IN DATABASE postgres RESET ALL');
}

# Of a superuser, another setting would do it.
sql(<<'SQL');
CREATE TABLE root_done (who text);
GRANT ALL ON root_done TO PUBLIC;
CREATE ROLE root LOGIN SUPERUSER;
ALTER ROLE root SET session_authorization = 'bob';
ALTER ROLE root SET role = 'dora';
SELECT ruststream.create_queue('root_jobs');
CREATE FUNCTION root_handle(job root_jobs) RETURNS void LANGUAGE sql AS $$
	INSERT INTO public.root_done VALUES (current_user || ' ' || session_user) $$;
SQL
sql(q{SET SESSION AUTHORIZATION root; SELECT ruststream.subscribe('root', 'root_jobs', 'root_handle')});
sql(q{INSERT INTO root_jobs (payload) VALUES ('{}')});
wait_for_empty($node, 'root_jobs', 'a superuser who is somebody else by his settings');
is(sql('SELECT DISTINCT who FROM root_done'), 'root root', 'is himself');

# The owner changes while the worker waits, and nobody tells it to leave: the
# supervisor is halted.
wait_for($node, worker_of('jobs'), 'a worker waits', '1');
my ($supervisor) = backends_of($node, 'ruststream supervisor');
kill('STOP', $supervisor);
sql('REVOKE bob FROM dora; GRANT dora TO bob');
sql(q{SELECT ruststream.subscribe('jobs', 'work.jobs', 'work.handle')}, 'bob');
sql(q{INSERT INTO work.jobs (payload) VALUES ('{}')}, 'bob');
wait_for($node, worker_of('jobs'), 'the owner has changed: the worker leaves', '0');
is(sql('SELECT count(*) FROM work.done'), '0', 'and delivers nothing more');
kill('CONT', $supervisor);
wait_for_empty($node, 'work.jobs', 'a worker of the new owner');
is(sql('SELECT DISTINCT who FROM work.done'), 'bob bob none', 'delivers as the new owner');
is(sql(q{SELECT count(*) FROM ruststream.failure WHERE subscription = 'jobs'}), '0', 'nothing has failed');

# A drain that is under way ends.
sql(q{SELECT ruststream.alter_subscription('jobs', workers => 0)});
wait_for($node, worker_of('jobs'), 'no worker', '0');
sql('TRUNCATE work.done; REVOKE dora FROM bob; GRANT bob TO dora');
my ($in, $out) = ("SELECT pg_advisory_lock(4711);\n\\echo held\n", '');
my $holder = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres') ], '<', \$in, '>', \$out);
IPC::Run::pump($holder) until $out =~ /held/;
sql(q{INSERT INTO work.jobs (payload) VALUES ('{"lock": true}'), ('{}')}, 'bob');
my ($drain_out, $drain_err) = ('', '');
my $drain = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres'), '-U', 'bob', '-c',
	q{CALL ruststream.drain('jobs')} ], '>', \$drain_out, '2>', \$drain_err);
wait_for($node, q{SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted}, 'a drain is at work');
sql(q{SELECT ruststream.subscribe('jobs', 'work.jobs', 'work.handle', workers => 0)}, 'dora');
$in .= "SELECT pg_advisory_unlock(4711);\n\\q\n";
IPC::Run::finish($holder);
IPC::Run::finish($drain);
like($drain_err, qr/can be drained by its owner only/, 'its owner has changed: it ends');
is(sql('SELECT count(*), min(who) FROM work.done'), '1|bob bob none', 'after the delivery in work');
is(sql('SELECT count(*) FROM work.jobs'), '1', 'the rest waits');
sql(q{CALL ruststream.drain('jobs')}, 'dora');

# ---------------------------------------------------- what a superuser runs

sql(<<'SQL');
CREATE TABLE parts (id bigint PRIMARY KEY, payload jsonb) PARTITION BY RANGE (id);
CREATE TABLE parts_all PARTITION OF parts DEFAULT;
CREATE TABLE dead (id bigint, payload jsonb) PARTITION BY RANGE (id);
CREATE TABLE dead_all PARTITION OF dead DEFAULT;
SELECT ruststream.attach_queue('parts', 'id', payload_column => 'payload');
CREATE FUNCTION parts_handle(job parts) RETURNS ruststream.outcome LANGUAGE sql AS 'SELECT ruststream.ack()';
SELECT ruststream.subscribe('parts', 'parts', 'parts_handle', dead_letter => 'dead');
INSERT INTO parts VALUES (1);
SQL
wait_for_empty($node, 'parts', 'a superuser delivers from a partitioned table');
for my $table ('parts_all', 'dead_all')
{
	sql("ALTER TABLE $table OWNER TO bob");
	sql('INSERT INTO parts VALUES (2)');
	wait_for($node, "SELECT state LIKE 'broken: %superuser%' FROM ruststream.status WHERE subscription = 'parts'",
		"not where somebody else owns $table");
	wait_for($node, worker_of('parts'), 'its worker leaves', '0');
	sql(q{UPDATE ruststream.subscription SET name = name WHERE name = 'parts'});
	wait_for($node, "SELECT broken FROM ruststream.internal_counters() AS c JOIN ruststream.subscription AS s"
		  . " ON s.id = c.subscription_id WHERE s.name = 'parts'",
		'the supervisor starts no other', qq{its owner "@{[ sql('SELECT current_user') ]}" is a superuser,}
		  . " the owner of table public.$table is not");
	is(sql('SELECT count(*) FROM parts'), '1', 'the task waits');
	sql("ALTER TABLE $table OWNER TO CURRENT_USER");
	wait_for_empty($node, 'parts', 'mended, it goes on');
	wait_for($node, state_of('parts'), 'and says so', 'running');
	sql(q{UPDATE ruststream.subscription SET name = name WHERE name = 'parts'});
}

sql('ALTER FUNCTION parts_handle OWNER TO bob');
sql('INSERT INTO parts VALUES (3)');
wait_for($node, "SELECT state LIKE 'broken: %handlers owned by superusers' FROM ruststream.status"
	  . " WHERE subscription = 'parts'", 'nor where somebody else owns the handler');
is(sql('SELECT count(*) FROM parts'), '1', 'the task waits');
sql('ALTER FUNCTION parts_handle OWNER TO CURRENT_USER');
wait_for_empty($node, 'parts', 'mended, it goes on');
wait_for($node, state_of('parts'), 'and says so', 'running');

# A worker that is running hears of a grant, too.
sql(q{UPDATE ruststream.subscription SET name = name WHERE name = 'parts'});
sql('GRANT UPDATE (handler) ON ruststream.subscription TO bob');
sql('INSERT INTO parts VALUES (4)');
wait_for($node, "SELECT state LIKE 'broken: %open to bob' FROM ruststream.status WHERE subscription = 'parts'",
	'nor where somebody else may write our tables');
is(sql('SELECT count(*) FROM parts'), '1', 'the task waits');
sql('REVOKE ALL ON ruststream.subscription FROM bob');
wait_for_empty($node, 'parts', 'mended, it goes on');

# ------------------------------------------------------------- who sees what

# A delivery in work, one that has failed, and a subscription that is broken.
sql(q{SELECT ruststream.alter_subscription('jobs', workers => 1, on_error => 'discard')}, 'dora');
sql(q{INSERT INTO work.jobs (payload) VALUES ('{"fail": true}')}, 'dora');
wait_for($node, q{SELECT count(*) > 0 FROM ruststream.failure WHERE message = 'a secret'}, 'a delivery has failed');
($in, $out) = ("SELECT pg_advisory_lock(4711);\n\\echo held\n", '');
$holder = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres') ], '<', \$in, '>', \$out);
IPC::Run::pump($holder) until $out =~ /held/;
sql(q{INSERT INTO work.jobs (id, payload) VALUES (900, '{"lock": true}'), (901, '{}')}, 'dora');
wait_for($node, q{SELECT count(*) = 1 FROM ruststream.stat_worker WHERE delivery = '900'}, 'one is in work');
sql(<<'SQL', 'dora');
SELECT ruststream.create_queue('work.broken');
CREATE FUNCTION work.broken_handler(job work.broken) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('broken', 'work.broken', 'work.broken_handler');
SQL
sql('DROP FUNCTION work.broken_handler', 'dora');
sql(q{INSERT INTO work.broken (payload) VALUES ('{}')}, 'dora');
wait_for($node, q{SELECT count(*) > 0 FROM ruststream.internal_counters() AS c WHERE c.broken LIKE '%broken_handler%'},
	'one is broken');

my %number = map { $_ => sql("SELECT id FROM ruststream.subscription WHERE name = '$_'") } 'jobs', 'broken';
my $numbers = join ', ', values %number;
my %question = (
	counters => "SELECT count(*), count(broken) FILTER (WHERE broken LIKE '%broken_handler%')"
	  . " FROM ruststream.internal_counters() WHERE subscription_id IN ($numbers)",
	workers => "SELECT count(*), count(row_id) FROM ruststream.internal_workers() WHERE subscription_id = $number{jobs}",
	depth => "SELECT ready IS NOT NULL, problem FROM ruststream.internal_depth($number{jobs})",
	problem => "SELECT problem LIKE '%broken_handler%' FROM ruststream.internal_depth($number{broken})",
);
my %answer = (
	dora => { counters => '2|1', workers => '1|1', depth => 't|', problem => 't' },
	member => { counters => '2|1', workers => '1|1', depth => 't|', problem => 't' },
	monitor => { counters => '2|0', workers => '1|0', depth => 't|', problem => 'f' },
	stranger => { counters => '0|0', workers => '0|0', depth => 'f|', problem => '' },
	bob => { counters => '0|0', workers => '0|0', depth => 'f|', problem => '' },
);
for my $role (sort keys %answer)
{
	for my $function (sort keys %question)
	{
		is(asked($role, $question{$function}), $answer{$role}{$function}, "$role asks for $function");
	}
}
is(asked('stranger', 'SELECT count(*) FROM ruststream.' . $_), '0', "a stranger sees nothing in $_")
  for 'status', 'stat_subscription', 'stat_queue', 'stat_worker', 'delivery_in_work', 'failure';
is(asked('monitor', q{SELECT count(*) FILTER (WHERE state LIKE '%broken_handler%' OR last_error IS NOT NULL)
	FROM ruststream.status}), '0', 'pg_monitor sees no text');
is(asked('monitor', 'SELECT count(delivery) FROM ruststream.stat_worker'), '0', 'nor which row is in work');
is(asked('monitor', 'SELECT (SELECT count(*) FROM ruststream.delivery_in_work) + (SELECT count(*) FROM ruststream.failure)'),
	'0', 'nor what has failed');
is(asked('monitor', q{SELECT state, failed FROM ruststream.status WHERE subscription IN ('jobs', 'broken') ORDER BY 2}),
	"broken|0\nrunning|1", 'but figures');
like(asked('stranger', 'SELECT FROM ruststream.' . $_), qr/permission denied/, "nobody reads $_")
  for 'queue', 'subscription', 'failure_history', 'internal_subscription', 'subscription_id';

$in .= "SELECT pg_advisory_unlock(4711);\n\\q\n";
IPC::Run::finish($holder);
wait_for_empty($node, 'work.jobs', 'the delivery comes to its end');

$node->stop;
done_testing();
