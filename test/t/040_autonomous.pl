# Autonomous statements of workers and sessions: they stay whatever the
# delivery does, never hang on their own delivery, and their process is kept,
# cancelled, lost and replaced as it should.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;
use Time::HiRes qw(time);

# Whoever has to wait for the caller's own deadlock_timeout takes too long.
my $node = new_node('autonomous', conf => <<'CONF');
deadlock_timeout = 20s
restart_after_crash = on
ruststream.crash_restart_delay = 100ms
CONF
$node->safe_psql('postgres', <<'SQL');
CREATE ROLE app LOGIN;
CREATE SCHEMA app AUTHORIZATION app;
ALTER ROLE app SET search_path = app;
SQL

sub app
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '-U', 'app' ]);
}

# Processes of a kind that are at something, as pids.
sub pids
{
	my ($kind, $and) = @_;
	return $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'ruststream $kind'" . ($and // ''));
}

my $sleeping = "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream autonomous'"
  . " AND wait_event = 'PgSleep'";
my $idle = "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream autonomous'"
  . " AND state = 'idle'";

# ------------------------------------------------------ whatever the outcome

# Each task says which autonomous statement to run, and how to end.  What came
# back is noted by another one.
app(<<'SQL');
SELECT ruststream.create_queue('jobs');
CREATE TABLE note (what text, pid int DEFAULT pg_backend_pid(), who text DEFAULT current_user || ' ' || current_setting('is_superuser'));
CREATE TABLE locked (a int);
INSERT INTO locked VALUES (0);
CREATE TABLE pace (s float8);
INSERT INTO pace VALUES (3600);
CREATE FUNCTION handle(job jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
DECLARE
	started timestamptz = clock_timestamp();
BEGIN
	INSERT INTO note VALUES (job.id || ' own');
	IF job.payload ? 'lock' THEN
		UPDATE locked SET a = job.id;
	END IF;
	IF ruststream.attempt() = 1 THEN
		BEGIN
			PERFORM ruststream.autonomous(job.payload->>'sql', job.payload->>'value');
		EXCEPTION WHEN deadlock_detected OR unique_violation OR division_by_zero THEN
			PERFORM ruststream.autonomous('INSERT INTO note VALUES ($1)', concat(job.id, ' ', SQLSTATE, ' ',
				CASE WHEN clock_timestamp() - started < '5 s' THEN 'quickly' ELSE 'too late' END));
		END;
	END IF;
	CASE job.payload->>'end'
		WHEN 'raise' THEN RAISE EXCEPTION 'as asked';
		WHEN 'retry' THEN
			IF ruststream.attempt() = 1 THEN
				RETURN ruststream.retry();
			END IF;
		ELSE NULL;
	END CASE;
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle', on_error => 'discard');
SQL

sub job
{
	my ($id, $payload) = @_;
	app("INSERT INTO jobs (id, payload) OVERRIDING SYSTEM VALUE VALUES ($id, $payload)");
	return;
}

sub note_job
{
	my ($id, $end) = @_;
	job($id, "jsonb_build_object('sql', 'INSERT INTO note VALUES (\$1)', 'value', '$id alone', 'end', '$end')");
	return;
}

sub notes
{
	my ($id) = @_;
	return app("SELECT string_agg(what, ', ' ORDER BY what) FROM note WHERE what LIKE '$id %'");
}

note_job(1, 'ack');
note_job(2, 'raise');
note_job(3, 'retry');
wait_for_empty($node, 'app.jobs', 'tasks that end in every way');
is(notes(1), '1 alone, 1 own', 'an ack keeps both');
is(notes(2), '2 alone', 'an error keeps what committed by itself');
is(notes(3), '3 alone, 3 own', 'and so does an outcome that undoes');
is(app("SELECT count(DISTINCT pid), min(who), max(who) FROM note WHERE what LIKE '% alone'"),
	'1|app off|app off', 'one process executed all, as the owner');
my $helper = pids('autonomous');
is(app("SELECT DISTINCT pid FROM note WHERE what LIKE '% alone'"), $helper, 'it is there');
is( $node->safe_psql('postgres', "SELECT application_name = 'ruststream autonomous: for process ' || (SELECT w.pid"
		  . " FROM pg_stat_activity AS w WHERE w.backend_type = 'ruststream worker') FROM pg_stat_activity WHERE pid = $helper"),
	't', 'and says for whom');
wait_for($node, $idle, 'it is idle');
is( $node->safe_psql('postgres',
		'SELECT xact_start IS NULL AND backend_xid IS NULL AND backend_xmin IS NULL,'
		  . " (SELECT count(*) FROM pg_locks AS l WHERE l.pid = a.pid) FROM pg_stat_activity AS a WHERE pid = $helper"),
	't|0', 'in no transaction, and holds no lock');

# ------------------------------------------------- errors, locks, hostile text

job(10, q{'{"sql": "SELECT 1 / length($1)", "value": ""}'});
job(11, q{'{"sql": "UPDATE locked SET a = length($1)", "value": "x", "lock": true}'});
job(12, q{jsonb_build_object('sql', 'INSERT INTO note VALUES (''12 '' || $1)', 'value', $$'); DROP TABLE note; --$$)});
wait_for_empty($node, 'app.jobs', 'tasks whose autonomous statements fail');
is(notes(10), '10 22012 quickly, 10 own', 'an error comes back with its SQLSTATE');
is(notes(11), '11 40P01 quickly, 11 own', 'what waits for its own delivery fails as a deadlock, quickly');
is(app('SELECT a FROM locked'), '11', "and the delivery's own write stands");
is(notes(12), "12 '); DROP TABLE note; --, 12 own", 'a parameter is a value');

# ------------------------------------------------------------------- publishing

app(<<'SQL');
SELECT ruststream.create_queue('more');
CREATE FUNCTION handle_more(job more) RETURNS void LANGUAGE sql AS $$ INSERT INTO note VALUES ('more ' || job.id) $$;
SELECT ruststream.subscribe('more', 'more', 'handle_more', poll_interval => '1 h');
SQL
wait_for($node, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'ruststream: more' AND state = 'idle'",
	'a worker that does not poll is idle');
job(20, q{'{"sql": "SELECT ruststream.publish(''more'', to_jsonb($1))", "value": "x", "end": "raise"}'});
wait_for($node, "SELECT count(*) = 1 FROM app.note WHERE what = 'more 1'", 'an autonomous publish wakes a worker');

# --------------------------------------------------------- cancel and terminate

$node->safe_psql('postgres', "SELECT pg_cancel_backend($helper)");
note_job(30, 'ack');
wait_for_empty($node, 'app.jobs', 'a cancel of an idle one');
is(app("SELECT pid FROM note WHERE what = '30 alone'"), $helper, 'is nothing');

sub slow_job
{
	my ($id) = @_;
	job($id, "jsonb_build_object('sql', 'INSERT INTO note SELECT \$1 FROM pace, pg_sleep(s)', 'value', '$id alone')");
	wait_for($node, $sleeping, "task $id is at its autonomous statement");
	return;
}

sub failure
{
	my ($id) = @_;
	return $node->safe_psql('postgres', "SELECT sqlstate FROM ruststream.failure WHERE id = '$id'");
}

my $worker = pids('worker', " AND application_name = 'ruststream: jobs'");
slow_job(31);
$node->safe_psql('postgres', "SELECT pg_cancel_backend($worker)");
wait_for_empty($node, 'app.jobs', 'the caller is cancelled');
is(failure(31), '57014', 'that fails the delivery');
wait_for($node, $idle, 'and stops the statement');
is(pids('autonomous'), $helper, 'not its process');

slow_job(32);
$node->safe_psql('postgres', "SELECT pg_cancel_backend($helper)");
wait_for_empty($node, 'app.jobs', 'the statement is cancelled');
is(failure(32), '57014', 'that fails the delivery, too');

slow_job(33);
$node->safe_psql('postgres', "SELECT pg_terminate_backend($helper)");
wait_for_empty($node, 'app.jobs', 'the process is terminated');
is(failure(33), '08007', 'the caller learns that it does not know');
note_job(34, 'ack');
wait_for_empty($node, 'app.jobs', 'the next call');
is(notes(34), '34 alone, 34 own', 'goes through');
my $next = pids('autonomous');
isnt($next, $helper, 'to another process');

wait_for($node, $idle, 'it is idle');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($next)");
note_job(35, 'ack');
wait_for_empty($node, 'app.jobs', 'one that was terminated while it was idle');
is(notes(35), '35 alone, 35 own', 'is replaced without an error');

slow_job(36);
app('UPDATE pace SET s = 0');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($worker)");
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'ruststream autonomous'"
	. " AND application_name LIKE '% $worker'", 'where the caller is terminated, its helper leaves');
wait_for_empty($node, 'app.jobs', 'the next worker delivers the task');
is(notes(36), '36 alone, 36 own', 'and all is written once');

# ------------------------------------------------------------------ DROP DATABASE

$node->safe_psql('postgres', 'CREATE DATABASE doomed');
$node->safe_psql('doomed', <<'SQL');
CREATE EXTENSION ruststream;
CREATE TABLE note (what text);
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM ruststream.autonomous('INSERT INTO public.note SELECT $1 FROM pg_sleep($2)', 'x', (job.payload->>0)::float8);
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle');
INSERT INTO jobs (payload) VALUES ('[0]');
SQL
wait_for_empty($node, 'jobs', 'an idle helper', 'doomed');
$node->safe_psql('doomed', q{INSERT INTO jobs (payload) VALUES ('[3600]')});
wait_for($node, $sleeping, 'and then a busy one');
my $started = time();
$node->safe_psql('postgres', 'DROP DATABASE doomed');
cmp_ok(time() - $started, '<', 3, 'DROP DATABASE is not held up');

# --------------------------------------------------------------------- kill -9

app('UPDATE pace SET s = 3600');
slow_job(40);
app('UPDATE pace SET s = 0');
$helper = pids('autonomous', " AND wait_event = 'PgSleep'");
kill 'KILL', $helper or die "cannot kill $helper: $!";
poll_until($node, 'SELECT pg_postmaster_start_time() IS NOT NULL') or die 'the server does not come back';
wait_for_empty($node, 'app.jobs', 'after a crash the task is delivered again');
is(notes(40), '40 alone, 40 own', 'all of it');
note_job(41, 'ack');
wait_for_empty($node, 'app.jobs', 'and the next one');
is(notes(41), '41 alone, 41 own', 'finds a helper');
$node->stop;

# -------------------------------------------------------- a server without preload

# One process is left beside the server's own (the logical replication launcher).
my $plain = new_node('plain', preload => 0, conf => 'max_worker_processes = 2');
$plain->safe_psql('postgres', 'CREATE TABLE note (what text)');
my ($status, $out, $err) = $plain->psql('postgres', <<'SQL', on_error_stop => 0);
\set VERBOSITY verbose
BEGIN;
SELECT ruststream.autonomous('INSERT INTO note VALUES ($1)', 'plain');
ROLLBACK;
SELECT ruststream.autonomous($$SELECT ruststream.autonomous('SELECT')$$);
SQL
is($plain->safe_psql('postgres', 'TABLE note'), 'plain', 'without preload it works as well');
like($err, qr/53400.*no process is available.*max_worker_processes/s, 'where no process is free, it says so');

# The session stays, the helper does not.
$plain->safe_psql('postgres', <<'SQL');
SELECT ruststream.autonomous('SELECT');
DO $$
BEGIN
	FOR i IN 1 .. 600 LOOP
		PERFORM pg_sleep(0.1);
		PERFORM pg_stat_clear_snapshot();
		EXIT WHEN NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'ruststream autonomous');
		IF i = 600 THEN
			RAISE EXCEPTION 'it is still there';
		END IF;
	END LOOP;
END $$;
INSERT INTO note SELECT 'kept ' || ruststream.autonomous('SELECT');
SQL
is($plain->safe_psql('postgres', q{SELECT count(*) FROM note WHERE what = 'kept 1'}), '1',
	'an idle helper leaves by itself, and the session gets another');

$plain->safe_psql('postgres', 'CREATE DATABASE doomed');
$plain->safe_psql('doomed', 'CREATE EXTENSION ruststream');
my $session = IPC::Run::start(
	[ 'psql', '-X', '-d', $plain->connstr('doomed'), '-c', q{SELECT ruststream.autonomous('SELECT pg_sleep(3600)')} ],
	'>', \my $session_out, '2>', \my $session_err);
wait_for($plain, $sleeping, 'a session and its helper are at work');
$started = time();
$plain->safe_psql('postgres', 'DROP DATABASE doomed WITH (FORCE)');
cmp_ok(time() - $started, '<', 3, 'DROP DATABASE .. WITH (FORCE) ends both');
$session->finish;
$plain->stop;

done_testing();
