# A private PostgreSQL for tests of the client and for the conformance suite: started once, gone at the end.
#
# PG_CONFIG chooses the server (pg_config unless given).  TEMP_CONFIG names a file of settings that are
# appended, such as where an extension lies that is not installed into the server.  Run by root, the server
# runs as postgres, which it insists on.
package PostgresServer;
use strict;
use warnings;

use File::Temp qw(tempdir);
use Time::HiRes qw(sleep);

use Session;

my $OWNER = 'postgres';

# new(preload => 1): with the extension's library; new(conf => "lines"): further settings.
# Returns nothing where there is no server to be had.
sub new
{
	my ($class, %option) = @_;
	# Whoever calls us may have a server, and a name for its sessions, of its own.
	delete @ENV{ grep { /^PG/ && $_ ne 'PG_CONFIG' } keys %ENV };
	my $bin = `@{[ $ENV{PG_CONFIG} // 'pg_config' ]} --bindir 2>/dev/null`;
	chomp $bin;
	return unless $bin ne '' && -x "$bin/initdb";

	my $self = bless { bin => $bin, pid => $$ }, $class;
	# A socket's name has to be short.
	$self->{directory} = tempdir('ruststream-pg.XXXXXX', TMPDIR => 1);
	$self->{log} = "$self->{directory}/log";
	if ($> == 0)
	{
		chown((getpwnam $OWNER)[2, 3], $self->{directory}) == 1 or die "chown: $!\n";
	}
	chmod 0755, $self->{directory};
	$self->as_owner("$bin/initdb", '-D', "$self->{directory}/data", '-A', 'trust', '-N', '-U', $OWNER, '-E', 'UTF8', '--locale=C');
	open(my $conf, '>>', "$self->{directory}/data/postgresql.conf") or die "postgresql.conf: $!\n";
	print $conf <<"CONF";
listen_addresses = ''
unix_socket_directories = '$self->{directory}'
fsync = off
max_worker_processes = 32
log_line_prefix = '%m [%p] %b '
CONF
	print $conf "shared_preload_libraries = 'ruststream'\n" if $option{preload};
	if ($ENV{TEMP_CONFIG})
	{
		open(my $more, '<', $ENV{TEMP_CONFIG}) or die "$ENV{TEMP_CONFIG}: $!\n";
		print {$conf} readline($more);
	}
	print $conf "$option{conf}\n" if defined $option{conf};
	close $conf;
	eval { $self->start; 1 } or return;
	return $self;
}

# Run a program as whoever owns the server.
sub as_owner
{
	my ($self, @command) = @_;
	@command = ('runuser', '-u', $OWNER, '--', @command) if $> == 0;
	my $pid = fork() // die "fork: $!\n";
	if ($pid == 0)
	{
		chdir '/';
		open(STDOUT, '>>', "$self->{directory}/output");
		open(STDERR, '>&', \*STDOUT);
		exec { $command[0] } @command or die "$command[0]: $!\n";
	}
	waitpid $pid, 0;
	return if $? == 0;
	open(my $out, '<', "$self->{directory}/output");
	die "@command: ", ($out ? readline($out) : ()), "\n";
}

sub start
{
	my ($self) = @_;
	$self->as_owner("$self->{bin}/pg_ctl", '-D', "$self->{directory}/data", '-l', $self->{log}, '-w', 'start');
	$self->{running} = 1;
	return;
}

sub stop
{
	my ($self, $mode) = @_;
	$self->{running} = 0;
	$self->as_owner("$self->{bin}/pg_ctl", '-D', "$self->{directory}/data", '-m', $mode // 'fast', '-w', 'stop');
	return;
}

sub url
{
	my ($self, $database, @more) = @_;
	return join '&', "postgres://$OWNER@/" . ($database // 'postgres') . "?host=$self->{directory}", @more;
}

sub psql
{
	my ($self, $database, @options) = @_;
	return ("$self->{bin}/psql", '-XqAt', '-h', $self->{directory}, '-U', $OWNER, '-d', $database, @options);
}

sub session
{
	my ($self, $database) = @_;
	return Session->new($self->psql($database, '-F', ' '));
}

# Set, or with no value reset, one of the server's settings: whoever connects from now on has it.
sub set
{
	my ($self, $name, $value) = @_;
	my $is = defined $value ? "= '$value'" : "<> '' IS NOT TRUE";

	$self->sql('postgres', 'ALTER SYSTEM ' . (defined $value ? "SET $name = '$value'" : "RESET $name"), 'SELECT pg_reload_conf()');
	for (1 .. 600)
	{
		return if ($self->sql('postgres', "SELECT current_setting('$name', true) $is"))[0] eq 't';
		sleep 0.05;
	}
	die "$name is not set\n";
}

# After a crash.
sub wait_until_up
{
	my ($self) = @_;
	for (1 .. 600)
	{
		return if ($self->try('postgres', 'SELECT 1'))[1];
		sleep 0.05;
	}
	die "the server does not come back\n";
}

# A psql that has begun with the statements: what it prints, errors and notices included.
sub begin
{
	my ($self, $database, @statements) = @_;
	my $pid = open(my $out, '-|') // die "fork: $!\n";

	return $out if $pid != 0;
	open(STDERR, '>&', \*STDOUT) or die "dup: $!\n";
	exec $self->psql($database, '-v', 'ON_ERROR_STOP=1', map { ('-c', $_) } @statements) or die "psql: $!\n";
}

# What psql prints for each of the statements; and whether it went well.
sub try
{
	my ($self, @asked) = @_;
	my $out = $self->begin(@asked);
	my $text = do { local $/; <$out> } // '';

	close $out;
	return ($text, $? == 0);
}

# The same; an error is the caller's end.
sub sql
{
	my ($self, $database, @statements) = @_;
	my ($text, $well) = $self->try($database, @statements);
	die "@statements: $text" unless $well;
	return split /\n/, $text;
}

# What the server has written since then, and where that ended.
sub log_from
{
	my ($self, $offset) = @_;
	open(my $log, '<', $self->{log}) or return ('', 0);
	seek $log, $offset, 0;
	my $text = do { local $/; <$log> } // '';
	return ($text, tell $log);
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $@);
	return unless $self->{pid} == $$;
	eval { $self->stop('immediate') } if $self->{running};
	system('rm', '-rf', $self->{directory});
	return;
}

1;
