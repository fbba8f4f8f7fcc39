# Looking at queues and at failures: whose rights a look has, what it does not
# wait for, that somebody else's code neither ends nor delays it, and that the
# history stays bounded.  And two commands that bring work without a word.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('looking', conf => <<'CONF');
max_prepared_transactions = 5
ruststream.max_workers = 16
CONF

sub as
{
	my ($role, $sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '-U', $role ]);
}

# One line of status, as the superuser sees it.
sub status
{
	my ($subscription, $columns) = @_;
	return $node->safe_psql('postgres',
		"SELECT $columns FROM ruststream.status WHERE subscription = '$subscription'");
}

$node->safe_psql('postgres', <<'SQL');
CREATE ROLE keeper LOGIN;
CREATE SCHEMA keeper AUTHORIZATION keeper;
SQL

# A queue of keeper's, drained by nobody unless workers are given.
sub make_queue
{
	my ($name, $workers) = @_;

	$workers //= 0;
	as('keeper', <<"SQL");
SET search_path = keeper;
SELECT ruststream.create_queue('$name');
CREATE FUNCTION handle_$name(job $name) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('$name', '$name', 'handle_$name', workers => $workers, poll_interval => '100 ms');
SQL
}

# Rows of a queue are seen by whom, and when, this expression says.
sub set_policy
{
	my ($name, $expression) = @_;

	as('keeper', <<"SQL");
ALTER TABLE keeper.$name ENABLE ROW LEVEL SECURITY;
ALTER TABLE keeper.$name FORCE ROW LEVEL SECURITY;
CREATE POLICY p ON keeper.$name USING ($expression) WITH CHECK (true);
SQL
}

# ------------------------------------------------------------- whose rights

# An index's predicate is evaluated when the index is opened.
as('keeper', <<'SQL');
SET search_path = keeper;
CREATE FUNCTION who(boolean) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	IF current_user <> 'keeper' THEN
		RAISE EXCEPTION 'evaluated as %', current_user;
	END IF;
	RETURN true;
END $$;
CREATE TABLE spy (id bigint GENERATED ALWAYS AS IDENTITY UNIQUE, payload jsonb NOT NULL);
CREATE INDEX before ON spy (id) WHERE who(true);
ALTER TABLE spy DROP CONSTRAINT spy_id_key, ADD PRIMARY KEY (id);
SELECT ruststream.attach_queue('spy', id_column => 'id', payload_column => 'payload');
CREATE FUNCTION handle_spy(job spy) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('spy', 'spy', 'handle_spy', workers => 0);
SQL
is(status('spy', 'state'), 'no workers: drained by CALL only',
	'a superuser who looks evaluates nothing of a table as himself');
as('keeper', 'DROP TABLE keeper.spy CASCADE');

# ----------------------------------------------------------------- cancelled

make_queue('calm');
as('keeper', "INSERT INTO keeper.calm (payload) VALUES ('{}')");

make_queue('moody');
as('keeper', <<'SQL');
INSERT INTO keeper.moody (payload) VALUES ('{}');
CREATE FUNCTION keeper.refuse(whom text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF pg_catalog.current_setting('application_name') LIKE whom THEN
		RAISE EXCEPTION 'moody' USING ERRCODE = 'query_canceled';
	END IF;
	RETURN true;
END $$;
SQL
set_policy('moody', q{keeper.refuse('%')});
is(status('moody', 'state'), 'broken: moody', 'a policy that raises a cancel breaks its own queue');
is(status('calm', 'ready'), '1', 'and no other');

# The worker says why it does not work, and does not try again at once.
as('keeper', <<'SQL');
ALTER POLICY p ON keeper.moody USING (keeper.refuse('ruststream: %'));
SELECT ruststream.alter_subscription('moody', workers => 1);
SQL
wait_for($node, "SELECT state = 'broken: moody' FROM ruststream.status WHERE subscription = 'moody'",
	'a worker that meets such a policy is broken');
as('keeper', 'ALTER POLICY p ON keeper.moody USING (true)');
wait_for_empty($node, 'keeper.moody', 'and works when the policy has changed');

# -------------------------------------------------------------------- locked

# The locks of a prepared transaction need no session that holds them.
sub while_held
{
	my ($sql, $what) = @_;

	$node->safe_psql('postgres', "BEGIN; $sql; PREPARE TRANSACTION 'held'");
	like(status('calm', 'state'), qr/^locked: /, $what);
	is(status('moody', 'state'), 'running', '.. and the others are looked at');
	$node->safe_psql('postgres', "ROLLBACK PREPARED 'held'");
	is(status('calm', 'state'), 'no workers: drained by CALL only', '.. and so is it, afterwards');
}

while_held('LOCK TABLE keeper.calm', 'a look does not wait for a lock of the table');
while_held('REINDEX INDEX keeper.calm_pkey', 'a look does not wait for a lock of an index');

as('keeper', <<'SQL');
SET search_path = keeper;
SELECT ruststream.unsubscribe('calm');
CREATE TABLE parted (id bigint GENERATED ALWAYS AS IDENTITY, payload jsonb NOT NULL, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (1) TO (1000);
CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (1000) TO (2000);
SELECT ruststream.attach_queue('parted', id_column => 'id', payload_column => 'payload');
CREATE FUNCTION handle_parted(job parted) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('calm', 'parted', 'handle_parted', workers => 0);
SQL
while_held('LOCK TABLE keeper.parted_2', 'a look does not wait for a lock of a partition');

# ------------------------------------------------------------------- in time

make_queue('slow');
as('keeper', "INSERT INTO keeper.slow (payload) VALUES ('{}')");
set_policy('slow', q{pg_catalog.pg_sleep(5) IS NOT NULL});
is(status('slow', 'capped, ready'), 't|', 'a look at a queue ends when its time is over');
is(status('moody', 'capped, ready'), 'f|0', 'which is its own time');
my ($result, $out, $err) = $node->psql('postgres',
	"SET statement_timeout = '5 ms'; SELECT count(*) FROM ruststream.status WHERE subscription = 'slow'");
like($err, qr/canceling statement due to statement timeout/, 'and no later than its caller wants it to');

# A transaction that is prepared keeps what is deleted after it from being forgotten.
make_queue('gone');
as('keeper', <<'SQL');
ALTER TABLE keeper.gone SET (autovacuum_enabled = off);
INSERT INTO keeper.gone (payload) SELECT '{}' FROM generate_series(1, 1000000);
SQL
$node->safe_psql('postgres', "BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'old'");
is(status('gone', 'capped, ready > 0'), 't|t', 'of a million rows as many are counted as there is time for');
as('keeper', 'DELETE FROM keeper.gone');
is(status('gone', 'capped, ready'), 't|', 'of a million rows that are gone nothing is said');
$node->safe_psql('postgres', "ROLLBACK PREPARED 'old'");
is(as('keeper', "BEGIN; SET LOCAL statement_timeout = '1 h'; SELECT count(*) > 0 FROM ruststream.status; SELECT 'goes on'"),
	"t\ngoes on", 'the time of a look is not the time of its caller');

# A policy that looks itself does not look into looks.
make_queue('mirror');
as('keeper', "INSERT INTO keeper.mirror (payload) VALUES ('{}')");
as('keeper', <<'SQL');
CREATE FUNCTION keeper.reflect() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	RETURN (SELECT s.ready FROM ruststream.status AS s WHERE s.subscription = 'mirror') IS NULL;
END $$;
SQL
set_policy('mirror', 'keeper.reflect()');
is(status('mirror', 'capped, ready'), 'f|1', 'a policy may look at status itself');

# ------------------------------------------------------- the history's length

as('keeper', <<'SQL');
SET search_path = keeper;
SELECT ruststream.create_queue('thrown');
CREATE FUNCTION handle_thrown(job thrown) RETURNS ruststream.outcome LANGUAGE sql AS $$ SELECT ruststream.discard('because') $$;
INSERT INTO thrown (payload) SELECT '{}' FROM generate_series(1, 1200);
SELECT ruststream.subscribe('thrown', 'thrown', 'handle_thrown');
SQL
wait_for_empty($node, 'keeper.thrown', 'rows are discarded for a reason');
wait_for($node, 'SELECT count(*) = 1000 FROM ruststream.failure_history',
	'reasons are forgotten as errors are');

# Without workers it is drain that prunes.
my $plain = new_node('plain', preload => 0);
$plain->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('jobs');
CREATE TABLE seen (failures bigint);
CREATE FUNCTION handle(job jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	CASE job.payload ->> 'do'
		WHEN 'count' THEN
			INSERT INTO seen SELECT count(*) FROM ruststream.failure;
			RETURN ruststream.ack();
		WHEN 'cancel' THEN
			PERFORM pg_cancel_backend(pg_backend_pid()), pg_sleep(3600);
		ELSE
			RETURN ruststream.discard('because');
	END CASE;
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle');
INSERT INTO jobs (payload) SELECT '{"do": "discard"}' FROM generate_series(1, 2100);
INSERT INTO jobs (payload) VALUES ('{"do": "count"}'), ('{"do": "cancel"}');
SQL
isnt($plain->psql('postgres', "CALL ruststream.drain('jobs')"), 0, 'a drain that is cancelled');
is($plain->safe_psql('postgres', 'SELECT failures FROM seen'), 1100, '.. has pruned the history meanwhile');
is($plain->safe_psql('postgres', 'SELECT count(*) FROM ruststream.failure_history'),
	1000, '.. and in the end');
$plain->stop;

# --------------------------------------------------------- nobody has said so

$node->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('later');
INSERT INTO later (payload) VALUES ('{}');
CREATE FUNCTION handle_later(job later) RETURNS void LANGUAGE sql AS '';
BEGIN;
SELECT ruststream.subscribe('later', 'later', 'handle_later');
PREPARE TRANSACTION 'registered';
SQL
$node->safe_psql('postgres', "COMMIT PREPARED 'registered'");
wait_for_empty($node, 'later', 'COMMIT PREPARED starts what the transaction has registered');

$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', <<'SQL');
BEGIN;
CREATE EXTENSION ruststream;
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE sql AS '';
SELECT ruststream.subscribe('jobs', 'jobs', 'handle');
INSERT INTO jobs (payload) VALUES ('{}');
PREPARE TRANSACTION 'created';
SQL
$node->safe_psql('other', "COMMIT PREPARED 'created'");
wait_for_empty($node, 'jobs', 'and so where it has created the extension', 'other');

# A database that could not be looked at when the server came up.
$node->safe_psql('postgres', 'ALTER DATABASE other ALLOW_CONNECTIONS false');
$node->restart;
wait_for($node, "SELECT count(*) > 0 FROM ruststream.stat_worker WHERE subscription = 'later'",
	'the other databases are served');
is($node->safe_psql('postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE datname = 'other'"), 0, 'but not that one');
$node->safe_psql('postgres', 'ALTER DATABASE other ALLOW_CONNECTIONS true');
wait_for($node, "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = 'other' AND backend_type = 'ruststream worker'",
	'until ALTER DATABASE allows connections again');

$node->stop;
done_testing();
