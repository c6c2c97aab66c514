#!/bin/sh
# The guards of scripts/lint fail on what they are there to find.
set -eu
root=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p core ops/kernels parallel lua tests

ok() { echo "ok $1"; }
not_ok() { echo "not ok $1" && cat "$work/out"; }
# finds CLAIM WORDS COMMAND...: the command fails and says WORDS.
finds() {
  claim=$1 words=$2
  shift 2
  if "$@" >"$work/out" 2>&1; then not_ok "$claim"
  elif grep -q "$words" "$work/out"; then ok "$claim"
  else not_ok "$claim"; fi
}
# passes CLAIM COMMAND...: the command finds nothing.
passes() {
  claim=$1
  shift
  if "$@" >"$work/out" 2>&1; then ok "$claim"; else not_ok "$claim"; fi
}
layers() { sh "$root/scripts/layers" "$work"; }
# refuses CLAIM WORDS FILE LINE: the layer check refuses a file with this line, and not without it.
refuses() {
  echo "$4" >"$3"
  finds "layers: $1" "$3:1: .*$2" layers
  rm "$3"
}

echo '#include "core/a.h"' >core/a.c
printf '#include "ops/b.h"\n#include "core/a.h"\n#include <math.h>\n' >ops/b.c
printf '#include "parallel/c.h"\n#include "ops/kernels/k.h"\n' >parallel/c.c
echo '#include <mpi.h>' >parallel/comm_mpi.c
printf '#include "parallel/c.h"\n#include <lua.h>\n#include <lauxlib.h>\n' >lua/d.c
passes 'layers: includes that point down are fine' layers
refuses 'core may not include ops' 'above' core/x.c '#include "ops/b.h"'
refuses 'ops may not include parallel' 'above' ops/kernels/x.isa.c '#  include "parallel/c.h"'
refuses 'parallel may not include lua' 'above' parallel/x.h '#include "lua/d.h"'
refuses 'a header table is no way around' 'above' core/x.def '#include "ops/b.h"'
refuses 'files are named from the root' 'root' ops/x.c '#include "b.h"'
refuses 'the library knows no tests' 'tests' core/x.c '#include "tests/tests.h"'
refuses 'lua.h is for lua/' 'alone' parallel/x.c '#include <lua.h>'
refuses 'mpi.h is for comm_mpi.c' 'alone' parallel/mesh.c '#include <mpi.h>'
refuses 'CUDA is for its own files' 'alone' core/device.c '#include <cuda_runtime.h>'
refuses 'no #ifdef HAVE_' 'HAVE_' core/x.c '#ifdef HAVE_MPI'
passes 'layers: the fixture is clean again' layers

lines() { # lines FROM TO
  seq "$1" "$2" | sed 's|.*|  step(&);|'
}
{ echo 'static int long_one(int a,'; echo '                    int b) {'; lines 1 77; echo '}'; } >core/f.c
passes 'sizes: a function of 80 lines is fine' sh "$root/scripts/sizes" core/f.c
{ echo 'static int long_one(int a,'; echo '                    int b) {'; lines 1 78; echo '}'; } >core/f.c
finds 'sizes: a function of 81 lines is not' 'core/f.c:1: long_one: 81 lines' sh "$root/scripts/sizes" core/f.c
{ echo '// Long: a switch over a list.'; cat core/f.c; } >core/g.c
passes 'sizes: unless its comment says why' sh "$root/scripts/sizes" core/g.c
{ echo 'static const int table[] = {'; lines 1 90; echo '};'; } >core/t.c
passes 'sizes: a table is not a function' sh "$root/scripts/sizes" core/t.c
{ echo 'local function f()'; lines 1 90; echo 'end'; } >core/f.lua
finds 'sizes: Lua functions count as well' 'core/f.lua:1' sh "$root/scripts/sizes" core/f.lua
lines 1 901 >core/long.c
finds 'sizes: a file of 901 lines is too long' 'core/long.c:900' sh "$root/scripts/sizes" core/t.c core/long.c core/t.c

cat >core/a.h <<'H'
#include <stddef.h>
#define LIST(X) X(one) X(two)
#define X(name) int list_##name(void);
LIST(X)
#undef X
typedef struct A { int (*callback)(void *); } A;
typedef enum { RED, GREEN } Colour;
struct B;
extern const A table[2];
extern int counter;
static inline int hidden(int x) { return x ? x + 1 : 0; }
const char *named(A *a, int (*callback)(int)) __attribute__((format(printf, 1, 2)));
_Noreturn void leave(
    void);
A make(void);
struct B *find_b(void);
H
got=$(sh "$root/scripts/exports" core/a.h | sed -n 's/^    \(.*\);$/\1/p' | sort | tr '\n' ' ')
echo "$got" >"$work/out"
if [ "$got" = 'counter find_b leave list_one list_two make named table ' ]; then
  ok 'exports: functions and variables of a header, and nothing else'
else not_ok 'exports: functions and variables of a header, and nothing else'; fi
