# A private server of MariaDB or MySQL in a directory of its own: nobody's configuration, ended with the test.
#
#	my $server = MysqlServer->new(log_bin => undef, binlog_format => 'STATEMENT');
#	$server->sql('SELECT 1');           the answer, columns separated by spaces, NULL as "NULL"
#	my $session = $server->session;     a connection that stays
#	$session->do('BEGIN');              the same, on it
#
# RUSTSTREAM_TEST_SERVER says which, mariadb or mysql; otherwise it is the first of these that is found.  Both
# understand the names of MariaDB's sequences, "FROM seq_1_to_40".
package MysqlServer;
use strict;
use warnings;

use File::Temp qw(tempdir);
use IO::Socket::INET;
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

# Why there can be no server of this kind here, if so.
sub missing_kind
{
	my ($kind) = @_;
	for my $name ($kind eq 'mysql' ? qw(mysqld mysql) : qw(mariadbd mariadb-install-db mariadb))
	{
		return "there is no $name" unless tool($name);
	}
	# MariaDB has links of MySQL's names.
	return 'the mysqld here is of MariaDB' if $kind eq 'mysql' && `@{[tool('mysqld')]} --no-defaults --version 2>&1` =~ /MariaDB/;
	return '';
}

sub kind
{
	my ($found) = grep { missing_kind($_) eq '' } qw(mariadb mysql);
	return $ENV{RUSTSTREAM_TEST_SERVER} // $found // 'mariadb';
}

# Why there can be none here, if so.
sub missing
{
	return missing_kind(kind());
}

# Its data, as the server's own program makes it.
sub install
{
	my ($self, @options) = @_;
	my $data = "--datadir=$self->{directory}/data";
	my @command = $self->{kind} eq 'mysql'
	  ? (tool('mysqld'), '--no-defaults', @options, '--initialize-insecure', '--secure-file-priv=NULL', $data)
	  : (tool('mariadb-install-db'), '--no-defaults', @options, '--auth-root-authentication-method=normal', qw(--skip-test-db --force), $data);
	my $log = `@command 2>&1`;

	die "@command: $log\n" if $? != 0;
	return;
}

# A port of 127.0.0.1 that nothing listens on.
sub free_port
{
	my $socket = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => 0, Listen => 1) or die "socket: $!\n";
	return $socket->sockport;
}

# new(SETTING => VALUE, ..): settings of the server; undef where one has no value.  kind says which server; tcp => 1
# has it listen on {port} of this machine, too.
sub new
{
	my ($class, %options) = @_;
	my $kind = delete $options{kind} // kind();
	my $port = delete $options{tcp} ? free_port() : 0;
	my $directory = tempdir("ruststream-$kind.XXXXXX", TMPDIR => 1, CLEANUP => 1);
	my $self = bless { directory => $directory, database => 'app', kind => $kind, port => $port }, $class;
	# A server does not run as root: then as the user that its package has made.
	my @user = $> == 0 ? ('--user=mysql') : ();
	my @settings = qw(--innodb-flush-log-at-trx-commit=2 --innodb-buffer-pool-size=32M --sync-binlog=0);

	push @settings, $port ? ('--bind-address=127.0.0.1,127.0.0.2', "--port=$port") : '--skip-networking';
	# What is there unasked: a log, certificates.
	push @settings, qw(--mysqlx=OFF --secure-file-priv=NULL), exists $options{log_bin} ? () : '--skip-log-bin',
	  exists $options{ssl_cert} ? () : '--tls-version=' if $kind eq 'mysql';
	push @settings, '--skip-ssl' if $kind eq 'mariadb' && !exists $options{ssl_cert};
	chmod 0755, $directory;
	if ($> == 0)
	{
		my (undef, undef, $uid, $gid) = getpwnam('mysql') or die "there is no user mysql\n";
		chown $uid, $gid, $directory or die "chown: $!\n";
	}
	# MySQL's tables are made for one such setting.
	$self->install(@user, map { exists $options{$_} ? '--' . tr/_/-/r . "=$options{$_}" : () } 'lower_case_table_names');
	$self->{command} = [tool($kind eq 'mysql' ? 'mysqld' : 'mariadbd'), '--no-defaults', @user, "--datadir=$directory/data",
		"--socket=$directory/socket", "--pid-file=$directory/pid", "--log-error=$directory/log.err", @settings,
		map { '--' . tr/_/-/r . (defined $options{$_} ? "=$options{$_}" : '') } sort keys %options];
	$self->start;
	$self->sql('CREATE DATABASE app', '');
	$self->make_sequence if $kind eq 'mysql';
	return $self;
}

# What stands for MariaDB's sequences on MySQL; see readable.
sub make_sequence
{
	my ($self) = @_;
	$self->sql('CREATE DATABASE sequence; CREATE TABLE sequence.numbers (seq INT PRIMARY KEY); SET cte_max_recursion_depth = 5000;'
		  . 'INSERT INTO sequence.numbers WITH RECURSIVE n (seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM n WHERE seq < 5000) SELECT seq FROM n', '');
	return;
}

# SQL as this server reads it.
sub readable
{
	my ($self, $text) = @_;
	$text =~ s/\bseq_1_to_(\d+)\b(?! AS)/seq_1_to_$1 AS seq_1_to_$1/g if $self->{kind} eq 'mysql';
	$text =~ s/\bseq_1_to_(\d+) AS/(SELECT seq FROM sequence.numbers WHERE seq <= $1) AS/g if $self->{kind} eq 'mysql';
	return $text;
}

# Its innodb_snapshot_isolation, ON or OFF; '' where it has none, as MySQL.
sub checks_snapshot
{
	my ($self) = @_;
	return $self->sql("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'", '') =~ / (ON|OFF)$/ ? $1 : '';
}

sub is_mariadb { return $_[0]{kind} eq 'mariadb'; }

sub start
{
	my ($self) = @_;
	my $pid = fork() // die "fork: $!\n";

	if ($pid == 0)
	{
		open(STDOUT, '>>', "$self->{directory}/output");
		open(STDERR, '>&', \*STDOUT);
		exec { $self->{command}[0] } @{ $self->{command} } or die "$self->{command}[0]: $!\n";
	}
	$self->{pid} = $pid;
	$own{$pid} = $$;
	for (1 .. 600)
	{
		return if eval { $self->sql('SELECT 1', '') eq '1' };
		die "the server did not start: see $self->{directory}/log.err\n" if waitpid($pid, 1) == $pid;
		sleep 0.1;
	}
	die "the server did not answer: $@";
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
	# MariaDB's shell wants TLS from 11.4 on.
	return (tool($self->{kind}), '--no-defaults', $self->is_mariadb ? '--skip-ssl' : (), '-S', "$self->{directory}/socket", '-u', 'root', '-N', '-B', '--default-character-set=utf8mb4', @options);
}

sub sql
{
	my ($self, $text, $database) = @_;
	my @command = ($self->client, $database // $self->{database});
	my $pid = open2(my $out, my $in, 'sh', '-c', 'exec "$@" 2>&1', 'sh', grep { $_ ne '' } @command);

	# A client that cannot connect may be gone before it has been given the query.
	local $SIG{PIPE} = 'IGNORE';
	print $in $self->readable($text);
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
	my $session = bless { number => 0, server => $self }, 'MysqlServer::Session';
	$session->{pid} = open2($session->{out}, $session->{in}, $self->client('--unbuffered', '-f', $self->{database}));
	$session->{in}->autoflush(1);
	$session->{id} = $session->do('SELECT CONNECTION_ID()');
	return $session;
}

package MysqlServer::Session;

# Have it executed, without waiting for its end.
sub send
{
	my ($self, $text) = @_;
	$self->{number}++;
	print { $self->{in} } $self->{server}->readable($text), ";\nSELECT 'end of $self->{number}';\n";
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
