# 200 times kill -9, spread over every named failure point of the lane, of a
# worker (the server restarts after the crash) and of the postmaster with it
# (the whole server is gone and is started again).  Afterwards every task has
# had exactly one effect, none is lost, and a crash has counted no attempt.
#
# Needs a build with failure points.  The setting ruststream.failpoint =
# 'name:n' has a process log that it has reached the point for the n-th time and
# kill itself; 'name:n:postmaster' has it kill the postmaster first.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my @points = qw(after_begin after_claim after_savepoint after_handler
  after_rollback_to after_settle before_commit after_commit);
my $worker_kills = 19;        # of each point
my $postmaster_kills = 6;     # of each point

my $timeout = $PostgreSQL::Test::Utils::timeout_default;
my $node = new_node('crash', conf => <<'CONF');
restart_after_crash = on
ruststream.crash_restart_delay = 10ms
log_statement = none
autovacuum = off
include_if_exists = 'failpoint.conf'
CONF

if (!try_sql('SHOW ruststream.failpoint'))
{
	plan skip_all => 'this build has no failure points';
}

# A task's effect can be written once.  Of three tasks one is acked at
# once, one asks to be tried again and one raises an error on its first
# attempt, having written all the same.
$node->safe_psql('postgres', <<'SQL');
SELECT ruststream.create_queue('tasks');
CREATE TABLE published (id bigint);
CREATE TABLE effect (id bigint UNIQUE, attempt integer);
CREATE FUNCTION work(task tasks) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect VALUES (task.id, ruststream.attempt());
	IF ruststream.attempt() = 1 AND task.id % 3 = 1 THEN
		RETURN CASE WHEN task.id % 2 = 0 THEN ruststream.retry() ELSE ruststream.retry_after('1 ms') END;
	ELSIF ruststream.attempt() = 1 AND task.id % 3 = 2 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	RETURN ruststream.ack();
END $$;
SELECT ruststream.subscribe('work', 'tasks', 'work', workers => 2, retry_delay => '1 ms');
SQL

# ------------------------------------------------------------------ utilities

# Poll until the code returns true.
sub poll
{
	my ($what, $code) = @_;

	for (my $until = time + $timeout; time < $until; usleep(20_000))
	{
		return 1 if $code->();
	}
	die "timed out waiting for $what";
}

# Without complaint where the server is not there or goes away meanwhile.
sub try_sql
{
	my ($sql) = @_;
	my ($stdout, $stderr);

	# It dies where psql has gone before it could write to it.
	return eval { $node->psql('postgres', $sql, stdout => \$stdout, stderr => \$stderr) == 0 };
}

sub publish_if_few
{
	try_sql(<<'SQL');
WITH task AS (
	INSERT INTO tasks (payload) SELECT '{}' FROM generate_series(1, 30)
	WHERE (SELECT count(*) FROM (SELECT FROM tasks LIMIT 15) AS waiting) < 15
	RETURNING id)
INSERT INTO published SELECT id FROM task
SQL
}

# Processes learn of it by SIGHUP, those to be started by inheritance.
sub set_failpoint
{
	my ($failpoint, $postmaster) = @_;
	my $file = $node->data_dir . '/failpoint.conf';

	open my $conf, '>', "$file.new" or die "$file.new: $!";
	print $conf "ruststream.failpoint = '$failpoint'\n";
	close $conf;
	rename "$file.new", $file or die "$file: $!";
	kill 'HUP', $postmaster if defined $postmaster;
}

sub postmaster_pid
{
	my ($pid) = split /\n/, slurp_file($node->data_dir . '/postmaster.pid');
	return $pid;
}

# The processes of this server that are there, whoever their parent is.
sub processes
{
	my $data = $node->data_dir;
	return grep { (readlink("/proc/$_/cwd") // '') eq $data }
	  map { m{^/proc/(\d+)$} } glob '/proc/[0-9]*';
}

# How many processes have said that they have reached a point, and how many of
# these the postmaster saw killed.
sub reached
{
	my ($failpoint, $log) = @_;
	my @pids = $log =~ /\[(\d+)\] LOG:  failure point "\Q$failpoint\E" reached/g;
	my %killed = map { $_ => 1 } $log =~ /\(PID (\d+)\) was terminated by signal 9/g;

	return (scalar(@pids), scalar(grep { $killed{$_} } @pids));
}

my %killed;

# Have workers die at a point until that has happened so many times more.
sub kill_workers
{
	my ($point, $n, $times) = @_;
	my $offset = -s $node->logfile;
	my $kills = 0;

	set_failpoint("$point:$n", postmaster_pid());
	poll("$times kills at $point", sub {
		publish_if_few();
		(undef, $kills) = reached("$point:$n", slurp_file($node->logfile, $offset));
		return $kills >= $times;
	});
	return $kills;
}

# Have the postmaster die with a worker at a point, then all the others, and
# start the server again.
sub kill_postmaster
{
	my ($point, $n) = @_;
	my $offset = -s $node->logfile;
	my $pid = postmaster_pid();
	my $reached;

	set_failpoint("$point:$n:postmaster", $pid);
	poll("the postmaster's end at $point", sub {
		publish_if_few();
		return readlink("/proc/$pid/exe") ? 0 : 1;
	});
	kill 'KILL', processes();
	poll('all its processes to end', sub { return !processes() });
	# Nor must it be a zombie: its lock file would count.
	poll('the postmaster to be reaped', sub { return !-d "/proc/$pid" });
	($reached) = reached("$point:$n:postmaster", slurp_file($node->logfile, $offset));

	$node->kill9;    # it is dead: this tells the node so
	set_failpoint('');
	$node->start;
	return $reached > 0 ? 1 : 0;
}

# ------------------------------------------------------------------ the kills

my $total = 0;
foreach my $point (@points)
{
	my ($workers, $postmasters) = (0, 0);

	# the first, second and third delivery of a process
	foreach my $n (1 .. 3)
	{
		my $times = int($worker_kills / 3) + ($n <= $worker_kills % 3 ? 1 : 0);
		$workers += kill_workers($point, $n, $times);
	}
	foreach my $i (1 .. $postmaster_kills)
	{
		$postmasters += kill_postmaster($point, 1 + $i % 3);
	}

	cmp_ok($workers, '>=', $worker_kills, "workers killed at $point");
	is($postmasters, $postmaster_kills, "postmasters killed at $point");
	note "$point: $workers workers, $postmasters postmasters killed";
	$total += $workers + $postmasters;
}
cmp_ok($total, '>=', 200, 'kills in all');
note "$total kills in all";

# ---------------------------------------------------------------- the outcome

# What is left is delivered in peace.
set_failpoint('', postmaster_pid());
poll('the last kill', sub { try_sql('SELECT 1') });
wait_for_empty($node, 'tasks', 'every task comes to its end');

my $published = $node->safe_psql('postgres', 'SELECT count(*) FROM published');
cmp_ok($published, '>', 200, 'there was work to do');
note "$published tasks";

is($node->safe_psql('postgres', 'SELECT count(*), count(DISTINCT id) FROM effect'),
	"$published|$published", 'every task has exactly one effect');
is( $node->safe_psql('postgres', 'SELECT count(*) FROM published FULL JOIN effect USING (id)'
		  . ' WHERE published IS NULL OR effect IS NULL'),
	'0', 'none is lost, none comes from nowhere');
is( $node->safe_psql('postgres',
		'SELECT count(*) FROM effect WHERE attempt <> CASE WHEN id % 3 = 0 THEN 1 ELSE 2 END'),
	'0', 'no crash has counted an attempt, and every answer has');

# A failure is recorded with its settlement: once, or not at all.
is( $node->safe_psql('postgres',
		'SELECT count(*) - count(DISTINCT id), count(*) FILTER (WHERE message <> \'the first attempt fails\'),'
		  . ' count(*) = least((SELECT count(*) FROM published WHERE id % 3 = 2), 1000)'
		  . ' FROM ruststream.failure'),
	'0|0|t', 'every failure is recorded once, and no others');

is($node->safe_psql('postgres', 'SELECT state FROM ruststream.status'), 'running',
	'the subscription is at work');
like(slurp_file($node->logfile),
	qr/ruststream had row \d+ of public\.tasks in work for subscription "work" when the server crashed/,
	'the log names what was in work');

$node->stop;
done_testing();
