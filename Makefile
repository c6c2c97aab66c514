# Rille: make, make check, make demo, make help. Everything built lands in build/<config>/.
#
# Optional parts are chosen by file name, not by #ifdef:
#   ops/kernels/gemm_<blas>.c   one of them is compiled, by BLAS=
#   ops/kernels/*.isa.c         compiled once for each instruction set, with -DISA=<name>
#   parallel/comm_mpi.c         becomes the plugin rille_mpi_<impl>.so where mpicc is found
CONFIG ?= release
BLAS ?= rille
PREFIX ?= /usr/local
ifeq ($(origin CC),default)
CC := gcc
endif
VERSION := 0.1.0
ARCH := $(shell uname -m)
# All cores unless -j says otherwise.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif
B := build/$(CONFIG)
O := $B/obj

# ---- flags ----------------------------------------------------------------------------------
WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion \
  -Wdouble-promotion -Wstrict-prototypes -Wmissing-prototypes -Wundef -Wwrite-strings -Wcast-qual \
  -Wvla -Wpointer-arith $(if $(filter 1,$(WERROR)),-Werror)
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

FLAGS_release := -O2 -g
FAST_release := -O3 # ops/: the loops over elements
FLAGS_debug := -O0 -g3 -fno-omit-frame-pointer
FLAGS_asan := -O1 -g $(SANITIZE)
FLAGS_fuzz := -O1 -g $(SANITIZE) -fsanitize=fuzzer-no-link
FLAGS_lint := -O0
MODE := $(FLAGS_$(CONFIG))
$(if $(MODE),,$(error CONFIG=$(CONFIG) is not one of release, debug, asan))

LUA_PC := $(firstword $(foreach name,lua5.4 lua54 lua-5.4 lua,\
  $(shell pkg-config --exists '$(name) >= 5.4' '$(name) < 5.5' 2>/dev/null && echo $(name))))
LUA_CFLAGS := $(if $(LUA_PC),$(shell pkg-config --cflags $(LUA_PC)))
LUA_LIBS := $(if $(LUA_PC),$(shell pkg-config --libs $(LUA_PC)))
EDIT_CFLAGS := $(shell pkg-config --cflags libedit 2>/dev/null)
EDIT_LIBS := $(shell pkg-config --libs libedit 2>/dev/null)
CHECK_CFLAGS := $(shell pkg-config --cflags check 2>/dev/null)
CHECK_LIBS := $(shell pkg-config --libs check 2>/dev/null)
BLAS_LIBS_rille := -lm
BLAS_LIBS_onednn := -ldnnl
BLAS_LIBS_openblas := -lopenblas
BLAS_LIBS := $(BLAS_LIBS_$(BLAS))
$(if $(BLAS_LIBS),,$(error BLAS=$(BLAS) is not one of rille, onednn, openblas))

CPPFLAGS += -I. -D_GNU_SOURCE -DRILLE_VERSION='"$(VERSION)"'
CFLAGS_ALL := -std=c11 $(WARNINGS) $(MODE) -fPIC -fopenmp -fno-math-errno $(CFLAGS)
# clang's OpenMP runtime also serves the libgomp calls of the BLAS library, so there is one pool.
LDFLAGS_ALL := $(MODE) -fopenmp -Wl,--as-needed $(LDFLAGS)
RPATH := -Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib:$$ORIGIN/../..'

# ---- sources --------------------------------------------------------------------------------
ISAS := $(if $(filter x86_64,$(ARCH)),plain avx2 avx512 amx,plain)
MARCH_plain := $(if $(filter x86_64,$(ARCH)),-march=x86-64)
MARCH_avx2 := -march=x86-64-v3
MARCH_avx512 := -march=x86-64-v4
MARCH_amx := -march=x86-64-v4 -mamx-tile -mamx-bf16

ISA_SRC := $(wildcard ops/kernels/*.isa.c)
PLUGIN_SRC := $(wildcard parallel/comm_mpi.c)
LIB_SRC := $(filter-out $(ISA_SRC) $(PLUGIN_SRC) ops/kernels/gemm_%.c,\
  $(wildcard core/*.c ops/*.c ops/kernels/*.c parallel/*.c)) $(wildcard ops/kernels/gemm_$(BLAS).c)
# What is installed, and so exported: all of core but *_impl.h, and of the other layers these.
HEADERS := $(filter-out %_impl.h,$(wildcard core/*.h core/*.def)) $(wildcard \
  $(addprefix ops/,ops.h ops.def optim.h random.h) $(addprefix parallel/,\
  comm.h comm_ops.h comm_ops.def mesh.h partition.h ledger.h channel.h exec.h sched.h sched_cli.h tied.h))
MAIN_SRC := $(wildcard lua/main.c lua/info.c lua/launch.c lua/runner.c lua/repl.c)
BIND_SRC := $(filter-out $(MAIN_SRC),$(wildcard lua/*.c))
LUA_LIBRARY := $(wildcard lua/rille/*.lua lua/rille/*/*.lua)
TEST_SRC := $(wildcard tests/main.c tests/allocs.c tests/files.c tests/op_*.c tests/test_*.c)
FUZZ_SRC := $(wildcard tests/fuzz_*.c)
SUITES := $(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c))

LIB_OBJ := $(LIB_SRC:%.c=$O/%.o) $(foreach isa,$(ISAS),$(ISA_SRC:%.isa.c=$O/%.$(isa).o))
BIND_OBJ := $(BIND_SRC:%.c=$O/%.o) $(if $(BIND_SRC),$O/lua_library.o)
MAIN_OBJ := $(MAIN_SRC:%.c=$O/%.o)
TEST_OBJ := $(TEST_SRC:%.c=$O/%.o)

# One plugin for each MPI that is found; its headers are the system's as far as warnings go.
ifneq ($(PLUGIN_SRC),)
MPI_FLAGS_openmpi := $(shell { mpicc.openmpi --showme || mpicc --showme; } 2>/dev/null)
MPI_FLAGS_mpich := $(shell { mpicc.mpich -show || mpicc -compile_info; } 2>/dev/null)
endif
MPI_IMPLS := $(foreach impl,openmpi mpich,$(if $(MPI_FLAGS_$(impl)),$(impl)))
mpi_cflags = $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_FLAGS_$1)))
mpi_libs = $(filter -L% -l%,$(MPI_FLAGS_$1))
PLUGINS := $(MPI_IMPLS:%=$B/rille_mpi_%.so)

LIB := $(if $(LIB_SRC),$B/librille.so)
PROGRAM := $(if $(wildcard lua/main.c),$B/rille $(if $(filter release,$(CONFIG)),build/rille) $B/rille.so)
FUZZ := $(FUZZ_SRC:tests/%.c=$B/%)
TESTS := $(if $(TEST_SRC),$B/tests $B/ranks)

.PHONY: all objects tidy check check-full run-check run-check-full demo run-demo bench run-bench \
  lint fuzz run-fuzz deps install uninstall clean help force
.DELETE_ON_ERROR:
.SUFFIXES:

OBJECTS := $(LIB_OBJ) $(BIND_OBJ) $(MAIN_OBJ) $(TEST_OBJ) \
  $(FUZZ_SRC:%.c=$O/%.o) $O/tests/ranks.o $(MPI_IMPLS:%=$O/parallel/comm_mpi.%.o)

all: $(LIB) $(PLUGINS) $(PROGRAM) $(TESTS)
objects: $(OBJECTS)

# ---- stamps: what is built again when flags or the set of files change -----------------------
COMPILER := $(shell $(CC) --version 2>/dev/null | head -n 1)
# $(call stamp,text): writes the text to the target, only if it differs from what is there.
stamp = @mkdir -p $(@D); echo '$(subst ','\'',$1)' | cmp -s - $@ || echo '$(subst ','\'',$1)' > $@
# What is needed is looked for once, before the first compilation.
$B/needs: scripts/deps
	@sh scripts/deps --report $(DEPS) && mkdir -p $(@D) && touch $@
	$(if $(MPI_IMPLS),,@echo '  no MPI was found: Rille will be for one process (make deps installs Open MPI)')
$B/flags: force | $B/needs; $(call stamp,$(COMPILER) $(CPPFLAGS) $(CFLAGS_ALL) $(LUA_CFLAGS))
$B/links: force; $(call stamp,$(LIB_OBJ) $(BIND_OBJ) $(TEST_OBJ) $(BLAS_LIBS) $(LDFLAGS_ALL))
$B/files: force; $(call stamp,$(HEADERS) $(LUA_LIBRARY) $(SUITES))

# ---- objects --------------------------------------------------------------------------------
compile = @mkdir -p $(@D); $(if $V,,echo '  cc $(@:$O/%=%)';) \
  $(if $V,set -x;) $(CC) $(CPPFLAGS) $(CFLAGS_ALL) $(if $(filter ops/%,$<),$(FAST_$(CONFIG))) $1 -MMD -MP -c -o $@ $<
link = $(if $V,,@echo '  ld $(@:$B/%=%)';) $(CC) $(LDFLAGS_ALL) -o $@ $1

$O/lua/%.o: lua/%.c $B/flags; $(call compile,$(LUA_CFLAGS) $(EDIT_CFLAGS))
$O/lua_library.o: $B/gen/lua_library.c $B/flags; $(call compile)
$O/tests/%.o: tests/%.c $B/flags; $(call compile,$(CHECK_CFLAGS) -I$B/gen)
$O/%.o: %.c $B/flags; $(call compile)
define isa_rule
$O/%.$1.o: %.isa.c $B/flags; $$(call compile,$$(MARCH_$1) -DISA=$1 -ffp-contract=off)
endef
$(foreach isa,$(ISAS),$(eval $(call isa_rule,$(isa))))
$O/tests/main.o: $B/gen/suites.h
# clang-tidy looks at what has been compiled since it last looked; one instruction set is enough.
# ANALYZE=1 adds the static analyzer.
TIDY := $(if $(filter 1,$(ANALYZE)),analyzed,tidy)
tidy: $(filter-out %.avx2.$(TIDY) %.avx512.$(TIDY) %.amx.$(TIDY) %.mpich.$(TIDY) $O/lua_library.$(TIDY),\
  $(OBJECTS:.o=.$(TIDY)))
$O/%.$(TIDY): $O/%.o .clang-tidy
	@$(if $V,,echo '  tidy $*';) \
	  clang-tidy --quiet $(if $(filter tidy,$(TIDY)),--checks=-clang-analyzer-*) \
	  $(firstword $(wildcard $*.c $(*:.plain=.isa).c $(basename $*).c)) -- \
	  $(CPPFLAGS) $(CFLAGS_ALL) $(LUA_CFLAGS) $(CHECK_CFLAGS) $(call mpi_cflags,openmpi) -I$B/gen \
	  -DISA=plain -DRILLE_MPI='"openmpi"' 2>&1 | \
	  { grep -vE 'warnings? generated' || true; } > $@.log; \
	  if [ -s $@.log ]; then cat $@.log; exit 1; fi; mv $@.log $@

$O/ops/kernels/gemm_openblas.o: CPPFLAGS += $(shell pkg-config --cflags openblas 2>/dev/null)

# ---- what is generated ----------------------------------------------------------------------
$B/gen/exports.map: $(HEADERS) scripts/exports $B/files
	@mkdir -p $(@D)
	@CC='$(CC)' sh scripts/exports $(filter %.h,$(HEADERS)) > $@
$B/gen/lua_library.c: $(LUA_LIBRARY) scripts/embed $B/files
	@mkdir -p $(@D)
	@sh scripts/embed $(LUA_LIBRARY) > $@
$B/gen/suites.h: $B/files
	@mkdir -p $(@D)
	@echo '#define SUITE_LIST(X) $(foreach name,$(SUITES),X($(name)))' > $@

# ---- products -------------------------------------------------------------------------------
$B/librille.so: $(LIB_OBJ) $B/gen/exports.map $B/links
	$(call link,-shared -Wl$(,)-soname$(,)librille.so -Wl$(,)--version-script=$B/gen/exports.map \
	  $(LIB_OBJ) $(BLAS_LIBS) -lm -ldl -lpthread)
$B/rille: $(MAIN_OBJ) $(BIND_OBJ) $B/librille.so $B/links
	$(call link,-Wl$(,)-E $(RPATH) $(MAIN_OBJ) $(BIND_OBJ) -L$B -lrille $(LUA_LIBS) \
	  $(EDIT_LIBS) -lm -ldl)
$B/rille.so: $(BIND_OBJ) $B/librille.so $B/links
	$(call link,-shared $(RPATH) $(BIND_OBJ) -L$B -lrille -lm)
build/rille: force | $B/rille
	@ln -sfn release/rille $@
define mpi_rule
$O/parallel/comm_mpi.$1.o: parallel/comm_mpi.c $B/flags; $$(call compile,$$(call mpi_cflags,$1) -DRILLE_MPI='"$1"')
$B/rille_mpi_$1.so: $O/parallel/comm_mpi.$1.o $B/librille.so $B/links
	$$(call link,-shared $$(RPATH) $$< -L$B -lrille $$(call mpi_libs,$1))
endef
$(foreach impl,$(MPI_IMPLS),$(eval $(call mpi_rule,$(impl))))
# tests/allocs.c fails allocations on demand.
ALLOC_WRAPS = $(foreach f,malloc aligned_alloc calloc realloc strdup asprintf,-Wl$(,)--wrap=$f)
# The tests link the objects themselves, so that they can look behind the installed headers.
$B/tests: $(TEST_OBJ) $(LIB_OBJ) $B/links
	$(call link,$(ALLOC_WRAPS) $(TEST_OBJ) $(LIB_OBJ) $(CHECK_LIBS) $(BLAS_LIBS) -lm -ldl -lpthread)
# Several ranks: with the library itself, which the MPI plugins use too.
$B/ranks $B/bench_exec: $B/%: $O/tests/%.o $B/librille.so $B/links
	$(call link,$(RPATH) $< -L$B -lrille -lm)
ifneq ($(MPI_FLAGS_openmpi),)
$O/tests/bench_comm.o: tests/bench_comm.c $B/flags; $(call compile,$(call mpi_cflags,openmpi))
$B/bench_comm: $O/tests/bench_comm.o $B/librille.so $B/links
	$(call link,$(RPATH) $< -L$B -lrille $(call mpi_libs,openmpi))
endif
$B/bench_kernels: $O/tests/bench_kernels.o $(LIB_OBJ) $B/links
	$(call link,$< $(LIB_OBJ) $(BLAS_LIBS) -lm -ldl -lpthread)
# What reads files is all in core, which needs nothing above it.
CORE_OBJ := $(filter $O/core/%,$(LIB_OBJ))
$B/fuzz_%: $O/tests/fuzz_%.o $(CORE_OBJ) $B/links
	$(call link,-fsanitize=fuzzer $< $(CORE_OBJ) -lm -lpthread)
, := ,

DEPS := $(if $(filter-out rille,$(BLAS)),--$(BLAS))

# ---- what people type -----------------------------------------------------------------------
deps:
	@sh scripts/deps --mpi $(DEPS)

# The second make reads the flags of libraries that the first may just have installed.
check check-full demo bench: deps
	@$(MAKE) --no-print-directory run-$@
run-check: all
	@BUILD=$B sh scripts/check $(ONLY)
run-check-full: all
	@BUILD=$B sh scripts/check --full $(ONLY)
run-demo: all
	@BUILD=$B sh scripts/demo
# BENCH='--quick --only gpt' passes options on.
run-bench: all $(patsubst tests/%.c,$B/%,$(wildcard tests/bench_kernels.c))
	@BUILD=$B sh scripts/bench $(BENCH)
lint:
	@sh scripts/lint
# Each tests/fuzz_<x>.c with the seeds in tests/fuzz/<x>/.
fuzz:
	@sh scripts/deps --lint
	@$(MAKE) --no-print-directory CONFIG=fuzz CC=clang run-fuzz
run-fuzz: $(FUZZ)
	@BUILD=$B sh scripts/fuzz $(FUZZ_SRC:tests/fuzz_%.c=%)

# ---- installation ---------------------------------------------------------------------------
INCLUDES = $(DESTDIR)$(PREFIX)/include/rille
SHARE = $(DESTDIR)$(PREFIX)/share/rille
INSTALLED = $(DESTDIR)$(PREFIX)/lib/librille.so $(DESTDIR)$(PREFIX)/lib/lua/5.4/rille.so \
  $(DESTDIR)$(PREFIX)/lib/pkgconfig/rille.pc $(DESTDIR)$(PREFIX)/bin/rille \
  $(DESTDIR)$(PREFIX)/lib/rille_mpi_*.so
install: all
	install -D -m 755 $B/librille.so $(DESTDIR)$(PREFIX)/lib/librille.so
	for file in $(PLUGINS); do install -m 755 $$file $(DESTDIR)$(PREFIX)/lib || exit 1; done
	$(if $(PROGRAM),install -D -m 755 $B/rille $(DESTDIR)$(PREFIX)/bin/rille)
	$(if $(PROGRAM),install -D -m 755 $B/rille.so $(DESTDIR)$(PREFIX)/lib/lua/5.4/rille.so)
	for file in $(HEADERS); do install -D -m 644 $$file $(INCLUDES)/$$file || exit 1; done
	for file in $(wildcard models/*.lua scripts/*.lua); do \
	  install -D -m 644 $$file $(SHARE)/$$file || exit 1; done
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig
	printf '%s\n' 'Name: rille' 'Description: pipeline-parallel training of neural networks' \
	  'Version: $(VERSION)' 'Cflags: -I$(PREFIX)/include/rille' 'Libs: -L$(PREFIX)/lib -lrille' \
	  > $(DESTDIR)$(PREFIX)/lib/pkgconfig/rille.pc
	@[ -n '$(DESTDIR)' ] || [ "$$(id -u)" != 0 ] || ldconfig 2>/dev/null || true
uninstall:
	rm -rf $(INCLUDES) $(SHARE)
	rm -f $(INSTALLED)

print-%:
	@echo '$($*)'

clean:
	rm -rf build

help:
	@echo 'make              build the library, the program and the tests'
	@echo 'make deps         install what is needed, or print the command that does'
	@echo 'make demo         a GPT learns real text and writes some'
	@echo 'make check        all tests, or ONLY="rng cli_test.sh"; make check-full adds the long ones'
	@echo 'make bench        the benchmark tables; BENCH="--help" lists options'
	@echo 'make lint         formatting, warnings, static checks, layers'
	@echo 'make fuzz         fuzz the file readers'
	@echo 'make install      PREFIX=$(PREFIX) DESTDIR=; make uninstall takes it away'
	@echo 'make clean        remove build/'
	@echo 'Settings: CONFIG=release|debug|asan  BLAS=rille|onednn|openblas  CC=gcc|clang  WERROR=1  V=1'

-include $(shell find $O -name '*.d' 2>/dev/null)
