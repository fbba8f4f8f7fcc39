# The MySQL column: what the MariaDB column does, on MySQL.
package Conformance::mysql;
use strict;
use warnings;

use engines::mariadb;
our @ISA = ('Conformance::mariadb');

sub kind { return 'mysql'; }

1;
