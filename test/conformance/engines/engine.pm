# What all engines share.  Not an engine itself: one has session, and sets what it said.
package Conformance::engine;
use strict;
use warnings;

# What it said when it subscribed and while it delivered, beside the trace.
sub said { return "$_[0]{warned}\n$_[0]{said}"; }

# What the delivery under way prints, until its end.
sub lines
{
	my ($self) = @_;
	my @lines = readline $self->{output};

	close $self->{output};
	$self->{failed} = $? != 0;
	chomp @lines;
	return @lines;
}

# A connection of somebody else, which stays until the scenario's end.
sub other
{
	my ($self) = @_;
	return $self->{other} //= $self->session;
}

sub leave
{
	my ($self) = @_;
	(delete $self->{other})->close if $self->{other};
	return;
}

1;
