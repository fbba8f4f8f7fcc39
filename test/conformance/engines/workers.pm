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

# The steps in the log, from an offset on.
sub steps
{
	my ($self, $offset) = @_;
	my ($text) = $self->{server}->log_from($offset);
	return map { / ruststream worker LOG:  ([A-Z].*)$/ ? $1 : () } split /\n/, $text;
}

# A worker is done once it has found nothing, twice in a row, and leaves no row alone meanwhile.
sub drain
{
	my ($self) = @_;
	my (undef, $offset) = $self->{server}->log_from(0);
	my @steps;

	$self->sql(q{SELECT ruststream.alter_subscription('jobs', workers => 1)});
	for (my $waited = 0; ; $waited += 0.05)
	{
		@steps = $self->steps($offset);
		last if join(',', @steps) =~ /(?:BEGIN,CLAIM 0,COMMIT,?){2}$/
		  && join('', $self->sql(q{SELECT state FROM ruststream.stat_worker})) eq 'idle';
		die "the worker has not come to rest:\n" . join("\n", @steps) . "\n" if $waited > $PATIENCE;
		sleep 0.05;
	}
	$self->sql(q{SELECT ruststream.alter_subscription('jobs', workers => 0)});
	return @steps;
}

1;
