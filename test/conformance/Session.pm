# A connection that stays, through a database's own shell: what it answers, columns separated by spaces.
package Session;
use strict;
use warnings;

use IPC::Open2;

# The shell's command.
sub new
{
	my ($class, @command) = @_;
	my $self = bless { number => 0 }, $class;
	$self->{pid} = open2($self->{out}, $self->{in}, 'sh', '-c', 'exec "$@" 2>&1', 'sh', @command);
	$self->{in}->autoflush(1);
	return $self;
}

sub do
{
	my ($self, $text) = @_;
	my @lines;

	$self->{number}++;
	print { $self->{in} } "$text;\nSELECT 'end of $self->{number}';\n";
	while (defined(my $line = readline $self->{out}))
	{
		chomp $line;
		last if $line eq "end of $self->{number}";
		push @lines, $line =~ tr/\t|/  /r;
	}
	return join "\n", @lines;
}

sub close
{
	my ($self) = @_;
	close $self->{in};
	close $self->{out};
	waitpid($self->{pid}, 0);
	return;
}

1;
