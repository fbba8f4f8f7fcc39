# Commands that need a database without sessions, and DROP EXTENSION: our
# processes make room, idle or busy, and come back where they are wanted.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('ddl', extension => 0);

my $setup = <<'SQL';
CREATE EXTENSION ruststream;
CREATE TABLE done (id bigint UNIQUE);
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO done (id) VALUES (job.id);
	IF job.payload ? 'gate' THEN
		PERFORM pg_advisory_xact_lock_shared(1);
	ELSIF job.payload ? 'sleep' THEN
		PERFORM pg_sleep(3600);
	END IF;
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle');
SQL

sub workers_in
{
	my ($database, $count) = @_;
	return "SELECT count(*) = $count FROM pg_stat_activity WHERE datname = '$database'"
	  . " AND backend_type = 'ruststream worker' AND state = 'idle'";
}

# Whoever is there, in the order of their names.
my $present = "SELECT coalesce(string_agg(backend_type || ' ' || pid, ', ' ORDER BY 1), '')"
  . " FROM pg_stat_activity WHERE backend_type LIKE 'ruststream %'";

# ------------------------------------------------------------------- extension

wait_for($node,
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type LIKE 'ruststream %' AND state = 'idle'",
	'without the extension only the launcher stays');
$node->safe_psql('postgres', $setup);
wait_for($node, workers_in('postgres', 1), 'CREATE EXTENSION starts workers without a restart');

my $before = $node->safe_psql('postgres', $present);
my $seen = $node->safe_psql('postgres', <<'SQL');
BEGIN;
DROP EXTENSION ruststream CASCADE;
SELECT count(*) FROM pg_stat_activity WHERE backend_type IN ('ruststream worker', 'ruststream supervisor');
ROLLBACK;
SQL
is($seen, '0', 'DROP EXTENSION has the processes leave');
wait_for($node, workers_in('postgres', 1), 'and when it is rolled back they return');

# In work: the delivery is cut short, and its row stays.
my $gate = $node->background_psql('postgres');
$gate->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('postgres', q(INSERT INTO jobs (payload) VALUES ('{"gate": 1}')));
wait_for($node,
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream worker' AND wait_event = 'advisory'",
	'a delivery is in work');
$node->safe_psql('postgres', "SET lock_timeout = '4s'; DROP EXTENSION ruststream CASCADE");
is($node->safe_psql('postgres', 'SELECT count(*) FROM jobs'), '1', 'DROP EXTENSION does not wait for a delivery');
is($node->safe_psql('postgres', 'SELECT count(*) FROM done'), '0', 'which is rolled back');
wait_for($node,
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type LIKE 'ruststream %' AND state = 'idle'",
	'only the launcher stays');
$gate->quit;
$node->safe_psql('postgres', 'DROP TABLE jobs CASCADE; DROP TABLE done; DROP FUNCTION IF EXISTS handle');
$node->safe_psql('postgres', $setup);
wait_for($node, workers_in('postgres', 1), 'and it can be created again');
is($node->safe_psql('postgres', 'SELECT deliveries FROM ruststream.stat_subscription'), '0',
	'with counters of its own');

# --------------------------------------------------------------- other databases

$node->safe_psql('postgres', 'CREATE DATABASE one');
$node->safe_psql('one', $setup);
wait_for($node, workers_in('one', 1), 'a second database has workers of its own');

# A template that has the extension makes a copy that is quiet.
$node->safe_psql('postgres', 'CREATE DATABASE two TEMPLATE one');
wait_for($node, workers_in('one', 1), 'after CREATE DATABASE the template has its workers back');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE datname = 'two'"),
	'0', 'the copy is quiet');
like($node->safe_psql('two', 'SELECT state FROM ruststream.status'), qr/^copied/, 'and says so');
$node->safe_psql('two', "SELECT ruststream.resume('jobs')");
wait_for($node, workers_in('two', 1), 'until it is resumed');

# template1 is copied by default, also while we are in there.
$node->safe_psql('template1', $setup);
wait_for($node, workers_in('template1', 1), 'workers run in template1');
$node->safe_psql('postgres', 'CREATE DATABASE three');
wait_for($node, workers_in('template1', 1), 'CREATE DATABASE is not hindered, and they return');
$node->safe_psql('template1', 'DROP EXTENSION ruststream CASCADE; DROP TABLE jobs, done CASCADE');

$node->safe_psql('postgres', 'ALTER DATABASE two RENAME TO deux');
wait_for($node, workers_in('deux', 1), 'after RENAME they return');
is( $node->safe_psql('postgres',
		"SELECT application_name FROM pg_stat_activity WHERE datname = 'deux' AND backend_type = 'ruststream supervisor'"),
	'ruststream supervisor: deux', 'under the new name');
$node->safe_psql('postgres', 'BEGIN; ALTER DATABASE deux RENAME TO zwei; ROLLBACK');
wait_for($node, workers_in('deux', 1), 'and also when it is rolled back');


my $space = PostgreSQL::Test::Utils::tempdir_short();
$node->safe_psql('postgres', "CREATE TABLESPACE space LOCATION '$space'");
$node->safe_psql('postgres', 'ALTER DATABASE deux SET TABLESPACE space');
wait_for($node, workers_in('deux', 1), 'after SET TABLESPACE they return');
$node->safe_psql('deux', "INSERT INTO jobs (payload) VALUES ('{}')");
wait_for_empty($node, 'jobs', 'and deliver', 'deux');

# ------------------------------------------------------------------ who may not

$node->safe_psql('postgres', 'CREATE ROLE stranger LOGIN');
$before = $node->safe_psql('postgres', $present);
for my $command (
	'DROP DATABASE one',
	'ALTER DATABASE one RENAME TO uno',
	'ALTER DATABASE one SET TABLESPACE space',
	'CREATE DATABASE copy TEMPLATE one',
	'DROP EXTENSION ruststream CASCADE')
{
	my ($status) = $node->psql('postgres', $command, extra_params => [ '-U', 'stranger' ]);
	isnt($status, 0, "a stranger may not $command");
}
for my $command ('DROP DATABASE one', 'ALTER DATABASE one SET TABLESPACE space', 'CREATE DATABASE copy TEMPLATE one')
{
	my ($status) = $node->psql('postgres', "BEGIN; $command; COMMIT");
	isnt($status, 0, "$command is refused in a transaction block");
}
is($node->safe_psql('postgres', $present), $before, 'and no process was stopped for it');

# A command that fails afterwards: they return.
my ($status) = $node->psql('postgres', 'ALTER DATABASE one RENAME TO postgres');
isnt($status, 0, 'RENAME to a name that is taken fails');
wait_for($node, workers_in('one', 1), 'and the workers return');

# --------------------------------------------------------------------- DROP DATABASE

$node->safe_psql('postgres', 'DROP DATABASE deux');
$node->safe_psql('one', q(INSERT INTO jobs (payload) VALUES ('{"sleep": 1}')));
wait_for($node,
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream worker' AND wait_event = 'PgSleep'",
	'a delivery is in work');
$node->safe_psql('postgres', 'DROP DATABASE one');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_database WHERE datname IN ('one', 'deux')"), '0',
	'DROP DATABASE is not hindered, idle or busy');
wait_for($node, workers_in('postgres', 1), 'the other database goes on');
$node->safe_psql('postgres', "INSERT INTO jobs (payload) VALUES ('{}')");
wait_for_empty($node, 'jobs', 'delivering');

my $log = slurp_file($node->logfile);
unlike($log, qr/FATAL: .*database ".*" does not exist/, 'nothing was started where there is nothing');
$node->stop;

done_testing();
