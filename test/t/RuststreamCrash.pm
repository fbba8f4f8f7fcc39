# What the crash tests share: kill -9 at a named failure point, of the process
# that reaches it (the server restarts after the crash) or of the postmaster with
# it (the whole server is gone and is started again).
#
# Needs a build with failure points.  The setting ruststream.failpoint =
# 'name:n' has a process log that it has reached the point for the n-th time and
# kill itself; 'name:n:postmaster' has it kill the postmaster first.
package RuststreamCrash;

use strict;
use warnings;

use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $timeout = $PostgreSQL::Test::Utils::timeout_default;

# A node that restarts after crashes; skips the whole test where the build has no
# failure points.
sub new
{
	my ($class, $name) = @_;
	my $self = bless { publish => sub { } }, $class;

	$self->{node} = new_node($name, conf => <<'CONF');
restart_after_crash = on
ruststream.crash_restart_delay = 10ms
log_statement = none
log_timezone = 'UTC'
autovacuum = off
include_if_exists = 'failpoint.conf'
CONF
	plan skip_all => 'this build has no failure points'
	  if !$self->try_sql('SHOW ruststream.failpoint');
	return $self;
}

sub node
{
	my ($self) = @_;
	return $self->{node};
}

# What is called again and again while we wait for a kill, so that there is work.
sub publish_by
{
	my ($self, $publish) = @_;
	$self->{publish} = $publish;
	return;
}

# Poll until the code returns true.
sub poll
{
	my ($self, $what, $code) = @_;

	for (my $until = time + $timeout; time < $until; usleep(20_000))
	{
		return 1 if $code->();
	}
	die "timed out waiting for $what";
}

# Without complaint where the server is not there or goes away meanwhile.
sub try_sql
{
	my ($self, $sql) = @_;
	my ($stdout, $stderr);

	# It dies where psql has gone before it could write to it.
	return eval {
		$self->{node}->psql('postgres', $sql, stdout => \$stdout, stderr => \$stderr) == 0;
	};
}

# Processes learn of it by SIGHUP, those to be started by inheritance.
sub set_failpoint
{
	my ($self, $failpoint, $postmaster) = @_;
	my $file = $self->{node}->data_dir . '/failpoint.conf';

	open my $conf, '>', "$file.new" or die "$file.new: $!";
	print $conf "ruststream.failpoint = '$failpoint'\n";
	close $conf;
	rename "$file.new", $file or die "$file: $!";
	kill 'HUP', $postmaster if defined $postmaster;
	return;
}

sub postmaster_pid
{
	my ($self) = @_;
	my ($pid) = split /\n/, slurp_file($self->{node}->data_dir . '/postmaster.pid');
	return $pid;
}

# The processes of this server that are there, whoever their parent is.
sub processes
{
	my ($self) = @_;
	my $data = $self->{node}->data_dir;
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

# Have processes die at a point until that has happened so many times more.
sub kill_processes
{
	my ($self, $point, $n, $times) = @_;
	my $node = $self->{node};
	my $offset = -s $node->logfile;
	my $kills = 0;

	$self->set_failpoint("$point:$n", $self->postmaster_pid);
	$self->poll("$times kills at $point", sub {
		$self->{publish}->();
		(undef, $kills) = reached("$point:$n", slurp_file($node->logfile, $offset));
		return $kills >= $times;
	});
	return $kills;
}

# Have the postmaster die with a process at a point, then all the others, and
# start the server again.
sub kill_postmaster
{
	my ($self, $point, $n) = @_;
	my $node = $self->{node};
	my $offset = -s $node->logfile;
	my $pid = $self->postmaster_pid;
	my $reached;

	$self->set_failpoint("$point:$n:postmaster", $pid);
	$self->poll("the postmaster's end at $point", sub {
		$self->{publish}->();
		return readlink("/proc/$pid/exe") ? 0 : 1;
	});
	kill 'KILL', $self->processes;
	$self->poll('all its processes to end', sub { return !$self->processes });
	# Nor must it be a zombie: its lock file would count.
	$self->poll('the postmaster to be reaped', sub { return !-d "/proc/$pid" });
	($reached) = reached("$point:$n:postmaster", slurp_file($node->logfile, $offset));

	$node->kill9;    # it is dead: this tells the node so
	$self->set_failpoint('');
	$node->start;
	return $reached > 0 ? 1 : 0;
}

# So many kills at a point, of processes and of postmasters, spread over the
# first times (up to last) that a process is there.  Two tests; returns how many
# kills it were.
sub kill_at
{
	my ($self, $point, $process_kills, $postmaster_kills, $last) = @_;
	my ($processes, $postmasters) = (0, 0);

	foreach my $n (1 .. $last)
	{
		my $times = int($process_kills / $last) + ($n <= $process_kills % $last ? 1 : 0);
		$processes += $self->kill_processes($point, $n, $times);
	}
	foreach my $i (1 .. $postmaster_kills)
	{
		$postmasters += $self->kill_postmaster($point, 1 + $i % $last);
	}

	cmp_ok($processes, '>=', $process_kills, "processes killed at $point");
	is($postmasters, $postmaster_kills, "postmasters killed at $point");
	note "$point: $processes processes, $postmasters postmasters killed";
	return $processes + $postmasters;
}

# From now on nobody is killed, and the server is there.
sub end_kills
{
	my ($self) = @_;

	$self->set_failpoint('', $self->postmaster_pid);
	$self->poll('the last kill', sub { $self->try_sql('SELECT 1') });
	return;
}

# The tasks whose ids are in table published have had one effect each, by those in table
# effect, both with this in front of their names; there were more than so many.  Three tests.
sub check_effects
{
	my ($self, $prefix, $least) = @_;
	my $node = $self->{node};
	my $label = $prefix =~ /^(.+)_$/ ? "$1: " : '';
	my $published = $node->safe_psql('postgres', "SELECT count(*) FROM ${prefix}published");

	cmp_ok($published, '>', $least, "${label}there was work to do");
	note "$label$published tasks";
	is($node->safe_psql('postgres', "SELECT count(*), count(DISTINCT id) FROM ${prefix}effect"),
		"$published|$published", "${label}every task has exactly one effect");
	is($node->safe_psql('postgres', "SELECT count(*) FROM ${prefix}published AS p FULL JOIN ${prefix}effect AS e USING (id)"
			  . ' WHERE p IS NULL OR e IS NULL'),
		'0', "${label}none is lost, none comes from nowhere");
	return;
}

# A failure is recorded with its settlement: once, or not at all.  Of the tasks in table
# published the first attempt fails where this holds.
sub check_failures
{
	my ($self, $fails) = @_;

	is($self->{node}->safe_psql('postgres',
			'SELECT count(*) - count(DISTINCT id), count(*) FILTER (WHERE message <> \'the first attempt fails\'),'
			  . " count(*) = least((SELECT count(*) FROM published WHERE $fails), 1000)"
			  . ' FROM ruststream.failure'),
		'0|0|t', 'every failure is recorded once, and no others');
	return;
}

# When the server accepted connections, by its log: pairs of time stamps, each
# interval up to the kill that ended it, the last one without an end.
sub intervals_up
{
	my ($self) = @_;
	my @intervals;
	my $from;

	foreach my $line (split /\n/, slurp_file($self->{node}->logfile))
	{
		my ($at, $what) = $line =~
		  /^(\S+ \S+ UTC) \[\d+\] LOG:  (database system is ready to accept connections|failure point .* reached)/
		  or next;
		if ($what =~ /^database/)
		{
			$from = $at;
		}
		elsif (defined $from)
		{
			push @intervals, [ $from, $at ];
			undef $from;
		}
	}
	push @intervals, [ $from, 'infinity' ] if defined $from;
	return @intervals;
}

1;
