# A copy of a database must not deliver the original's tasks a second time: what
# is restored from a dump or made from a template is quiet, and says so, until
# its subscriptions are resumed.  The original goes on delivering.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('copies', extension => 0, conf => "log_statement = none\nruststream.max_workers = 24");
my $dump = $PostgreSQL::Test::Utils::tmp_check . '/original.dump';
my $quiet = 'copied: resume it to start it here';

$node->safe_psql('postgres', 'CREATE ROLE app LOGIN');
$node->safe_psql('postgres', 'CREATE DATABASE original OWNER app');
$node->safe_psql('original', 'CREATE EXTENSION ruststream');

sub sql
{
	my ($on, $database, $sql) = @_;
	return $on->safe_psql($database, $sql, extra_params => [ '-U', 'app' ]);
}

# Two subscriptions: of a queue of our making, and of the owner's own table with
# groups, a name to quote and a dead-letter group; one is paused.
sql($node, 'original', <<'SQL');
CREATE SCHEMA app;
CREATE TABLE app.done (database name DEFAULT current_database(), queue text, task text);
SELECT ruststream.create_queue('app.jobs');
CREATE TABLE app."Odd Jobs" (key uuid PRIMARY KEY DEFAULT gen_random_uuid(), "Group" text NOT NULL, body text, tries integer NOT NULL DEFAULT 1);
CREATE INDEX ON app."Odd Jobs" ("Group", key);
SELECT ruststream.attach_queue('app."Odd Jobs"', 'key', group_column => 'Group', payload_column => 'body',
	attempt_column => 'tries', isolation => 'serializable');
CREATE FUNCTION app.handle(payload jsonb, d ruststream.delivery) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO app.done (queue, task) VALUES (d.subscription, payload->>'task');
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('jobs', 'app.jobs', 'app.handle', workers => 2);
SELECT ruststream.subscribe('odd', 'app."Odd Jobs"', 'app.handle', max_attempts => 5, dead_letter => 'dead',
	retry_delay => '2 s', backoff => 'linear');
SELECT ruststream.subscribe('stopped', 'app."Odd Jobs"', 'app.handle');
SELECT ruststream.pause('stopped');
SQL

# The description of everything registered, whatever the oids are.
my $registered = <<'SQL';
SELECT q.relation::text, q.id_column, q.group_column, q.payload_column, q.attempt_column, q.isolation, q.wake FROM ruststream.queue AS q ORDER BY 1;
SELECT s.name, s.queue::text, s.handler, s.owner_name, s.paused, s.group_name, s.workers, s.max_attempts,
	s.dead_letter_group, s.retry_delay, s.backoff FROM ruststream.subscription AS s ORDER BY 1
SQL
my $original = $node->safe_psql('original', $registered);

sub states
{
	my ($on, $database) = @_;
	return sql($on, $database, 'SELECT state FROM ruststream.status ORDER BY subscription');
}

# Publish one task to each queue, and see the ones delivered whose subscription
# is awake.
my $number = 0;
sub publish
{
	my ($on, $database) = @_;
	my $task = $database . ++$number;

	sql($on, $database, qq{
		SELECT ruststream.publish('app.jobs', '{"task": "$task"}');
		SELECT ruststream.publish('app."Odd Jobs"', '{"task": "$task"}', group_name => 'odd');
		SELECT ruststream.publish('app."Odd Jobs"', '{"task": "$task"}', group_name => 'stopped')});
	return $task;
}

# Each queue's tasks are there still, and no process looks after the database.
sub is_quiet
{
	my ($on, $database, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(states($on, $database), "$quiet\n$quiet\n$quiet", "$what: its state says that it is a copy");
	is($on->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE datname = '$database'"
		  . " AND backend_type = 'ruststream worker'"), '0', "$what: no worker");
}

# What a copy does once it is resumed, one subscription after another.
sub resume_all
{
	my ($on, $database, $what) = @_;
	my $task = publish($on, $database);
	my $drain_error;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$on->psql($database, "CALL ruststream.drain('jobs')", extra_params => [ '-U', 'app' ], stderr => \$drain_error);
	like($drain_error, qr/was made in another database/, "$what: drain is refused");

	sql($on, $database, "SELECT ruststream.resume('jobs')");
	wait_for($on, "SELECT count(*) = 1 FROM app.done WHERE queue = 'jobs' AND task = '$task'",
		"$what: resumed, it delivers", 't', $database);
	wait_for($on, "SELECT string_agg(state, '; ' ORDER BY subscription) FROM ruststream.status",
		"$what: the other subscriptions stay quiet", "running; $quiet; $quiet", $database);
	sql($on, $database, "SELECT ruststream.resume('odd')");
	wait_for($on, "SELECT count(*) = 1 FROM app.done WHERE queue = 'odd' AND task = '$task'",
		"$what: the next is resumed", 't', $database);
	sql($on, $database, "SELECT ruststream.resume('stopped')");
	wait_for($on, "SELECT count(*) = 1 FROM app.done WHERE queue = 'stopped' AND task = '$task'",
		"$what: and the one that was paused", 't', $database);
	is(sql($on, $database, "SELECT count(*) FROM app.done WHERE database <> '$database' AND task = '$task'"),
		'0', "$what: nobody else has delivered them");
}

wait_for($node, "SELECT string_agg(state, '; ' ORDER BY subscription) FROM ruststream.status",
	'the original is at work', 'running; running; paused', 'original');
my $first = publish($node, 'original');
wait_for($node, 'SELECT count(*) = 2 FROM app.done', 'and delivers', 't', 'original');

# A task that waits in the original when it is copied.
sql($node, 'original', q{SELECT ruststream.publish('app.jobs', '{"task": "later"}', delay => '1 h')});

# -------------------------------------------------------------------- a dump

command_ok([ 'pg_dump', '-Fc', '-f', $dump, $node->connstr('original') ], 'the database is dumped');
$node->safe_psql('postgres', 'CREATE DATABASE restored OWNER app');
command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr('restored'), $dump ],
	'and restored without an error');
is($node->safe_psql('restored', $registered), $original, 'with the same queues and subscriptions');
is_quiet($node, 'restored', 'restored');
is( $node->safe_psql('restored',
		'SELECT last_value >= (SELECT max(id) FROM ruststream.subscription) FROM ruststream.subscription_id'),
	't', 'restored: the next subscription gets an id of its own');
resume_all($node, 'restored', 'restored');
is(sql($node, 'restored', 'SELECT count(*) FROM app.jobs'), '1', 'restored: the waiting task is there once');

# Dumped again, and as plain SQL in one transaction.
my $plain = $PostgreSQL::Test::Utils::tmp_check . '/restored.sql';
command_ok([ 'pg_dump', '-f', $plain, $node->connstr('restored') ], 'the copy is dumped');
$node->safe_psql('postgres', 'CREATE DATABASE again OWNER app');
command_ok([ 'psql', '-X', '-q', '-1', '-v', 'ON_ERROR_STOP=1', '-f', $plain, $node->connstr('again') ],
	'and restored in one transaction');
is_quiet($node, 'again', 'again');

# Without the owner it was made by: said, not delivered.
$node->safe_psql('postgres', 'CREATE DATABASE ownerless');
command_ok([ 'pg_restore', '--no-owner', '--no-acl', '-d', $node->connstr('ownerless'), $dump ],
	'restored without its owners');
my $error;
$node->psql('ownerless', "SELECT ruststream.resume('jobs')", extra_params => [ '-U', 'app' ], stderr => \$error);
like($error, qr/ERROR/, 'ownerless: whoever lacks the rights cannot resume');

# ---------------------------------------------------------------- a template

# Idle workers leave when their database is copied, and come back.
$node->safe_psql('postgres', 'CREATE DATABASE templated TEMPLATE original');
is_quiet($node, 'templated', 'templated');
resume_all($node, 'templated', 'templated');
wait_for($node, "SELECT string_agg(state, '; ' ORDER BY subscription) FROM ruststream.status",
	'the original is back at work', 'running; running; paused', 'original');
my $last = publish($node, 'original');
wait_for($node, "SELECT count(*) = 2 FROM app.done WHERE task = '$last'", 'and delivers', 't', 'original');
is(sql($node, 'templated', "SELECT count(*) FROM app.done WHERE task = '$last'"), '0', 'alone');

# -------------------------------------------------------------- another server

# The copy's database has the original's oid by chance, or by pg_upgrade: the
# system identifier tells them apart.
my $elsewhere = new_node('elsewhere', extension => 0, conf => 'log_statement = none');
$elsewhere->safe_psql('postgres', 'CREATE ROLE app LOGIN');
my $oid = $node->safe_psql('postgres', "SELECT oid FROM pg_database WHERE datname = 'original'");
$elsewhere->safe_psql('postgres', "CREATE DATABASE original OWNER app OID $oid");
command_ok([ 'pg_restore', '--exit-on-error', '-d', $elsewhere->connstr('original'), $dump ],
	'restored on another server, under the same oid');
is_quiet($elsewhere, 'original', 'elsewhere');
resume_all($elsewhere, 'original', 'elsewhere');

$elsewhere->stop;
$node->stop;
done_testing();
