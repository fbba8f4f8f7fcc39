# The control file is the one source of the version; whatever else names it agrees.
use strict;
use warnings;

use FindBin;
use JSON::PP;
use Test::More;

my $top = "$FindBin::Bin/../..";

sub content
{
	my ($file) = @_;
	open(my $handle, '<', "$top/$file") or die "$file: $!";
	local $/;
	return <$handle>;
}

my ($version) = content('ruststream.control') =~ /^default_version = '([0-9]+(?:\.[0-9]+)+)'$/m;
ok(defined $version, 'the control file has a version');

# PGXN wants three numbers.
my $three = $version;
$three .= '.0' while ($three =~ tr/.//) < 2;

my $meta = decode_json(content('META.json'));
is($meta->{version}, $three, 'META.json: the distribution');
is($meta->{provides}{ruststream}{version}, $three, 'META.json: the extension');
is($meta->{provides}{ruststream}{file}, "ruststream--$version.sql", 'META.json: the install script');
ok(-f "$top/ruststream--$version.sql", 'the install script is named after it');
is((content('CHANGELOG.md') =~ /^## ([0-9.]+)/m)[0], $version, 'CHANGELOG.md begins with it');

done_testing();
