# What the scripts share: packages, a private copy built into a stage, and
# throw-away servers.  Source it; it needs bash with errexit, nounset, pipefail.
#
# Nothing of the machine's own server is touched: no cluster of its own is made
# or started, nothing is installed below /usr but packages, and every file and
# process of ours lies in or starts from one directory that goes away at exit.
# As root the servers run as user postgres, where there is none as mysql, and
# otherwise as whoever calls.
# shellcheck shell=bash

TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# The caller's connection settings are not for us.
GIVEN_PG_CONFIG=${PG_CONFIG:-}
unset "${!PG@}"
export LC_ALL=C.UTF-8 PGAPPNAME=ruststream

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }
die() {
	warn "error: $*"
	exit 1
}

# ---------------------------------------------------------------- packages

as_root() {
	if [ "$(id -u)" -eq 0 ]; then
		"$@"
	elif command -v sudo >/dev/null; then
		sudo "$@"
	else
		die "packages are missing; run as root or install sudo: $*"
	fi
}

MISSING=()
APT_UPDATED=

# want PACKAGE PATH..: the package is missed unless every path is there.
want() {
	local package=$1 path
	shift
	for path in "$@"; do
		if ! [ -e "$path" ]; then
			MISSING+=("$package")
			return
		fi
	done
}

apt_update() {
	[ -z "$APT_UPDATED" ] || return 0
	APT_UPDATED=yes
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update ||
		warn 'apt-get update failed; going on with the lists that are there'
}

# Install what was missed.  While that goes on, the servers' packages are told
# not to make a cluster of their own, and not to start anything.
install_missing() {
	local policy=/etc/postgresql-common/createcluster.d/zz-ruststream.conf
	local starts=/usr/sbin/policy-rc.d
	local log status=0 ours=
	[ ${#MISSING[@]} -gt 0 ] || return 0
	say "installing: ${MISSING[*]}"
	apt_update
	log=$(mktemp)
	as_root mkdir -p "${policy%/*}"
	echo 'create_main_cluster = off' | as_root tee "$policy" >/dev/null
	if ! [ -e "$starts" ]; then
		ours=yes
		printf '#!/bin/sh\nexit 101\n' | as_root tee "$starts" >/dev/null
		as_root chmod +x "$starts"
	fi
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 \
		install --no-install-recommends "${MISSING[@]}" >"$log" 2>&1 </dev/null || status=$?
	as_root rm -f "$policy" ${ours:+"$starts"}
	if [ "$status" -ne 0 ]; then
		tail -n 40 "$log" >&2
		rm -f "$log"
		die 'could not install the packages'
	fi
	rm -f "$log"
	MISSING=()
}

# Choose the PostgreSQL to build for, and miss its packages: the one that
# PG_CONFIG names, else the newest installed, else the distribution's own.
# Sets PG_CONFIG, PG_MAJOR and PG_BIN; call install_missing before using them.
choose_postgres() {
	local version lib
	PG_CONFIG=$GIVEN_PG_CONFIG
	PG_MAJOR=
	if [ -n "$PG_CONFIG" ]; then
		PG_MAJOR=$("$PG_CONFIG" --version | sed -E 's/^[^0-9]*([0-9]+).*/\1/')
		PG_BIN=$("$PG_CONFIG" --bindir)
		return
	fi
	for version in 18 17 16 15; do
		if [ -x "/usr/lib/postgresql/$version/bin/postgres" ]; then
			PG_MAJOR=$version
			break
		fi
	done
	if [ -z "$PG_MAJOR" ]; then
		apt_update
		PG_MAJOR=$(apt-cache depends postgresql |
			sed -nE 's/.*Depends: postgresql-([0-9]+)$/\1/p' | head -n 1)
		[ -n "$PG_MAJOR" ] || die 'no PostgreSQL found, neither installed nor among the packages'
	fi
	lib=/usr/lib/postgresql/$PG_MAJOR
	PG_BIN=$lib/bin
	PG_CONFIG=$PG_BIN/pg_config
	want "postgresql-$PG_MAJOR" "$PG_BIN/postgres" "$PG_BIN/pg_ctl" "$PG_BIN/pgbench"
	want "postgresql-client-$PG_MAJOR" "$PG_BIN/psql"
	want "postgresql-server-dev-$PG_MAJOR" "$lib/lib/pgxs/src/makefiles/pgxs.mk" "$PG_CONFIG"
}

# The servers that the client's tests start for themselves.
want_mariadb() {
	want mariadb-server /usr/sbin/mariadbd /usr/bin/mariadb-install-db
	want mariadb-client /usr/bin/mariadb
	want libmariadb-dev /usr/include/mariadb/mysql.h
}

want_build_tools() {
	want gcc /usr/bin/gcc
	want make /usr/bin/make
	want libc6-dev /usr/include/stdio.h
}

# What the client library and the command line need whatever they serve.
want_client_tools() {
	want pkg-config /usr/bin/pkg-config
	want libjansson-dev /usr/include/jansson.h
}

# ------------------------------------------------------------ a place to work

WORK=
SERVER_USER=

# Make the directory for everything, owned by the user that runs the servers.
make_work() {
	local user
	# What needs no server can do without its user.
	if [ "$(id -u)" -eq 0 ]; then
		for user in mysql postgres; do
			! id "$user" >/dev/null 2>&1 || SERVER_USER=$user
		done
	fi
	WORK=$(mktemp -d /tmp/ruststream.XXXXXX)
	trap cleanup EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM
	mkdir "$WORK/tmp" "$WORK/sockets"
	if [ -n "$SERVER_USER" ]; then
		chown -R "$SERVER_USER": "$WORK"
	fi
	export HOME=$WORK TMPDIR=$WORK/tmp
	cd "$WORK" || exit
}

# Run a command as the user that runs the servers.
as_server() {
	if [ -n "$SERVER_USER" ]; then
		runuser -u "$SERVER_USER" -- "$@"
	else
		"$@"
	fi
}

# Stop every server whose data lies in our directory, and leave nothing.
# shellcheck disable=SC2317  # called by the trap
cleanup() {
	local status=$? pidfile pid
	trap - EXIT
	trap '' INT TERM
	cd /
	if [ -n "$WORK" ]; then
		while IFS= read -r -d '' pidfile; do
			as_server "$PG_BIN/pg_ctl" stop -m immediate -D "${pidfile%/*}" >/dev/null 2>&1 || true
		done < <(find "$WORK" -name postmaster.pid -print0 2>/dev/null)
		while IFS= read -r -d '' pidfile; do
			pid=$(cat "$pidfile")
			kill "$pid" 2>/dev/null || true
			while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
		done < <(find "$WORK" -name mariadb.pid -print0 2>/dev/null)
		if [ -n "${RUSTSTREAM_KEEP:-}" ]; then
			warn "kept: $WORK"
		else
			rm -rf "$WORK"
		fi
	fi
	exit "$status"
}

# copy_source DIRECTORY: the source tree, without what building it has left.
copy_source() {
	as_server mkdir -p "$1"
	tar -C "$TOP" --exclude=./.git --exclude='*.o' --exclude='*.so' --exclude='*.bc' \
		--exclude=./results --exclude=./output_iso --exclude=./tmp_check --exclude=./log \
		--exclude=./test/core/build --exclude='./src/client/build*' \
		--exclude='./test/client/build*' --exclude=./test/fuzz/build -cf - . |
		as_server tar -C "$1" --no-same-owner -xf -
	as_server chmod -R u+w "$1"
}

# build SOURCE STAGE [FLAGS]: make and install into the stage.
build() {
	local log=$WORK/tmp/build.log
	local command=(as_server make -s -C "$1" PG_CONFIG="$PG_CONFIG" RUSTSTREAM_CFLAGS="${3:-}")
	if ! { "${command[@]}" -j "$(nproc)" all && "${command[@]}" DESTDIR="$2" install; } \
		>"$log" 2>&1; then
		cat "$log" >&2
		return 1
	fi
}

# build_client SOURCE: a copy of the source tree, and the client in it, with whatever engines it finds.
# Sets PROGRAM, the command line.
build_client() {
	local log=$WORK/tmp/build.log
	copy_source "$1"
	as_server make -s -C "$1/src/client" -j "$(nproc)" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
	# shellcheck disable=SC2034  # for whoever has sourced this
	PROGRAM=$1/src/client/build/ruststream
}

# stage_conf STAGE: the settings by which a server finds what lies in a stage.
stage_conf() {
	local stage=$1
	echo "dynamic_library_path = '$stage$("$PG_CONFIG" --pkglibdir):\$libdir'"
	if [ "$PG_MAJOR" -ge 18 ]; then
		echo "extension_control_path = '$stage$("$PG_CONFIG" --sharedir):\$system'"
	else
		echo "extension_destdir = '$stage'"
	fi
}

# start_server NAME STAGE: a new cluster, with further settings from standard
# input, and the environment of its clients.  No TCP; the sockets' directory
# is ours alone.
start_server() {
	local data=$WORK/$1
	as_server "$PG_BIN/initdb" -D "$data" -U postgres -A trust -E UTF8 --locale=C.UTF-8 \
		--no-sync >"$WORK/tmp/initdb.log" || { cat "$WORK/tmp/initdb.log" >&2; return 1; }
	{
		echo "listen_addresses = ''"
		echo "unix_socket_directories = '$WORK/sockets'"
		stage_conf "$2"
		cat
	} | as_server tee -a "$data/postgresql.conf" >/dev/null
	as_server "$PG_BIN/pg_ctl" start -s -w -D "$data" -l "$data/server.log" ||
		{ cat "$data/server.log" >&2; return 1; }
	export PGHOST=$WORK/sockets PGUSER=postgres PGDATABASE=postgres
}

# start_mariadb NAME [SETTING..]: a new MariaDB server with an empty database
# "app".  No TCP.  Sets SOCKET, and MYSQL_URL for the command line.
start_mariadb() {
	local data=$WORK/$1 log=$WORK/tmp/mariadb-install.log deadline=$((SECONDS + 60))
	shift
	SOCKET=$data/socket
	# shellcheck disable=SC2034  # for whoever has sourced this
	MYSQL_URL="mysql://root@/app?socket=$SOCKET"
	as_server mkdir "$data"
	as_server mariadb-install-db --no-defaults --auth-root-authentication-method=normal --skip-test-db \
		--datadir="$data/data" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
	as_server /usr/sbin/mariadbd --no-defaults --datadir="$data/data" --socket="$SOCKET" --skip-networking \
		--pid-file="$data/mariadb.pid" --log-error="$data/log" "$@" >/dev/null 2>&1 &
	until maria -e 'CREATE DATABASE IF NOT EXISTS app' 2>/dev/null; do
		[ "$SECONDS" -lt "$deadline" ] || { cat "$data/log" >&2; return 1; }
		sleep 0.2
	done
}

# The mariadb shell on that server.
maria() { as_server mariadb --no-defaults -S "$SOCKET" -u root -N -B "$@"; }

stop_server() {
	as_server "$PG_BIN/pg_ctl" stop -s -w -m fast -D "$WORK/$1"
}

# psql that stops at the first error and reads nobody's configuration.
sql() { as_server "$PG_BIN/psql" -X -q -v ON_ERROR_STOP=1 "$@"; }

# ask QUERY [ARGUMENT..]: the answer alone.
ask() {
	local query=$1
	shift
	sql -At -c "$query" "$@"
}

# wait_until SECONDS QUERY: poll, in statements of their own, until it says t.
wait_until() {
	local deadline=$((SECONDS + $1))
	shift
	until [ "$(ask "$@")" = t ]; do
		[ "$SECONDS" -lt "$deadline" ] || return 1
		sleep 0.1
	done
}

# ----------------------------------------------------------------- measuring

# The median of numbers, one a line.
median() { sort -n | awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }'; }

# rate_of ROWS COMMAND..: deliveries a second of a command that delivers so many rows.
rate_of() {
	local rows=$1 start
	shift
	start=$(date +%s%N)
	as_server "$@" >/dev/null 2>&1
	echo $((rows * 1000000000 / ($(date +%s%N) - start)))
}
