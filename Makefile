# ruststream: make && make install && make installcheck, for the PostgreSQL
# (15 to 18) that PG_CONFIG names.
#
# Variables: RUSTSTREAM_CFLAGS, flags of your own, such as -Werror, or
# -DRUSTSTREAM_FAILPOINTS for a build with the tests' failure points in it.
EXTENSION = ruststream
MODULE_big = ruststream
PGFILEDESC = "ruststream - any table a transactional task queue"

# The control file is the one source of the version.
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'.*/\1/p" ruststream.control)

# The install script of this version and the upgrades from those before it.
DATA = $(sort $(wildcard ruststream--*.sql))

CORE_SOURCES = $(sort $(wildcard src/core/*.c))
BACKEND_SOURCES = $(sort $(wildcard src/backend/*.c))
CLIENT_SOURCES = $(sort $(wildcard src/client/*.c))
RS_HEADERS = $(sort $(wildcard src/core/*.h src/backend/*.h))
OBJS = $(patsubst %.c,%.o,$(CORE_SOURCES) $(BACKEND_SOURCES))

PG_CPPFLAGS = -I$(srcdir)/src -DRUSTSTREAM_VERSION='"$(EXTVERSION)"'
PG_CFLAGS = -std=gnu11 $(RUSTSTREAM_WARNINGS) $(RUSTSTREAM_CFLAGS)
RUSTSTREAM_WARNINGS = -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers

REGRESS = $(patsubst sql/%.sql,%,$(sort $(wildcard sql/*.sql)))
ISOLATION = $(patsubst test/isolation/specs/%.spec,%,$(sort $(wildcard test/isolation/specs/*.spec)))
ISOLATION_OPTS = --inputdir=test/isolation

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)

# Nothing here is worth inlining into JIT code, so no bitcode is made and no
# clang is needed; say with_llvm=yes to have it all the same.
ifneq ($(origin with_llvm),command line)
override with_llvm = no
endif

# The client library and the command line are built by a Makefile of their own,
# without PGXS: they need no PostgreSQL on the machine.
CLIENT_GOALS = client install-client uninstall-client clean-client
.PHONY: $(CLIENT_GOALS)
ifneq ($(filter-out $(CLIENT_GOALS),$(or $(MAKECMDGOALS),all)),)
include $(PGXS)
endif

client:
	$(MAKE) -C src/client all

install-client uninstall-client clean-client:
	$(MAKE) -C src/client $(@:-client=)

# So few files that every object may depend on every header.
$(OBJS): $(RS_HEADERS) ruststream.control

# ------------------------------------------------------------ for developers

CLANG ?= clang
CLANG_FORMAT ?= clang-format
CPPCHECK ?= cppcheck
FORMATTED = $(CORE_SOURCES) $(BACKEND_SOURCES) $(CLIENT_SOURCES) $(RS_HEADERS) \
	$(sort $(wildcard src/client/*.h test/core/*.[ch] test/t/*.[ch] test/client/*.[ch] test/fuzz/*.[ch]))

.PHONY: version format format-check cppcheck clang-check walls

version:
	@echo $(EXTVERSION)

format:
	$(CLANG_FORMAT) -i $(FORMATTED)

format-check:
	$(CLANG_FORMAT) --dry-run -Werror $(FORMATTED)

# The server's headers are left out; test/cppcheck.h says what matters of them.
cppcheck:
	$(CPPCHECK) --std=c11 --language=c --enable=warning,performance,portability \
		--inline-suppr --suppressions-list=test/cppcheck.suppressions \
		--error-exitcode=1 --quiet --library=posix -Isrc \
		--include=test/cppcheck.h \
		$(CORE_SOURCES) $(BACKEND_SOURCES)
	$(CPPCHECK) --std=c11 --language=c --enable=warning,performance,portability \
		--inline-suppr --suppressions-list=test/cppcheck.suppressions \
		--error-exitcode=1 --quiet --library=posix -Isrc -D_GNU_SOURCE \
		-DRS_WITH_SQLITE -DRS_WITH_MYSQL -DRS_WITH_POSTGRES -DRUSTSTREAM_FAILPOINTS \
		-DRUSTSTREAM_VERSION='"$(EXTVERSION)"' $(CLIENT_SOURCES)

# A second compiler's opinion; nothing is left of it.  The server's headers are
# not its business.
clang-check:
	rm -rf src/client/build-clang
	$(MAKE) -s -C src/client BUILD=build-clang CC=$(CLANG) CLIENT_CFLAGS=-Werror all
	rm -rf src/client/build-clang
	for file in $(CORE_SOURCES) $(BACKEND_SOURCES); do \
		$(CLANG) -fsyntax-only -std=gnu11 $(RUSTSTREAM_WARNINGS) -Werror \
			$(RUSTSTREAM_CFLAGS) -isystem $(includedir_server) $(CPPFLAGS) $$file || exit 1; \
	done

# The walls between the rooms (see src/README.md).
walls:
	CC='$(CC)' test/walls
