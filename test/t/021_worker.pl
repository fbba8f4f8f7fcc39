# A worker at work: it delivers end to end with its owner's rights and no
# others, leaves nothing of one delivery to the next, answers cancel and
# terminate as it should, has its tables vacuumed, and does not grow.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('worker', conf => <<'CONF');
log_statement = none
CONF
$node->safe_psql('postgres', <<'SQL');
CREATE ROLE other;
CREATE ROLE app LOGIN IN ROLE other;
CREATE SCHEMA app AUTHORIZATION app;
ALTER ROLE app SET search_path = app;
SQL

sub app
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '-U', 'app' ]);
}

# The pids of the workers of a subscription, those that are idle or all.
sub workers
{
	my ($subscription, $and) = @_;
	return "SELECT pid FROM pg_stat_activity WHERE backend_type = 'ruststream worker'"
	  . " AND application_name = 'ruststream: $subscription'"
	  . ($and // '');
}

sub idle_pid
{
	my ($subscription) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	wait_for($node, "SELECT count(*) = 1 FROM (" . workers($subscription, " AND state = 'idle'") . ") AS w",
		"the worker of $subscription is idle");
	return $node->safe_psql('postgres', workers($subscription));
}

# ------------------------------------------------------- end to end, as whom?

# Everything that runs of the user's says as whom it runs: a default, triggers
# of both tables, a policy, and the handler, which tries to become more.
app(<<'SQL');
CREATE TABLE ran (what text, who text DEFAULT current_user || ' ' || session_user || ' ' || current_setting('is_superuser'));
CREATE FUNCTION note_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO app.ran VALUES (TG_TABLE_NAME || ' ' || TG_OP);
	RETURN COALESCE(NEW, OLD);
END $$;
CREATE FUNCTION note(what text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO app.ran VALUES (what);
	RETURN true;
END $$;
SELECT ruststream.create_queue('jobs');
ALTER TABLE jobs ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY everything ON jobs USING (note('policy'));
CREATE TABLE done (id bigint UNIQUE, attempt integer, pid integer DEFAULT pg_backend_pid(), noted boolean DEFAULT note('default'));
CREATE TRIGGER note BEFORE UPDATE OR DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION note_trigger();
CREATE TRIGGER note AFTER INSERT ON done FOR EACH ROW EXECUTE FUNCTION note_trigger();
CREATE CONSTRAINT TRIGGER later AFTER INSERT ON done DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note_trigger();

CREATE TABLE blocked (id bigint);
CREATE FUNCTION handle(job jobs) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO app.done VALUES (job.id, ruststream.attempt());
	IF EXISTS (SELECT FROM app.blocked AS b WHERE b.id = job.id) THEN
		PERFORM pg_sleep(3600);
	END IF;
	IF job.payload ? 'become' THEN
		EXECUTE 'RESET ROLE';
		EXECUTE 'RESET SESSION AUTHORIZATION';
		PERFORM app.note('handler after RESET');
		EXECUTE job.payload->>'become';
	END IF;
	PERFORM app.note('handler');
	IF job.payload ? 'retry' AND ruststream.attempt() = 1 THEN
		RETURN ruststream.retry();
	END IF;
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('jobs', 'jobs', 'handle');
SQL
my $pid = idle_pid('jobs');

app(q{SELECT ruststream.publish('jobs', '{}'); INSERT INTO jobs (payload) VALUES ('{"retry": true}')});
wait_for_empty($node, 'app.jobs', 'published and inserted tasks are delivered');
is(app('SELECT id, attempt, pid FROM done ORDER BY id'), "1|1|$pid\n2|2|$pid", 'by the worker');
is( app("SELECT string_agg(DISTINCT what, ', ' ORDER BY what) FROM ran"),
	'default, done INSERT, handler, jobs DELETE, jobs UPDATE, policy',
	'defaults, policies, triggers and the handler ran');
is(app('SELECT DISTINCT who FROM ran'), 'app app off', 'all as the owner, never as a superuser');

app('TRUNCATE ran');
for my $become ('SET ROLE postgres', 'SET SESSION AUTHORIZATION postgres')
{
	app("INSERT INTO jobs (payload) VALUES (jsonb_build_object('become', '$become'))");
}
wait_for($node, "SELECT count(DISTINCT id) = 2 FROM ruststream.failure WHERE sqlstate = '42501'",
	'a handler cannot become a superuser');
is(app('SELECT count(*) > 0 FROM jobs'), 't', 'its task is not done');
app(q{UPDATE jobs SET payload = '{"become": "RESET ROLE"}', retry_after = NULL});
wait_for_empty($node, 'app.jobs', 'and is delivered when it does not try');
is(app("SELECT DISTINCT who FROM ran WHERE what = 'handler after RESET'"), 'app app off',
	'RESET ROLE and RESET SESSION AUTHORIZATION gain nothing');

# --------------------------------------------------------- nothing held idle

$pid = idle_pid('jobs');
is( $node->safe_psql('postgres',
		'SELECT xact_start IS NULL AND backend_xid IS NULL AND backend_xmin IS NULL,'
		  . " (SELECT count(*) FROM pg_locks AS l WHERE l.pid = a.pid)"
		  . " FROM pg_stat_activity AS a WHERE pid = $pid"),
	't|0', 'an idle worker is in no transaction and holds no lock');

# ------------------------------------------------------------------- signals

is($node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)"), 't', 'cancel an idle worker');
app(q{INSERT INTO jobs (id, payload) OVERRIDING SYSTEM VALUE VALUES (100, '{}')});
wait_for_empty($node, 'app.jobs', 'it goes on delivering');
is(app('SELECT attempt, pid FROM done WHERE id = 100'), "1|$pid", 'as if nothing had happened');

my $in_work = "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'"
  . " AND wait_event = 'PgSleep'";

# A cancelled delivery has failed.
app(q{INSERT INTO blocked VALUES (101);
	INSERT INTO jobs (id, payload) OVERRIDING SYSTEM VALUE VALUES (101, '{}')});
wait_for($node, $in_work, 'a delivery is in work');
app('DELETE FROM blocked');
$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
wait_for_empty($node, 'app.jobs', 'a cancelled delivery is tried again');
is(app('SELECT attempt, pid FROM done WHERE id = 101'), "2|$pid", 'its attempt counted, by the same worker');
is($node->safe_psql('postgres', "SELECT attempt, sqlstate FROM ruststream.failure WHERE id = '101'"),
	'1|57014', 'the failure is recorded');

# A terminated worker has never delivered it.
app(q{INSERT INTO blocked VALUES (102);
	INSERT INTO jobs (id, payload) OVERRIDING SYSTEM VALUE VALUES (102, '{}')});
wait_for($node, $in_work, 'a delivery is in work');
app('DELETE FROM blocked');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
wait_for_empty($node, 'app.jobs', 'the delivery of a terminated worker is made by another');
is(app("SELECT attempt, pid <> $pid FROM done WHERE id = 102"), '1|t', 'its attempt not counted');
is($node->safe_psql('postgres', "SELECT count(*) FROM ruststream.failure WHERE id = '102'"),
	'0', 'and no failure recorded');

# -------------------------------------------------- nothing leaks in between

# Each delivery says what it finds, then leaves what a session can keep, and
# ends in every way.
app(<<'SQL');
SELECT ruststream.create_queue('dirty');
CREATE TABLE found (id bigint, pid integer, what text);
CREATE FUNCTION leave(job dirty) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
DECLARE
	found text;
BEGIN
	SELECT concat_ws(', ',
		(SELECT 'relation ' || relname FROM pg_class WHERE relnamespace = pg_my_temp_schema() LIMIT 1),
		(SELECT 'prepared ' || name FROM pg_prepared_statements LIMIT 1),
		(SELECT 'cursor ' || name FROM pg_cursors WHERE name = 'left_open' LIMIT 1),
		(SELECT 'lock ' || objid FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' LIMIT 1),
		(SELECT 'setting ' || current_setting('app.note', true) WHERE current_setting('app.note', true) <> ''),
		(SELECT 'setting ' || current_setting('app.local', true) WHERE current_setting('app.local', true) <> ''),
		(SELECT 'work_mem ' || current_setting('work_mem') WHERE current_setting('work_mem') <> '4MB'),
		(SELECT 'search_path ' || current_setting('search_path') WHERE current_setting('search_path') <> 'app'),
		(SELECT 'user ' || current_user WHERE current_user <> 'app')) INTO found;
	INSERT INTO app.found VALUES (job.id, pg_backend_pid(), found);
	CREATE TEMPORARY TABLE left_table (a integer) ON COMMIT PRESERVE ROWS;
	CREATE TEMPORARY SEQUENCE left_sequence;
	EXECUTE 'PREPARE left_plan AS SELECT 1';
	EXECUTE 'DECLARE left_open CURSOR WITH HOLD FOR SELECT set_config(''work_mem'', ''9MB'', false)';
	PERFORM pg_advisory_lock(4711), pg_advisory_lock(4711), pg_advisory_lock_shared(4712);
	PERFORM set_config('app.note', 'left', false), set_config('app.local', 'left', true);
	PERFORM set_config('work_mem', '7MB', false), set_config('search_path', 'pg_temp', false);
	EXECUTE 'SET ROLE other';
	IF job.payload->>'end' = 'raise' THEN
		RAISE EXCEPTION 'as asked';
	END IF;
	RETURN ROW(job.payload->>'end', NULL, NULL)::ruststream.outcome;
END $$;
SQL
app(q{SELECT ruststream.subscribe('dirty', 'dirty', 'leave', on_error => 'discard')});
app(qq{INSERT INTO dirty (payload) SELECT jsonb_build_object('end', e)
	FROM unnest('{ack,discard,raise,ack,raise,discard,ack}'::text[]) AS e});
wait_for_empty($node, 'app.dirty', 'deliveries that leave things behind');
is(app('SELECT count(*), count(DISTINCT pid) FROM found'), '3|1', 'one worker served them')
  or diag(app('TABLE found'));
is(app(q{SELECT string_agg(what, '; ') FROM found}), '; ; ', 'none finds what another has left');
is($node->safe_psql('postgres', "SELECT count(*) FROM ruststream.failure WHERE subscription = 'dirty' AND message <> 'as asked'"),
	'0', 'and none fails for it');
$pid = idle_pid('dirty');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_locks WHERE pid = $pid"), '0',
	'no lock remains after the last');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_class WHERE relname LIKE 'left%'"), '0',
	'no temporary table either');

# -------------------------------------- transient failures, where workers meet

# Three workers add to the same row at repeatable read: most of their deliveries
# meet, and are rolled back and claimed anew.
for my $level ('repeatable read', 'serializable')
{
	(my $name = $level) =~ tr/ /_/;
	app(<<"SQL");
SELECT ruststream.create_queue('$name', isolation => '$level');
CREATE TABLE sum_$name (n bigint);
INSERT INTO sum_$name VALUES (0);
CREATE TABLE added_$name (id bigint UNIQUE);
CREATE FUNCTION add_$name(job $name) RETURNS void LANGUAGE plpgsql AS \$\$
BEGIN
	UPDATE app.sum_$name SET n = n + job.id;
	INSERT INTO app.added_$name VALUES (job.id);
END \$\$;
INSERT INTO $name (payload) SELECT '{}' FROM generate_series(1, 1000);
SELECT ruststream.subscribe('$name', '$name', 'add_$name', workers => 3, retry_delay => '10 ms');
SQL
	wait_for_empty($node, "app.$name", "deliveries that meet at $level");
	is(app("SELECT n, (SELECT count(*) FROM added_$name) FROM sum_$name"), '500500|1000',
		'no update is lost, none is made twice');
	wait_for($node, "SELECT transient > 0 AND acked = 1000 FROM ruststream.stat_subscription"
		  . " WHERE subscription = '$name'", 'the counters show that they met');
	note(app("SELECT transient, failed FROM ruststream.stat_subscription WHERE subscription = '$name'"));
	app("SELECT ruststream.unsubscribe('$name')");
}

# ---------------------------------------- a worker as the only writer, growth

# The counter is updated by the worker alone: if nobody but it counts the dead
# rows, autovacuum must hear of them from it.  The index keeps the updates from
# being HOT, so that pruning does not take the dead rows away before anybody
# has counted them.
app(<<'SQL');
SELECT ruststream.create_queue('many');
CREATE TABLE tally (n bigint) WITH (autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);
CREATE INDEX ON tally (n);
INSERT INTO tally VALUES (0);
CREATE FUNCTION count(job many) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	UPDATE app.tally SET n = n + 1;
	IF job.id % 10 = 0 THEN
		RAISE EXCEPTION 'one of ten' USING DETAIL = repeat('detail ', 20);
	END IF;
END $$;
ALTER TABLE many SET (autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
SELECT ruststream.subscribe('many', 'many', 'count', on_error => 'discard');
SQL
$pid = idle_pid('many');

# Private memory, in kB; what it touches of shared buffers is not its own.
sub memory
{
	my ($anonymous) = slurp_file("/proc/$pid/status") =~ /^RssAnon:\s*(\d+) kB$/m;
	return $anonymous;
}

my $deliveries = "SELECT deliveries FROM ruststream.stat_subscription WHERE subscription = 'many'";
app(q{INSERT INTO many (payload) SELECT '{}' FROM generate_series(1, 10000)});
wait_for_empty($node, 'app.many', '10,000 deliveries');
wait_for($node, $deliveries, 'are counted', '10000');
my $before = memory();
app(q{INSERT INTO many (payload) SELECT '{}' FROM generate_series(1, 90000)});
wait_for_empty($node, 'app.many', '100,000 deliveries');
wait_for($node, $deliveries, 'are counted', '100000');
my $after = memory();

is($node->safe_psql('postgres', workers('many')), $pid, 'all by one worker');
is( $node->safe_psql('postgres',
		"SELECT acked, discarded, failed FROM ruststream.stat_subscription WHERE subscription = 'many'"),
	'90000|10000|10000', 'one of ten failed');
cmp_ok($after - $before, '<', 1024, "it grew by less than 1 MB ($before kB to $after kB)");
is(app('SELECT n FROM tally'), '90000', 'every ack had its effect');
wait_for($node, 'SELECT count(*) <= 1000 FROM ruststream.failure_history'
	  . " WHERE subscription = 'many'", 'the history of failures is bounded');

for my $table ('tally', 'many')
{
	wait_for($node, "SELECT autovacuum_count > 0 FROM pg_stat_user_tables WHERE relname = '$table'",
		"autovacuum comes to $table");
}

$node->stop;
done_testing();
