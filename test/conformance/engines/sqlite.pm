# The SQLite column: the command line on a file, and the sqlite3 shell to look at it.
package Conformance::sqlite;
use strict;
use warnings;

use File::Temp qw(tempdir);

my %TYPE = (
	group => 'group_name TEXT NOT NULL',
	priority => 'priority INTEGER',
	partition_key => 'partition_key TEXT',
	retry_after => 'retry_after TEXT',
	attempt => 'attempt INTEGER',
	processed_at => 'processed_at TEXT',
	headers => 'headers TEXT',
);

# What README.md says of the handler.
my $HANDLER = <<'SQL';
INSERT INTO effect (payload, attempt) VALUES (:payload, :attempt);
SELECT CASE
	WHEN :payload = 'discard' THEN ruststream_discard()
	WHEN :payload = 'retry' THEN ruststream_retry()
	WHEN :payload = 'later' THEN ruststream_retry_after(3600)
	WHEN :payload = 'dead' THEN ruststream_dead_letter()
	WHEN :payload = 'retry_once' AND :attempt = 1 THEN ruststream_retry()
	WHEN :payload = 'later_once' AND :attempt = 1 THEN ruststream_retry_after(0)
	WHEN :payload = 'error' OR (:payload = 'error_once' AND :attempt = 1) THEN abs(-9223372036854775808)
END
SQL

sub new
{
	my ($class, $home) = @_;
	my $self = bless { program => $ENV{RUSTSTREAM} // "$home/../../src/client/build/ruststream" }, $class;
	$self->{directory} = tempdir('ruststream-conformance.XXXXXX', TMPDIR => 1, CLEANUP => 1);
	return $self;
}

# Why this engine cannot be run here, if so.
sub available
{
	my ($self) = @_;
	return 'there is no sqlite3 program' if system('sqlite3 -version >/dev/null 2>&1') != 0;
	return "there is no $self->{program}" unless -x $self->{program};
	return `$self->{program} --version` =~ /\bsqlite\b/ ? '' : 'this build does not serve SQLite';
}

# What a command prints, standard error included, and whether it went well.
sub run
{
	my ($self, @command) = @_;
	my $pid = open(my $out, '-|') // die "fork: $!\n";
	if ($pid == 0)
	{
		open(STDERR, '>&', \*STDOUT) or die "dup: $!\n";
		exec { $command[0] } @command or die "$command[0]: $!\n";
	}
	my $text = do { local $/; <$out> } // '';
	close $out;
	return ($text, $? == 0);
}

sub sql
{
	my ($self, $sql) = @_;
	my ($text, $well) = $self->run('sqlite3', '-batch', '-bail', $self->{file}, $sql);
	die "$sql: $text" unless $well;
	return split /\n/, $text;
}

sub columns
{
	my ($self, $scenario) = @_;
	my @columns = ('id INTEGER PRIMARY KEY', map { $TYPE{$_} // die "no role $_\n" } @{ $scenario->{roles} });
	push @columns, 'locked_until TEXT' if $scenario->{form} eq 'lease';
	return join ', ', @columns, 'payload TEXT';
}

sub setup
{
	my ($self, $scenario) = @_;
	my $columns = $self->columns($scenario);

	$self->{file} = "$self->{directory}/queue.db";
	unlink map { "$self->{file}$_" } '', '-wal', '-shm', '-journal', '-ruststream';
	$self->sql("CREATE TABLE jobs ($columns); CREATE TABLE dead ($columns);"
		  . 'CREATE TABLE effect (number INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER)');
	my ($text, $well) = $self->run($self->{program}, 'install', "sqlite:$self->{file}");
	die $text unless $well;
	return;
}

sub describe
{
	my ($self, $scenario) = @_;
	my @options = ('--id', 'id', '--payload', 'payload', '--create-index');

	for my $role (@{ $scenario->{roles} })
	{
		push @options, '--' . $role =~ tr/_/-/r, $role eq 'group' ? 'group_name' : $role;
	}
	push @options, '--locked-until', 'locked_until' if $scenario->{form} eq 'lease';
	push @options, '--lock-key', $scenario->{lock_key} // 'key-{id}' if $scenario->{form} eq 'advisory_lock';
	push @options, '--fifo' if $scenario->{fifo};
	push @options, "--$_", $scenario->{$_} for grep { defined $scenario->{$_} } qw(isolation mode);
	my ($text, $well) = $self->run($self->{program}, 'describe', "sqlite:$self->{file}", 'jobs', @options);
	return $well ? '' : $text;
}

# SQL unless the scenario asks for more: the handler is the same text for all.
sub subscribe
{
	my ($self, $scenario) = @_;
	my %settings = %{ $scenario->{settings} };
	my @options = ('--handler', $HANDLER);

	$settings{dead_letter} = $settings{dead_letter} eq 'table' ? 'dead' : 'graveyard' if $settings{dead_letter};
	push @options, '--' . $_ =~ tr/_/-/r, $settings{$_} for sort keys %settings;
	my ($text, $well) = $self->run($self->{program}, 'subscribe', "sqlite:$self->{file}", 'jobs', 'jobs', @options);
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

# A literal; a time is given in seconds from now.
sub value
{
	my ($self, $name, $value) = @_;
	return 'NULL' if $value eq 'NULL';
	return "strftime('%Y-%m-%dT%H:%M:%S+00:00', 'now', '$value seconds')" if $name =~ /^(retry_after|locked_until)$/;
	return $value if $value =~ /^-?\d+$/;
	return "'" . $value =~ s/'/''/gr . "'";
}

sub drain
{
	my ($self) = @_;
	my ($text, $well) = $self->run($self->{program}, 'work', "sqlite:$self->{file}", '--drain', '--trace');
	die $text unless $well;
	return grep { !/^ruststream: / } split /\n/, $text;
}

sub rows
{
	my ($self, $table, $scenario) = @_;
	my %has = map { $_ => 1 } @{ $scenario->{roles} };
	my $attempt = $has{attempt} ? "ifnull(attempt, 1)" : "'-'";
	my $waiting = $has{retry_after} ? "CASE WHEN retry_after > strftime('%Y-%m-%dT%H:%M:%S+00:00', 'now') THEN ' waiting' ELSE '' END" : "''";
	my $processed = $has{processed_at} ? "CASE WHEN processed_at IS NULL THEN '' ELSE ' processed' END" : "''";
	my $leased = $scenario->{form} eq 'lease' ? "CASE WHEN locked_until IS NULL THEN '' ELSE ' leased' END" : "''";
	my $group = $has{group} ? "CASE group_name WHEN 'jobs' THEN '' ELSE ' group=' || group_name END" : "''";
	return $self->sql("SELECT payload || ' ' || $attempt || $waiting || $processed || $leased || $group FROM $table ORDER BY id");
}

sub effects
{
	my ($self) = @_;
	return $self->sql("SELECT payload || ' ' || attempt FROM effect ORDER BY number");
}

sub stop { return; }

1;
