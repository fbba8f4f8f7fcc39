# The workers column: the extension's background workers; the trace is in the server's log.
package Conformance::workers;
use strict;
use warnings;

use Time::HiRes qw(sleep);
use engines::drain;
our @ISA = ('Conformance::drain');

my $PATIENCE = $ENV{PG_TEST_TIMEOUT_DEFAULT} // 60;

sub available
{
	my ($self) = @_;
	my $reason = $self->SUPER::available;
	$self->sql('ALTER SYSTEM SET ruststream.trace = on', 'SELECT pg_reload_conf()') unless $reason;
	return $reason;
}

# The steps in the log, from an offset on, up to another if there is one.
sub steps
{
	my ($self, $offset, $end) = @_;
	my ($text) = $self->{server}->log_from($offset);
	$text = substr($text, 0, $end - $offset) if defined $end;
	return map { / ruststream worker LOG:  ([A-Z].*)$/ ? $1 : () } split /\n/, $text;
}

# None begins again until there is to be delivered.
sub kill
{
	my ($self) = @_;
	$self->{server}->set('ruststream.workers', 'off');
	$self->SUPER::kill;
	return;
}

sub begin
{
	my ($self) = @_;
	$self->{server}->set('ruststream.workers', 'on') unless ($self->sql('SHOW ruststream.workers'))[0] eq 'on';
	$self->sql(q{SELECT ruststream.alter_subscription('jobs', workers => 1)});
	return;
}

# A worker is done once it has found nothing, twice in a row from now on, and leaves no row alone meanwhile.
# One that has been killed is done, too.
sub finish
{
	my ($self) = @_;
	my (undef, $now) = $self->{server}->log_from($self->{offset});

	return $self->steps($self->{offset}, $self->{killed_at}) if $self->{killed_at};
	for (my $waited = 0; ; $waited += 0.05)
	{
		my @steps = $self->steps($now);
		last if join(',', @steps) =~ /(?:BEGIN,CLAIM 0,COMMIT,?){2}$/
		  && join('', $self->sql(q{SELECT state FROM ruststream.stat_worker})) eq 'idle';
		die "the worker has not come to rest:\n" . join("\n", $self->steps($self->{offset})) . "\n" if $waited > $PATIENCE;
		sleep 0.05;
	}
	$self->sql(q{SELECT ruststream.alter_subscription('jobs', workers => 0)});
	# What it says at its end is not the next one's.
	for (1 .. 1200)
	{
		last if ($self->sql(q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'ruststream worker'}))[0] == 0;
		sleep 0.05;
	}
	($self->{said}) = $self->{server}->log_from($self->{offset});
	return $self->steps($self->{offset});
}

1;
