# Every statement of the catalogue on a private MariaDB server: mysql_statement_test.c.
use strict;
use warnings;
use File::Basename qw(dirname);
use FindBin;
use lib $FindBin::Bin;
use ClientTest qw(program);
use MysqlServer;

my $test = dirname(program()) . '/../mysql_statement_test';
my $missing = MysqlServer::missing() || (-x $test ? '' : 'this build does not serve MySQL');
if ($missing)
{
	print "1..0 # SKIP $missing\n";
	exit 0;
}
my $server = MysqlServer->new;
exit(system($test, $server->socket) == 0 ? 0 : 1);
