# A private MariaDB server in a directory of its own: no TCP, nobody's configuration, ended with the test.
#
#	my $server = MariadbServer->new(log_bin => undef, binlog_format => 'STATEMENT');
#	$server->sql('SELECT 1');           the answer, columns separated by spaces, NULL as "NULL"
#	my $session = $server->session;     a connection that stays
#	$session->do('BEGIN');              the same, on it
package MariadbServer;
use strict;
use warnings;

use File::Temp qw(tempdir);
use IPC::Open2;
use Time::HiRes qw(sleep time);

my %own; # pids of servers, by the process that started them

sub tool
{
	my ($name) = @_;
	for my $place (split(/:/, $ENV{PATH}), '/usr/sbin', '/usr/local/sbin')
	{
		return "$place/$name" if -x "$place/$name";
	}
	return;
}

# Why there can be none here, if so.
sub missing
{
	for my $name (qw(mariadbd mariadb-install-db mariadb))
	{
		return "there is no $name" unless tool($name);
	}
	return '';
}

sub new
{
	my ($class, %options) = @_;
	my $directory = tempdir('ruststream-mariadb.XXXXXX', TMPDIR => 1, CLEANUP => 1);
	my $self = bless { directory => $directory, database => 'app', options => \%options }, $class;
	# A server does not run as root: then as the user that its package has made.
	my @user = $> == 0 ? ('--user=mysql') : ();

	chmod 0755, $directory;
	if ($> == 0)
	{
		my (undef, undef, $uid, $gid) = getpwnam('mysql') or die "there is no user mysql\n";
		chown $uid, $gid, $directory or die "chown: $!\n";
	}
	my $log = `@{[tool('mariadb-install-db')]} --no-defaults @user --auth-root-authentication-method=normal --skip-test-db --datadir='$directory/data' 2>&1`;
	die "mariadb-install-db: $log\n" if $? != 0;
	$self->{command} = [tool('mariadbd'), '--no-defaults', @user, "--datadir=$directory/data", "--socket=$directory/socket",
		'--skip-networking', "--pid-file=$directory/pid", "--log-error=$directory/log", '--innodb-flush-log-at-trx-commit=2',
		'--innodb-buffer-pool-size=32M', '--sync-binlog=0',
		map { '--' . tr/_/-/r . (defined $options{$_} ? "=$options{$_}" : '') } sort keys %options];
	$self->start;
	$self->sql('CREATE DATABASE app', '');
	return $self;
}

sub start
{
	my ($self) = @_;
	my $pid = fork() // die "fork: $!\n";

	if ($pid == 0)
	{
		open(STDOUT, '>>', "$self->{directory}/output");
		open(STDERR, '>&', \*STDOUT);
		exec { $self->{command}[0] } @{ $self->{command} } or die "mariadbd: $!\n";
	}
	$self->{pid} = $pid;
	$own{$pid} = $$;
	for (1 .. 600)
	{
		return if eval { $self->sql('SELECT 1', '') eq '1' };
		die "the server did not start: see $self->{directory}/log\n" if waitpid($pid, 1) == $pid;
		sleep 0.1;
	}
	die "the server did not answer\n";
}

sub stop
{
	my ($self, $signal) = @_;
	kill $signal // 'TERM', $self->{pid};
	waitpid($self->{pid}, 0);
	delete $own{ $self->{pid} };
	return;
}

END
{
	my $status = $?;
	for my $pid (grep { $own{$_} == $$ } keys %own)
	{
		kill 'KILL', $pid;
		waitpid($pid, 0);
	}
	$? = $status;
}

sub url { my ($self, $user) = @_; return 'mysql://' . ($user // 'root') . "\@/app?socket=$self->{directory}/socket"; }
sub socket { return $_[0]{directory} . '/socket'; }

sub client
{
	my ($self, @options) = @_;
	return (tool('mariadb'), '--no-defaults', '-S', "$self->{directory}/socket", '-u', 'root', '-N', '-B', '--default-character-set=utf8mb4', @options);
}

sub sql
{
	my ($self, $text, $database) = @_;
	my @command = ($self->client, $database // $self->{database});
	my $pid = open2(my $out, my $in, 'sh', '-c', 'exec "$@" 2>&1', 'sh', grep { $_ ne '' } @command);

	print $in $text;
	close $in;
	my $answer = do { local $/; <$out> } // '';
	waitpid($pid, 0);
	die "$text: $answer\n" if $? != 0;
	chomp $answer;
	return $answer =~ tr/\t/ /r;
}

sub session
{
	my ($self) = @_;
	my $session = bless { number => 0 }, 'MariadbServer::Session';
	$session->{pid} = open2($session->{out}, $session->{in}, $self->client('--unbuffered', '-f', $self->{database}));
	$session->{in}->autoflush(1);
	$session->{id} = $session->do('SELECT CONNECTION_ID()');
	return $session;
}

package MariadbServer::Session;

# Have it executed, without waiting for its end.
sub send
{
	my ($self, $text) = @_;
	$self->{number}++;
	print { $self->{in} } "$text;\nSELECT 'end of $self->{number}';\n";
	return;
}

# What the last one answered.
sub receive
{
	my ($self) = @_;
	my @lines;
	while (defined(my $line = readline $self->{out}))
	{
		chomp $line;
		last if $line eq "end of $self->{number}";
		push @lines, $line =~ tr/\t/ /r;
	}
	return join "\n", @lines;
}

sub do
{
	my ($self, $text) = @_;
	$self->send($text);
	return $self->receive;
}

sub close
{
	my ($self) = @_;
	close $self->{in};
	close $self->{out};
	waitpid($self->{pid}, 0);
	return;
}

1;
