# SPDX-License-Identifier: Apache-2.0
#
# Builds the C part with make and a C compiler, where there is no CMake:
#
#   make -f tools/plain.mk [CC=gcc] [OUT=build-plain]      libhvd.so, libhvd.a, the programs
#   make -f tools/plain.mk check                           two ranks, an example and the benchmark
#   make -f tools/plain.mk install PREFIX=/usr/local [DESTDIR=...]
#
# Needs the headers of OpenSSL 3; horovodrun also those of libyaml, jansson and libcurl, and is left
# out where one of them is missing. For libraries elsewhere: CPPFLAGS=-I... LDFLAGS=-L... The Python
# package is built by pip, which fetches its own CMake. CMakeLists.txt has the tests and sanitizers.
OUT ?= build-plain
CC ?= cc
AR ?= ar
PREFIX ?= /usr/local
CFLAGS ?= -O2 -g
VERSION := 1.0.0

HARDENING := -fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2
COMPILE = $(CC) -std=gnu11 -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Iinclude -Isrc \
	$(HARDENING) -ffile-prefix-map=$(CURDIR)/=/ $(CPPFLAGS) $(CFLAGS) -MMD -MP
LINK := $(LDFLAGS) -Wl,-z,relro,-z,now,-z,noexecstack
LIBS := -lssl -lcrypto -lpthread -lm -ldl -lrt

above := agent bind cli launch pai tools
core := $(filter-out $(foreach part,$(above),src/$(part)/%),$(wildcard src/*/*.c))
launcher := $(foreach part,cli agent launch pai,$(wildcard src/$(part)/*.c)) \
	src/tools/horovodrun.c src/tools/trial.c
info := src/tools/hvd-info.c src/tools/info_table.c src/tools/info_transports.c src/tools/live.c
bench := src/tools/hvd-bench.c src/tools/bench.c
objects = $(patsubst %.c,$(OUT)/%.o,$(1))

# has HEADER: something if the compiler finds it
has = $(shell printf '\043include <%s>\n' stdio.h '$(1)' | \
	$(CC) $(CPPFLAGS) -E -o /dev/null - 2>/dev/null && echo yes)
launcher_needs := yaml.h jansson.h curl/curl.h
missing := $(strip $(foreach header,$(launcher_needs),$(if $(call has,$(header)),,$(header))))
ifeq ($(call has,openssl/ssl.h),)
$(error openssl/ssl.h is missing: install libssl-dev (Debian) or openssl-devel, version 3, or \
	build it with tools/openssl.sh build-openssl, and say CPPFLAGS=-Ibuild-openssl/include \
	LDFLAGS=-Lbuild-openssl/lib)
endif

programs := $(OUT)/hvd-info $(OUT)/hvd-bench
ifeq ($(missing),)
programs += $(OUT)/horovodrun
else
$(warning horovodrun is left out: no $(missing))
endif

.PHONY: all check install
all: $(OUT)/libhvd.so $(OUT)/libhvd.a $(programs)

$(OUT)/%.o: %.c
	@mkdir -p $(@D)
	@echo '  CC $<'
	@$(COMPILE) -c $< -o $@

# The arithmetic, in loops that the compiler turns into vectors.
$(call objects,$(wildcard src/coll/reduce*.c src/coll/stream*.c)): CFLAGS += -O3

$(OUT)/libhvd.so: $(call objects,$(core)) src/hvd.map
	@echo '  LD $@'
	@$(CC) -shared -Wl,-soname,libhvd.so.1 -Wl,--version-script=src/hvd.map $(LINK) -o $@ \
		$(call objects,$(core)) $(LIBS)
	@ln -sf libhvd.so $(OUT)/libhvd.so.1

$(OUT)/libhvd.a: $(call objects,$(core))
	@rm -f $@
	@$(AR) rc $@ $^

$(OUT)/hvd-info: $(call objects,$(info)) $(OUT)/libhvd.a
	@echo '  LD $@'
	@$(CC) -pie $(LINK) -o $@ $^ $(LIBS)

$(OUT)/hvd-bench: $(call objects,$(bench)) $(OUT)/libhvd.a
	@echo '  LD $@'
	@$(CC) -pie $(LINK) -o $@ $^ $(LIBS)

$(OUT)/horovodrun: $(call objects,$(launcher)) $(OUT)/libhvd.a
	@echo '  LD $@'
	@$(CC) -pie $(LINK) -o $@ $^ -lyaml -ljansson -lcurl $(LIBS)

$(OUT)/allreduce: examples/c/allreduce.c $(OUT)/libhvd.so
	$(CC) -std=gnu11 -Iinclude $(CPPFLAGS) $(CFLAGS) -o $@ $< -L$(OUT) -lhvd

check: all $(OUT)/allreduce
	$(OUT)/hvd-info --build
	$(OUT)/hvd-bench --ranks 2 --op allreduce --bytes 1048576
ifeq ($(missing),)
	LD_LIBRARY_PATH=$(OUT) $(OUT)/horovodrun -np 2 $(OUT)/allreduce
endif

install: all
	mkdir -p $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/include \
		$(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/share/man/man1
	cp $(programs) $(DESTDIR)$(PREFIX)/bin/
	cp include/hvd.h $(DESTDIR)$(PREFIX)/include/
	cp $(OUT)/libhvd.so $(DESTDIR)$(PREFIX)/lib/libhvd.so.$(VERSION)
	ln -sf libhvd.so.$(VERSION) $(DESTDIR)$(PREFIX)/lib/libhvd.so.1
	ln -sf libhvd.so.1 $(DESTDIR)$(PREFIX)/lib/libhvd.so
	cp $(OUT)/libhvd.a $(DESTDIR)$(PREFIX)/lib/
	sed -e 's,@HVD_PC_UP@,../..,; s,@CMAKE_INSTALL_LIBDIR@,lib,' \
		-e 's,@CMAKE_INSTALL_INCLUDEDIR@,include,; s,@PROJECT_VERSION@,$(VERSION),' \
		src/hvd.pc.in >$(DESTDIR)$(PREFIX)/lib/pkgconfig/hvd.pc
ifeq ($(missing),)
	$(OUT)/horovodrun --man-page >$(DESTDIR)$(PREFIX)/share/man/man1/horovodrun.1
endif

-include $(shell find $(OUT) -name '*.d' 2>/dev/null)
