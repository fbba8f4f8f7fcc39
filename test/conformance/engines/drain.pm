# The drain column: the extension, in the session that calls ruststream.drain.
package Conformance::drain;
use strict;
use warnings;

use Time::HiRes qw(sleep);
use engines::postgresql;
our @ISA = ('Conformance::postgresql');

# What README.md says of the handler.
my $HANDLER = <<'SQL';
CREATE FUNCTION handle(word text) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
DECLARE
	nth integer := ruststream.attempt();
	row_id bigint := (ruststream.delivery()).id::bigint;
BEGIN
	IF word IN ('read', 'look') THEN
		INSERT INTO effect (payload, attempt) VALUES (what_is_seen(), nth);
		IF word = 'read' THEN
			PERFORM pg_advisory_xact_lock_shared(20);
			INSERT INTO effect (payload, attempt) VALUES (what_is_seen(), nth);
		END IF;
		RETURN ruststream.ack();
	ELSIF word = 'level' THEN
		INSERT INTO effect (payload, attempt) VALUES (current_setting('transaction_isolation'), nth);
		RETURN ruststream.ack();
	END IF;
	INSERT INTO effect (payload, attempt, anchor) VALUES (word, nth,
		CASE WHEN word = 'orphan' OR (word = 'orphan_once' AND nth = 1) THEN 1 END);
	CASE
		WHEN word = 'discard' THEN RETURN ruststream.discard();
		WHEN word = 'retry' THEN RETURN ruststream.retry();
		WHEN word = 'later' THEN RETURN ruststream.retry_after('1 h');
		WHEN word = 'null' THEN RETURN NULL;
		WHEN word = 'slow' THEN PERFORM pg_sleep(1.6);
		WHEN word IN ('raise', 'own_once') THEN
			UPDATE seen SET value = value + 1;
			IF word = 'own_once' AND nth = 1 THEN RETURN ruststream.retry(); END IF;
		WHEN word = 'sum' THEN INSERT INTO seen SELECT 'sum', sum(value) FROM seen;
		WHEN word = 'dead' THEN RETURN ruststream.dead_letter();
		WHEN word = 'retry_once' AND nth = 1 THEN RETURN ruststream.retry();
		WHEN word = 'later_once' AND nth = 1 THEN RETURN ruststream.retry_after('0');
		WHEN word = 'error' OR (word = 'error_once' AND nth = 1) THEN PERFORM 1 / 0;
		WHEN word IN ('publish', 'publish_error') THEN
			INSERT INTO jobs (payload) VALUES ('child');
			IF word = 'publish_error' THEN PERFORM 1 / 0; END IF;
		WHEN word = 'ended' THEN DELETE FROM jobs WHERE id = row_id;
		WHEN word = 'steal' THEN UPDATE jobs SET locked_until = 'infinity' WHERE id = row_id;
		WHEN word = 'unlock_once' AND nth = 1 THEN PERFORM pg_advisory_unlock_all();
		WHEN word = 'transient' OR (word = 'transient_once' AND nextval('tries') = 1) THEN PERFORM transient();
		ELSE NULL;
	END CASE;
	RETURN ruststream.ack();
END $$
SQL

# What README.md says of the handler of batches.
my $BATCH_HANDLER = <<'SQL';
CREATE FUNCTION handle(batch jobs[], deliveries ruststream.delivery[]) RETURNS ruststream.outcome[] LANGUAGE plpgsql AS $$
DECLARE
	answers ruststream.outcome[] := '{}';
	word text;
	nth integer;
BEGIN
	FOR i IN 1 .. cardinality(batch) LOOP
		word := batch[i].payload;
		nth := deliveries[i].attempt;
		IF word = 'error' OR (word = 'error_once' AND nth = 1) THEN PERFORM 1 / 0; END IF;
		answers := answers || CASE
			WHEN word = 'discard' THEN ruststream.discard()
			WHEN word = 'retry' THEN ruststream.retry()
			WHEN word = 'later' THEN ruststream.retry_after('1 h')
			WHEN word = 'dead' THEN ruststream.dead_letter()
			WHEN word = 'retry_once' AND nth = 1 THEN ruststream.retry()
			WHEN word = 'later_once' AND nth = 1 THEN ruststream.retry_after('0')
			ELSE ruststream.ack()
		END;
	END LOOP;
	RETURN answers;
END $$
SQL

# What commits as it goes, and then fails if it is to.
my $COMMITS = <<'SQL';
CREATE PROCEDURE commits(word text) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect (payload, attempt) VALUES ('first', ruststream.attempt());
	COMMIT;
	INSERT INTO effect (payload, attempt) VALUES ('second', ruststream.attempt());
	IF word = 'error' THEN PERFORM 1 / 0; END IF;
END $$
SQL

# What publishes through a session of its own, and then fails.
my $APART = <<'SQL';
CREATE FUNCTION apart(word text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM ruststream.autonomous($x$INSERT INTO public.jobs (payload, retry_after) VALUES ('child', clock_timestamp() + '1 h')$x$);
	PERFORM 1 / 0;
END $$
SQL

# The same for payloads that have to be JSON.
my $JSON_HANDLER = <<'SQL';
CREATE FUNCTION handle(payload jsonb) RETURNS ruststream.outcome LANGUAGE sql
RETURN handle(payload #>> '{}')
SQL

sub available
{
	my ($self) = @_;
	$self->{server} = PostgresServer->new(preload => 1, conf => "ruststream.max_workers = 16\nruststream.crash_restart_delay = 50ms") or return 'there is no PostgreSQL server with the extension';
	my ($text, $well) = $self->try('CREATE EXTENSION IF NOT EXISTS ruststream');
	return $well ? '' : "the extension cannot be made: $text";
}

sub setup
{
	my ($self, $scenario) = @_;
	delete $self->{killed_at};
	$self->sql("SELECT ruststream.unsubscribe('jobs') FROM ruststream.status WHERE subscription = 'jobs'");
	$self->setup_tables($scenario);
	$self->sql($HANDLER, $COMMITS, $APART, $JSON_HANDLER, $BATCH_HANDLER);
	return;
}

sub literal
{
	my ($value) = @_;
	return 'NULL' unless defined $value;
	return "'" . $value =~ s/'/''/gr . "'";
}

# name => literal, in the notation of SQL's calls
sub arguments
{
	my (%argument) = @_;
	return join ', ', map { "$_ => $argument{$_}" } sort keys %argument;
}

# The index that claims need is made as the notice says.
sub describe
{
	my ($self, $scenario) = @_;
	my %argument = (queue => "'jobs'", id_column => "'id'", payload_column => "'payload'");

	return '' if $scenario->{mode};
	$argument{"${_}_column"} = literal($_ eq 'group' ? 'group_name' : $_) for @{ $scenario->{roles} };
	$argument{locked_until_column} = "'locked_until'" if $scenario->{form} eq 'lease';
	$argument{lock_key} = literal($scenario->{lock_key} // 'key-{id}') if $scenario->{form} eq 'advisory_lock';
	$argument{fifo} = 'true' if $scenario->{fifo};
	$argument{isolation} = literal($scenario->{isolation}) if defined $scenario->{isolation};
	my ($text, $well) = $self->try('SELECT ruststream.attach_queue(' . arguments(%argument) . ')');
	return $text unless $well;
	while ($text =~ /(CREATE INDEX .*?)\.?$/mg) { $self->sql($1); }
	return '';
}

sub subscribe
{
	my ($self, $scenario) = @_;
	my %settings = %{ $scenario->{settings} };
	my %argument = (name => "'jobs'", queue => "'jobs'", workers => 0, poll_interval => "'50 ms'");

	my $json = (delete $settings{decode} // '') eq 'json';
	$argument{handler} = literal($scenario->{handler} // 'handle') . " || '(" . ($json ? 'jsonb' : 'text') . ")'";
	$argument{handler} = "'handle(jobs[],ruststream.delivery[])'" if $settings{batch_size};
	$settings{dead_letter} = $settings{dead_letter} eq 'table' ? 'dead' : 'graveyard' if $settings{dead_letter};
	$argument{$_} = literal($settings{$_}) for keys %settings;
	my ($text, $well) = $self->try('SELECT ruststream.subscribe(' . arguments(%argument) . ')');
	$self->{warned} = $text;
	return $well ? '' : $text;
}

sub publish
{
	my ($self, $payload) = @_;
	my ($text, $well) = $self->try("SELECT ruststream.publish('jobs', " . literal("\"$payload\"") . ')');
	return $well ? '' : $text;
}

sub can_stop
{
	my ($self) = @_;
	return ($self->sql(q{SELECT current_setting('ruststream.failpoint', true) IS NOT NULL}))[0] eq 't';
}

# Begin to deliver; with a failure point, the session stops there.
sub start
{
	my ($self, $scenario, $point) = @_;

	$self->{offset} = delete $self->{killed_at} // ($self->{server}->log_from(0))[1];
	$self->{server}->set('ruststream.failpoint', "$point:1:stop") if $point;
	$self->shut_gate if defined $point && $point eq '';
	$self->begin;
	return;
}

sub is_stopped
{
	my ($pid) = @_;
	open(my $in, '<', "/proc/$pid/stat") or return 0;
	return readline($in) =~ /\) T /;
}

# The server's log names the process.
sub wait_until_stopped
{
	my ($self) = @_;
	my ($pid, $stopped);

	return $self->wait_at_gate if $self->{gate};
	for (1 .. 1200)
	{
		my ($text) = $self->{server}->log_from($self->{offset});
		($pid) = $text =~ /\[(\d+)\] .*LOG:  failure point "[^"]*" reached/;
		$stopped = $pid && is_stopped($pid);
		last if $stopped;
		sleep 0.05;
	}
	die "the delivery did not stop\n" unless $stopped;
	$self->{pid} = $pid;
	# Nor is the lease extended from now on.
	$self->{heartbeats} = [$self->sql(q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'ruststream heartbeat'})];
	CORE::kill 'STOP', @{ $self->{heartbeats} };
	$self->{server}->set('ruststream.failpoint');
	return;
}

sub resume
{
	my ($self) = @_;
	$self->open_gate if $self->{gate};
	CORE::kill 'CONT', @{ delete $self->{heartbeats} // [] }, delete $self->{pid} // ();
	return;
}

# All of the server's processes end with one of them, and come back.  What the log says of that is where
# the rest begins.
sub kill
{
	my ($self) = @_;
	my $pid = delete $self->{pid};

	$self->leave;
	CORE::kill 'KILL', $pid;
	CORE::kill 'CONT', @{ delete $self->{heartbeats} };
	for (1 .. 1200)
	{
		my ($text) = $self->{server}->log_from($self->{offset});
		last if $text =~ /\(PID $pid\) was terminated by signal 9/ && ($self->{killed_at} = $self->{offset} + $-[0]);
		sleep 0.05;
	}
	$self->{server}->wait_until_up;
	return;
}

sub begin
{
	my ($self) = @_;
	$self->{output} = $self->{server}->begin('postgres', 'SET ruststream.trace = on', q{SET statement_timeout = '60 s'}, q{CALL ruststream.drain('jobs')});
	return;
}

# The steps it took; what it said besides is kept.
sub finish
{
	my ($self) = @_;
	my @lines = $self->lines;

	$self->{said} = join "\n", grep { !/^NOTICE:  / } @lines;
	return map { /^NOTICE:  (.*)$/ ? $1 : () } @lines;
}

sub drain
{
	my ($self, $scenario) = @_;
	$self->start($scenario);
	my @trace = $self->finish;
	die "$self->{said}\n" if $self->{failed};
	return @trace;
}

# Another session delivers; why it does not, if so.
sub other_drain
{
	my ($self) = @_;
	my ($text, $well) = $self->try(q{CALL ruststream.drain('jobs')});
	return $well ? '' : $text;
}

1;
