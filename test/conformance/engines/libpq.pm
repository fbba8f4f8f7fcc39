# The libpq column: the command line on a PostgreSQL server that has no extension.
package Conformance::libpq;
use strict;
use warnings;

use engines::commandline;
use engines::postgresql;
our @ISA = ('Conformance::commandline', 'Conformance::postgresql');

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
	my $unserved = $self->missing('postgres');
	return $unserved if $unserved;
	$self->{server} = PostgresServer->new or return 'there is no PostgreSQL server';
	return '';
}

sub url { return $_[0]{server}->url; }

# What steals the lease is a statement of its own: only a lease's table has the column.
sub handler
{
	my ($self, $scenario) = @_;
	return $HANDLER unless $scenario->{form} eq 'lease';
	return "UPDATE jobs SET locked_until = 'infinity' WHERE id = :id AND :payload = 'steal';\n$HANDLER";
}

sub setup
{
	my ($self, $scenario) = @_;
	$self->setup_tables($scenario);
	$self->must('install', $self->url);
	return;
}

1;
