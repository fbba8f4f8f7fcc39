# The SQLite column: the command line on a file, and the sqlite3 shell to look at it.
package Conformance::sqlite;
use strict;
use warnings;

use File::Temp qw(tempdir);

use Session;
use engines::commandline;
our @ISA = ('Conformance::commandline');

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
INSERT INTO effect (payload, attempt, anchor) VALUES (:payload, :attempt,
	CASE WHEN :payload = 'orphan' OR (:payload = 'orphan_once' AND :attempt = 1) THEN 1 END);
UPDATE seen SET value = value + 1 WHERE :payload IN ('raise', 'own_once');
WITH RECURSIVE spin (until, zero) AS (SELECT julianday('now', '1.6 seconds'), '0 seconds' WHERE :payload = 'slow' UNION ALL
	SELECT until, zero FROM spin WHERE julianday('now', zero) < until) SELECT until FROM spin;
INSERT INTO jobs (payload) SELECT 'child' WHERE :payload IN ('publish', 'publish_error');
DELETE FROM jobs WHERE id = :id AND :payload = 'ended';
SELECT CASE
	WHEN :payload = 'discard' THEN ruststream_discard()
	WHEN :payload = 'retry' THEN ruststream_retry()
	WHEN :payload = 'later' THEN ruststream_retry_after(3600)
	WHEN :payload = 'dead' THEN ruststream_dead_letter()
	WHEN :payload IN ('retry_once', 'own_once') AND :attempt = 1 THEN ruststream_retry()
	WHEN :payload = 'later_once' AND :attempt = 1 THEN ruststream_retry_after(0)
	WHEN :payload IN ('error', 'publish_error') OR (:payload = 'error_once' AND :attempt = 1) THEN abs(-9223372036854775808)
END
SQL

# A database that somebody else keeps locked cannot be attached: SQLITE_BUSY.
my $TRANSIENT = <<'SQL';
ATTACH CASE WHEN :payload = 'transient' OR :attempt = 1 THEN '%s' ELSE ':memory:' END AS elsewhere;
SQL

my $COMMITS = <<'SQL';
INSERT INTO effect (payload, attempt) VALUES ('first', :attempt);
BEGIN;
INSERT INTO effect (payload, attempt) VALUES ('second', :attempt);
SELECT abs(-9223372036854775808) WHERE :payload = 'error';
COMMIT
SQL

# Why this engine cannot be run here, if so.
sub available
{
	my ($self) = @_;
	return 'there is no sqlite3 program' if system('sqlite3 -version >/dev/null 2>&1') != 0;
	$self->{directory} = tempdir('ruststream-conformance.XXXXXX', TMPDIR => 1, CLEANUP => 1);
	return $self->missing('sqlite');
}

# Nobody is waited for for long.
sub url { return "sqlite:$_[0]{file}?busy_timeout=$_[0]{busy_timeout}"; }

sub sql
{
	my ($self, $sql) = @_;
	my ($text, $well) = $self->run('sqlite3', '-batch', '-bail', '-cmd', '.timeout 10000', $self->{file}, $sql);
	die "$sql: $text" unless $well;
	return split /\n/, $text;
}

sub session { return Session->new('sqlite3', '-batch', $_[0]{file}); }

sub columns
{
	my ($self, $scenario) = @_;
	my @columns = ('id INTEGER PRIMARY KEY', map { $TYPE{$_} // die "no role $_\n" } @{ $scenario->{roles} });
	push @columns, 'locked_until TEXT' if $scenario->{form} eq 'lease';
	return join ', ', @columns, 'payload TEXT', 'loud TEXT GENERATED ALWAYS AS (upper(payload))';
}

sub setup
{
	my ($self, $scenario) = @_;
	my $columns = $self->columns($scenario);

	$self->{file} = "$self->{directory}/queue.db";
	$self->{busy_timeout} = 5000;
	unlink map { "$self->{file}$_" } '', '-wal', '-shm', '-journal', '-ruststream';
	$self->sql("CREATE TABLE jobs ($columns); CREATE TABLE dead ($columns, origin TEXT DEFAULT 'moved');"
		  . "CREATE TABLE seen (name TEXT PRIMARY KEY, value INTEGER); INSERT INTO seen VALUES ('x', 1);"
		  . 'CREATE TABLE anchor (id INTEGER PRIMARY KEY);'
		  . 'CREATE TABLE effect (number INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER, anchor INTEGER REFERENCES anchor DEFERRABLE INITIALLY DEFERRED);'
		  . "CREATE TRIGGER keep BEFORE DELETE ON jobs WHEN OLD.payload = 'kept' BEGIN SELECT RAISE(ABORT, 'kept'); END");
	$self->sql("INSERT INTO dead (id, payload) VALUES ($_, 'there')") for @{ $scenario->{taken} // [] };
	$self->must('install', $self->url);
	$self->lock_elsewhere if grep { $_->{payload} =~ /^transient/ } @{ $scenario->{rows} };
	return;
}

sub lock_elsewhere
{
	my ($self) = @_;
	$self->{busy_timeout} = 20;
	$self->{elsewhere} = Session->new('sqlite3', '-batch', "$self->{directory}/elsewhere.db");
	$self->{elsewhere}->do('BEGIN EXCLUSIVE; CREATE TABLE IF NOT EXISTS t (a)');
	return;
}

sub leave
{
	my ($self) = @_;
	(delete $self->{elsewhere})->close if $self->{elsewhere};
	$self->SUPER::leave;
	return;
}

# What steals the lease is a statement of its own: only a lease's table has the column.
sub handler
{
	my ($self, $scenario) = @_;
	return $self->left_open if ($scenario->{handler} // '') eq 'left_open';
	return $COMMITS if ($scenario->{handler} // '') eq 'commits';
	return sprintf($TRANSIENT, "$self->{directory}/elsewhere.db") . $HANDLER if grep { $_->{payload} =~ /^transient/ } @{ $scenario->{rows} };
	return $HANDLER unless $scenario->{form} eq 'lease';
	return "UPDATE jobs SET locked_until = '9999-12-31T00:00:00+00:00' WHERE id = :id AND :payload = 'steal';\n$HANDLER";
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
