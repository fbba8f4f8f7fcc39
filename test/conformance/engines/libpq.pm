# The libpq column: the command line on a PostgreSQL server that has no extension.
package Conformance::libpq;
use strict;
use warnings;

use engines::postgresql;
our @ISA = ('Conformance::postgresql');

# What README.md says of the handler.
my $HANDLER = <<'SQL';
INSERT INTO effect (payload, attempt, anchor) VALUES (:payload, :attempt,
	CASE WHEN :payload = 'orphan' OR (:payload = 'orphan_once' AND :attempt = 1) THEN 1 END);
INSERT INTO jobs (payload) SELECT 'child' WHERE :payload IN ('publish', 'publish_error');
DELETE FROM jobs WHERE id = :id AND :payload = 'ended';
SELECT pg_advisory_unlock_all() WHERE :payload = 'unlock_once' AND :attempt = 1;
SELECT CASE
	WHEN :payload = 'discard' THEN ruststream_discard()
	WHEN :payload = 'retry' THEN ruststream_retry()
	WHEN :payload = 'later' THEN ruststream_retry_after(3600)
	WHEN :payload = 'dead' THEN ruststream_dead_letter()
	WHEN :payload = 'retry_once' AND :attempt = 1 THEN ruststream_retry()
	WHEN :payload = 'later_once' AND :attempt = 1 THEN ruststream_retry_after(0)
	WHEN :payload = 'transient' OR (:payload = 'transient_once' AND nextval('tries') = 1) THEN transient()
	WHEN :payload IN ('error', 'publish_error') OR (:payload = 'error_once' AND :attempt = 1) THEN (1 / 0)::text
END
SQL

# Why this engine cannot be run here, if so.
sub available
{
	my ($self) = @_;
	return "there is no $self->{program}" unless -x $self->{program};
	return 'this build does not serve PostgreSQL' unless `$self->{program} --version` =~ /\bpostgres\b/;
	$self->{server} = PostgresServer->new or return 'there is no PostgreSQL server';
	$self->{url} = $self->{server}->url;
	return '';
}

# What a command prints, standard error included, and whether it went well.
sub run
{
	my ($self, @command) = @_;
	my $pid = open(my $out, '-|') // die "fork: $!\n";
	if ($pid == 0)
	{
		open(STDERR, '>&', \*STDOUT) or die "dup: $!\n";
		exec 'timeout', '60', $self->{program}, @command or die "$self->{program}: $!\n";
	}
	my $text = do { local $/; <$out> } // '';
	close $out;
	return ($text, $? == 0);
}

# What steals the lease is a statement of its own: only a lease's table has the column.
sub handler
{
	my ($scenario) = @_;
	return $HANDLER unless $scenario->{form} eq 'lease';
	return "UPDATE jobs SET locked_until = 'infinity' WHERE id = :id AND :payload = 'steal';\n$HANDLER";
}

sub setup
{
	my ($self, $scenario) = @_;
	$self->setup_tables($scenario);
	my ($text, $well) = $self->run('install', $self->{url});
	die $text unless $well;
	return;
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
	my ($text, $well) = $self->run('describe', $self->{url}, 'jobs', @options);
	return $well ? '' : $text;
}

sub subscribe
{
	my ($self, $scenario) = @_;
	my %settings = %{ $scenario->{settings} };
	my @options = ('--handler', handler($scenario));

	$settings{dead_letter} = $settings{dead_letter} eq 'table' ? 'dead' : 'graveyard' if $settings{dead_letter};
	push @options, '--' . tr/_/-/r, $settings{$_} for sort keys %settings;
	my ($text, $well) = $self->run('subscribe', $self->{url}, 'jobs', 'jobs', @options);
	return $well ? '' : $text;
}

sub drain
{
	my ($self) = @_;
	my ($text, $well) = $self->run('work', $self->{url}, '--drain', '--trace');
	die $text unless $well;
	return grep { !/^(?:ruststream|hint): / } split /\n/, $text;
}

1;
