# Workers whose deliveries share commits: what one leaves in the session is gone
# before the next, what is in work can be seen, one is cancelled or the worker told to
# leave without the others' loss, no session has more subtransactions than there is
# room for, and under conflicts each task still has one effect.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('shared_commit', conf => <<'CONF');
log_statement = none
CONF

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sub counters
{
	return sql("SELECT deliveries, acked, delayed, discarded, failed, transient"
		  . " FROM ruststream.stat_subscription WHERE subscription = 'work'");
}

# A handler that waits at the gate of its task where that is closed.
sql(<<'SQL');
SELECT ruststream.create_queue('tasks');
CREATE TABLE effect (id bigint, note text, xact xid8 DEFAULT pg_current_xact_id());
CREATE TABLE gate (id bigint PRIMARY KEY);
INSERT INTO gate SELECT generate_series(1, 10);
CREATE FUNCTION look() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	last bigint;
BEGIN
	BEGIN
		last := lastval();
	EXCEPTION WHEN object_not_in_prerequisite_state THEN
		NULL;
	END;
	RETURN concat_ws(' ', NULLIF(current_setting('my.own', true), ''), NULLIF(current_user, session_user),
		(SELECT string_agg(name, ' ') FROM pg_prepared_statements),
		(SELECT string_agg(name, ' ') FROM pg_cursors WHERE name ~ '^left'),
		(SELECT string_agg(relname, ' ') FROM pg_class WHERE relnamespace = pg_my_temp_schema()),
		(SELECT string_agg('lock', ' ') FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
		last);
END $$;
CREATE FUNCTION work(task tasks) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect VALUES (task.id, look());
	PERFORM FROM gate WHERE gate.id = task.id FOR SHARE;
	EXECUTE coalesce(task.payload->>'sql', 'SELECT 1');
	RETURN CASE WHEN task.payload ? 'discard' THEN ruststream.discard() ELSE ruststream.ack() END;
END $$;
CREATE SEQUENCE numbers;
SELECT ruststream.subscribe('work', 'tasks', 'work', deliveries_per_commit => 10, max_commit_wait => '60 s',
	retry_delay => '1 h', workers => 0);
SQL

# Nobody is at work while tasks are written, so that they are claimed together.
sub begin_with
{
	my ($values) = @_;

	sql("TRUNCATE effect; TRUNCATE tasks; INSERT INTO tasks (id, payload) OVERRIDING SYSTEM VALUE VALUES $values;"
		  . " SELECT ruststream.alter_subscription('work', workers => 1)");
	return;
}

sub end
{
	sql("SELECT ruststream.alter_subscription('work', workers => 0)");
	wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
		'the worker leaves');
	return;
}

my $sharing = "SELECT string_agg(id::text, ' ' ORDER BY id) FROM effect GROUP BY xact ORDER BY min(id)";

# ------------------------------------------------- nothing leaks to the next

begin_with(join ', ', map { "($_->[0], jsonb_build_object('sql', \$\$$_->[1]\$\$))" }
	  [ 1, q{SELECT set_config('my.own', 'left', false)} ],
	  [ 2, q{SET ROLE pg_monitor} ],
	  [ 3, q{PREPARE left_p AS SELECT 1} ],
	  [ 4, q{SELECT pg_advisory_lock(7)} ],
	  [ 5, q{SELECT nextval('numbers')} ],
	  [ 6, q{DECLARE left_c CURSOR FOR SELECT 1} ],
	  [ 7, q{DECLARE left_h CURSOR WITH HOLD FOR SELECT 1} ],
	  [ 8, q{CREATE TEMP TABLE left_t ()} ],
	  [ 9, q{CREATE TEMP TABLE left_u ()} ],
	  [ 10, q{SELECT 1} ]);
wait_for_empty($node, 'tasks', 'every task is delivered');
is(sql('SELECT count(*), max(note) FROM effect'), '10|', 'and has found nothing of the others');
is(sql($sharing), "1 2 3 4 5 6\n7\n8\n9\n10", 'a commit came early where only that removes what was left');
end();

# -------------------------------------------------- seen, cancelled, stopped

my $counted = counters();
my $gate = $node->background_psql('postgres');
sub close_gate { $gate->query_safe("BEGIN; SELECT FROM gate WHERE id = $_[0] FOR UPDATE"); return; }
sub open_gate { $gate->query_safe('ROLLBACK'); return; }
my $at_gate = "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'"
  . " AND wait_event_type = 'Lock'";

close_gate(3);
begin_with(join ', ', map { "($_, '{}')" } 1 .. 5);
wait_for($node, $at_gate, 'the third of five is in its handler');
is(sql('SELECT id FROM ruststream.delivery_in_work'), '3', 'it is what is seen to be in work');
is(sql('SELECT count(*) FROM effect'), '0', 'nothing of the two before it is committed');
is(counters(), $counted, 'nor counted');
is(sql('SELECT count(*) FROM (SELECT FROM tasks FOR UPDATE SKIP LOCKED) AS t'), '0', 'all five are locked');
sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'ruststream worker'");
wait_for($node, 'SELECT count(*) = 1 FROM tasks', 'when it is cancelled');
is(sql($sharing), '1 2 4 5', 'it fails alone');
is(sql('SELECT id, attempt, retry_after > now() FROM tasks'), '3|2|t', 'and is tried again later');
is(sql(q{SELECT id, sqlstate FROM ruststream.failure}), '3|57014', 'recorded once');
is(counters(), join('|', map { (split /\|/, $counted)[ $_->[0] ] + $_->[1] }
		[ 0, 5 ], [ 1, 4 ], [ 2, 1 ], [ 3, 0 ], [ 4, 1 ], [ 5, 0 ]), 'each is counted once');
end();
open_gate();

close_gate(2);
begin_with(join ', ', map { "($_, '{}')" } 1 .. 5);
wait_for($node, $at_gate, 'the second of five is in its handler');
sql("SELECT ruststream.pause('work')");
open_gate();
wait_for($node, "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
	'a worker that is to leave');
is(sql($sharing), '1 2', 'leaves behind the delivery in work');
is(sql('SELECT count(*), max(attempt) FROM tasks'), '3|1', 'and the others as they were');
sql("SELECT ruststream.resume('work')");
wait_for_empty($node, 'tasks', 'for the next');
end();
$gate->quit;

# ----------------------------------------------------------- subtransactions

# How many a backend advertises can be asked from 16 on; else the commits tell.
my $look = $node->pg_version >= 16
  ? q{(SELECT string_agg(s.subxact_count || CASE WHEN s.subxact_overflowed THEN ' overflowed' ELSE '' END, ' ')
		FROM pg_stat_get_backend_idset() AS b, pg_stat_get_backend_subxact(b) AS s
		WHERE pg_stat_get_backend_pid(b) = pg_backend_pid())}
  : q{''};
sql(<<"SQL");
CREATE FUNCTION blocks(task tasks) RETURNS void LANGUAGE plpgsql AS \$\$
BEGIN
	FOR i IN 1 .. (task.payload->>'blocks')::int LOOP
		BEGIN
			INSERT INTO effect VALUES (task.id, $look);
		EXCEPTION WHEN division_by_zero THEN
			NULL;
		END;
	END LOOP;
	INSERT INTO effect VALUES (task.id, $look);
END \$\$;
SELECT ruststream.alter_subscription('work', handler => 'blocks', deliveries_per_commit => 1000);
SQL
begin_with(join ', ', map { sprintf q{(%d, '{"blocks": %d}')}, $_, $_ <= 200 ? 0 : 10 } 1 .. 230);
wait_for_empty($node, 'tasks', 'deliveries with and without EXCEPTION blocks are done');
is( sql('SELECT max(n), count(*) FROM (SELECT count(*) AS n FROM effect WHERE id <= 180 GROUP BY xact) AS c'),
	'60|3', 'so many share a commit as there is room for subtransactions');
is( sql('SELECT max(n) FROM (SELECT count(*) AS n FROM effect WHERE id > 200 GROUP BY xact) AS c'),
	'55', 'those of EXCEPTION blocks are counted');
is(sql(q{SELECT count(*) FROM effect WHERE note ~ 'overflowed' OR note > '' AND note::int > 64}),
	'0', 'none is beyond it');
end();

# ------------------------------------------------------------------ conflicts

sql(<<'SQL');
SELECT ruststream.create_queue('sums', isolation => 'serializable');
CREATE TABLE sum (part integer PRIMARY KEY, total bigint);
INSERT INTO sum VALUES (0, 0), (1, 0);
CREATE TABLE once (id bigint UNIQUE, attempt integer);
CREATE FUNCTION add(task sums) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO once VALUES (task.id, ruststream.attempt());
	UPDATE sum SET total = total + 1 WHERE part = task.id % 2;
	IF ruststream.attempt() = 1 AND task.id % 10 = 0 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	UPDATE sum SET total = total + 1 WHERE part = (task.id + 1) % 2;
END $$;
INSERT INTO sums (payload) SELECT '{}' FROM generate_series(1, 300);
SELECT ruststream.subscribe('add', 'sums', 'add', workers => 3, deliveries_per_commit => 10, retry_delay => '1 ms');
SQL
wait_for_empty($node, 'sums', 'three workers at odds with each other come to an end');
is(sql('SELECT part, total FROM sum ORDER BY part'), "0|300\n1|300", 'each task has had one effect');
is(sql('SELECT count(*), count(*) FILTER (WHERE id % 10 = 0 AND attempt = 1) FROM once'), '300|0',
	'of an attempt that has not failed');
cmp_ok(sql("SELECT transient FROM ruststream.stat_subscription WHERE subscription = 'add'"), '>', 0,
	'and there were conflicts');

$node->stop;
done_testing();
