# What the engines share that are served by the command line.  Not an engine itself: one has url, value and
# handler, and sql to look at its tables.
package Conformance::commandline;
use strict;
use warnings;

use POSIX qw(:sys_wait_h);
use Time::HiRes qw(sleep);

use engines::engine;
our @ISA = ('Conformance::engine');

# No command takes longer.
my $PATIENCE = $ENV{PG_TEST_TIMEOUT_DEFAULT} // 60;

sub new
{
	my ($class, $home) = @_;
	return bless { home => $home, program => $ENV{RUSTSTREAM} // "$home/../../src/client/build/ruststream" }, $class;
}

# A handler in SQL that begins, and does not end it.
sub left_open { return "BEGIN;\nINSERT INTO effect (payload, attempt) VALUES ('open', :attempt)\n"; }

# Why the program does not serve this engine, if so.
sub missing
{
	my ($self, $engine) = @_;
	return "there is no $self->{program}" unless -x $self->{program};
	return `$self->{program} --version` =~ /\b$engine\b/ ? '' : "this build does not serve $engine";
}

# What a command prints, standard error included, and whether it went well.
sub run
{
	my ($self, @command) = @_;
	my $pid = open(my $out, '-|') // die "fork: $!\n";
	if ($pid == 0)
	{
		open(STDERR, '>&', \*STDOUT) or die "dup: $!\n";
		alarm $PATIENCE;
		exec @command or die "@command: $!\n";
	}
	my $text = do { local $/; <$out> } // '';
	close $out;
	return ($text, $? == 0);
}

# The same of ours; a failure is the caller's end.
sub must
{
	my ($self, @command) = @_;
	my ($text, $well) = $self->run($self->{program}, @command);
	die $text unless $well;
	return $text;
}

sub describe
{
	my ($self, $scenario) = @_;
	my @options = ('--id', 'id', '--payload', 'payload', '--create-index');

	push @options, '--' . tr/_/-/r, $_ eq 'group' ? 'group_name' : $_ for @{ $scenario->{roles} };
	push @options, '--locked-until', 'locked_until' if $scenario->{form} eq 'lease';
	push @options, '--lock-key', $scenario->{lock_key} // 'key-{id}' if $scenario->{form} eq 'advisory_lock';
	push @options, '--fifo' if $scenario->{fifo};
	push @options, "--$_", $scenario->{$_} for grep { defined $scenario->{$_} } qw(isolation mode);
	my ($text, $well) = $self->run($self->{program}, 'describe', $self->url, 'jobs', @options);
	return $well ? '' : $text;
}

sub subscribe
{
	my ($self, $scenario) = @_;
	my %settings = %{ $scenario->{settings} };
	# What publishes through a session of its own, and then fails, is a program.
	my $apart = "$self->{program} publish '" . $self->url . "' jobs child --delay 1h >&2; exit 1";
	my @options = ('--handler', $self->handler($scenario));
	@options = ('--exec', "'$self->{home}/batch_handler'") if $settings{batch_size};
	@options = ('--exec', $apart) if ($scenario->{handler} // '') eq 'apart';

	$settings{dead_letter} = $settings{dead_letter} eq 'table' ? 'dead' : 'graveyard' if $settings{dead_letter};
	push @options, '--' . tr/_/-/r, $settings{$_} for sort keys %settings;
	my ($text, $well) = $self->run($self->{program}, 'subscribe', $self->url, 'jobs', 'jobs', @options);
	$self->{warned} = $text;
	return $well ? '' : $text;
}

sub insert
{
	my ($self, $row, $scenario) = @_;
	my %values = (%$row, grep({ $_ eq 'group' } @{ $scenario->{roles} }) ? (group_name => $row->{group_name} // 'jobs') : ());
	my @names = sort keys %values;
	my @values = map { $self->value($_, $values{$_}) } @names;

	local $" = ', ';
	$self->sql("INSERT INTO jobs (@names) VALUES (@values)");
	return;
}

# Begin to deliver; with a failure point, the process stops there.
sub start
{
	my ($self, $scenario, $point) = @_;

	$self->{pid} = open($self->{output}, '-|') // die "fork: $!\n";
	return if $self->{pid} != 0;
	open(STDERR, '>&', \*STDOUT) or die "dup: $!\n";
	$ENV{RUSTSTREAM_FAILPOINT} = "$point:1:stop" if $point;
	alarm $PATIENCE;
	exec $self->{program}, 'work', $self->url, '--drain', '--trace' or die "$self->{program}: $!\n";
}

sub wait_until_stopped
{
	my ($self) = @_;
	for (my $waited = 0; ; $waited += 0.01)
	{
		my $gone = waitpid($self->{pid}, WNOHANG | WUNTRACED);
		return if $gone == $self->{pid} && WIFSTOPPED(${^CHILD_ERROR_NATIVE});
		die "the delivery did not stop\n" if $gone != 0 || $waited > $PATIENCE;
		sleep 0.01;
	}
}

sub resume
{
	my ($self) = @_;
	CORE::kill 'CONT', $self->{pid};
	return;
}

sub kill
{
	my ($self) = @_;
	CORE::kill 'KILL', $self->{pid};
	return;
}

# The steps it took; what it said besides is kept.
sub finish
{
	my ($self) = @_;
	my @lines = $self->lines;

	$self->{said} = join "\n", grep { /^(?:ruststream|hint): / } @lines;
	return grep { !/^(?:ruststream|hint): / } @lines;
}

sub drain
{
	my ($self, $scenario) = @_;
	$self->start($scenario);
	my @trace = $self->finish;
	die "$self->{said}\n" if $self->{failed};
	return @trace;
}

# Another process delivers; why it does not, if so.
sub other_drain
{
	my ($self) = @_;
	my ($text, $well) = $self->run($self->{program}, 'work', $self->url, '--drain');
	return $well ? '' : $text;
}

# Somebody publishes; why it cannot be done, if so.
sub publish
{
	my ($self, $payload) = @_;
	my ($text, $well) = $self->run($self->{program}, 'publish', $self->url, 'jobs', $payload);
	return $well ? '' : $text;
}

# Whether its processes can be stopped: in a build with failure points.
sub can_stop
{
	my ($self) = @_;
	return $self->{can_stop} //= system('grep', '-q', 'RUSTSTREAM_FAILPOINT', $self->{program}) == 0;
}

1;
