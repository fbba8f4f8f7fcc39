# What the tests of the command line share: a directory, a database, and programs run in it.
package ClientTest;
use strict;
use warnings;

use Exporter 'import';
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use IO::Handle;
use Test::More;
use Time::HiRes qw(sleep time);

our @EXPORT = qw(new_database run start finish said sql refuses wait_for url program);

my $directory = tempdir('ruststream-client.XXXXXX', TMPDIR => 1, CLEANUP => 1);
my $program = $ENV{RUSTSTREAM} // dirname(__FILE__) . '/build/library/ruststream';
my $database = "$directory/queue.db";

sub program { return $program; }
sub url { return "sqlite:$database"; }

# A queue in each form, and a table for what handlers write.
sub new_database
{
	unlink map { "$database$_" } '', '-wal', '-shm', '-journal', '-ruststream', '-go';
	sql('PRAGMA journal_mode = wal; '
		  . 'CREATE TABLE leased (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER, retry_after TEXT, locked_until TEXT);'
		  . 'CREATE TABLE keyed (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER);'
		  . 'CREATE TABLE effect (number INTEGER PRIMARY KEY, id INTEGER, attempt INTEGER)');
	for my $command (
		['install', url()],
		['describe', url(), 'leased', qw(--id id --payload payload --attempt attempt --retry-after retry_after
			  --locked-until locked_until --create-index)],
		['describe', url(), 'keyed', qw(--id id --payload payload --attempt attempt --lock-key key-{id})])
	{
		my ($code, $out, $err) = run(@$command);
		die "@$command: $err" if $code != 0;
	}
	return;
}

# Run ruststream to its end: (exit code or -signal, standard output, standard error).
sub run
{
	return finish(start({}, @_));
}

# Start it, with variables of its environment.
sub start
{
	my ($environment, @arguments) = @_;
	my $files = "$directory/" . time() . '-' . int(rand 1e9);
	my $pid = fork() // die "fork: $!";

	if ($pid == 0)
	{
		@ENV{ keys %$environment } = values %$environment;
		open(STDOUT, '>', "$files.out") or die;
		open(STDERR, '>', "$files.err") or die;
		exec { $program } $program, @arguments or die "$program: $!";
	}
	return { pid => $pid, files => $files };
}

sub finish
{
	my ($child) = @_;
	waitpid($child->{pid}, 0);
	my $code = $? & 127 ? -($? & 127) : $? >> 8;
	return ($code, map { contents("$child->{files}.$_") } qw(out err));
}

# Has it said so on its standard error?  Waits for a minute at the most, unless told how many seconds.
sub said
{
	my ($child, $pattern, $seconds) = @_;
	my $until = time() + ($seconds // 60);
	do
	{
		return 1 if contents("$child->{files}.err") =~ $pattern;
		sleep 0.02;
	} while (time() < $until);
	return 0;
}

sub contents
{
	my ($file) = @_;
	open(my $in, '<', $file) or return '';
	local $/;
	return <$in> // '';
}

# The rows that the sqlite3 shell answers, joined.
sub sql
{
	my ($text) = @_;
	open(my $out, '-|', 'sqlite3', '-batch', '-bail', '-cmd', '.timeout 10000', $database, $text) or die "sqlite3: $!";
	my $answer = do { local $/; <$out> } // '';
	close $out or die "sqlite3: $text failed\n";
	chomp $answer;
	return $answer;
}

# Does the database refuse this?
sub refuses
{
	my ($text) = @_;
	return system("sqlite3 -batch -bail '$database' \"$text\" >/dev/null 2>&1") != 0;
}

# Poll until SQL answers what is wanted, for a minute at the most.
sub wait_for
{
	my ($text, $wanted) = @_;
	my $until = time() + 60;
	while (time() < $until)
	{
		return 1 if sql($text) eq $wanted;
		sleep 0.02;
	}
	diag("waited for \"$wanted\", found \"" . sql($text) . '"');
	return 0;
}

1;
