# The libpq column: the command line on a PostgreSQL server that has no extension.
package Conformance::libpq;
use strict;
use warnings;

use engines::commandline;
use engines::postgresql;
our @ISA = ('Conformance::commandline', 'Conformance::postgresql');

# What README.md says of the handler.
my $HANDLER = <<'SQL';
INSERT INTO effect (payload, attempt, anchor) VALUES (
	CASE WHEN :payload IN ('read', 'look') THEN what_is_seen() WHEN :payload = 'level' THEN current_setting('transaction_isolation') ELSE :payload END,
	:attempt, CASE WHEN :payload = 'orphan' OR (:payload = 'orphan_once' AND :attempt = 1) THEN 1 END);
SELECT pg_advisory_xact_lock_shared(20) WHERE :payload = 'read';
INSERT INTO effect (payload, attempt) SELECT what_is_seen(), :attempt WHERE :payload = 'read';
SELECT pg_sleep(1.6) WHERE :payload = 'slow';
UPDATE seen SET value = value + 1 WHERE :payload IN ('raise', 'own_once');
INSERT INTO seen SELECT 'sum', sum(value) FROM seen WHERE :payload = 'sum' HAVING :payload = 'sum';
INSERT INTO jobs (payload) SELECT 'child' WHERE :payload IN ('publish', 'publish_error');
DELETE FROM jobs WHERE id = :id AND :payload = 'ended';
SELECT pg_advisory_unlock_all() WHERE :payload = 'unlock_once' AND :attempt = 1;
SELECT CASE
	WHEN :payload = 'discard' THEN ruststream_discard()
	WHEN :payload = 'retry' THEN ruststream_retry()
	WHEN :payload = 'later' THEN ruststream_retry_after(3600)
	WHEN :payload = 'dead' THEN ruststream_dead_letter()
	WHEN :payload IN ('retry_once', 'own_once') AND :attempt = 1 THEN ruststream_retry()
	WHEN :payload = 'later_once' AND :attempt = 1 THEN ruststream_retry_after(0)
	WHEN :payload = 'transient' OR (:payload = 'transient_once' AND nextval('tries') = 1) THEN transient()
	WHEN :payload IN ('error', 'publish_error') OR (:payload = 'error_once' AND :attempt = 1) THEN (1 / 0)::text
END
SQL

# What commits as it goes, and then fails if it is to.
my $COMMITS = <<'SQL';
INSERT INTO effect (payload, attempt) VALUES ('first', :attempt);
BEGIN;
INSERT INTO effect (payload, attempt) VALUES ('second', :attempt);
SELECT CASE WHEN :payload = 'error' THEN 1 / 0 END;
COMMIT
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
	return $self->left_open if ($scenario->{handler} // '') eq 'left_open';
	return $COMMITS if ($scenario->{handler} // '') eq 'commits';
	return $HANDLER unless $scenario->{form} eq 'lease';
	return "UPDATE jobs SET locked_until = 'infinity' WHERE id = :id AND :payload = 'steal';\n$HANDLER";
}

# The gate is the server's, and our process waits there.
sub start
{
	my ($self, $scenario, $point) = @_;
	$self->shut_gate if defined $point && $point eq '';
	$self->SUPER::start($scenario, $point);
	return;
}

sub wait_until_stopped
{
	my ($self) = @_;
	return $self->{gate} ? $self->wait_at_gate : $self->SUPER::wait_until_stopped;
}

sub resume
{
	my ($self) = @_;
	$self->open_gate if $self->{gate};
	$self->SUPER::resume;
	return;
}

sub setup
{
	my ($self, $scenario) = @_;
	$self->setup_tables($scenario);
	$self->must('install', $self->url);
	return;
}

1;
