#!/bin/sh
# What is installed is whole: headers compile alone, a C program builds by pkg-config, `rille` and
# the Lua module run from anywhere, and uninstall takes everything away.
set -eu
build=${BUILD:?}
. tests/launchers.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
config=${BUILD#build/}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
to="CONFIG=$config PREFIX=$work/usr"
mode=$(make -s "CONFIG=$config" print-MODE)
export PKG_CONFIG_PATH="$work/usr/lib/pkgconfig"

# holds CLAIM COMMAND...
holds() {
  claim=$1
  shift
  if "$@" >"$work/out" 2>&1; then echo "ok $claim"; else echo "not ok $claim" && cat "$work/out"; fi
}

# shellcheck disable=SC2086  # lists of words
{
  holds 'make install succeeds' make $to install
  cd "$work"

  flags=$(pkg-config --cflags --libs rille)
  : >bad
  for header in $(cd usr/include/rille && find . -name '*.h'); do
    echo "#include \"${header#./}\"" >header.c
    gcc -std=c11 $flags -Werror -fsyntax-only header.c 2>>bad || echo "$header" >>bad
  done
  holds 'installed headers compile alone' sh -c '! grep . bad'

  cat >program.c <<'C'
#include "core/status.h"
#include <stdio.h>
int main(void) { return puts(status_words(fail(ST_EIO, "as it should"))) < 0; }
C
  holds 'a C program builds by pkg-config' \
    gcc -std=c11 -Wall -Werror $mode program.c $flags -Wl,-rpath,"$work/usr/lib" -o program
  holds 'and runs' ./program
  holds 'the example of tensors and gradients builds' \
    gcc -std=c11 -Wall -Werror $mode "$OLDPWD/scripts/examples/fit.c" $flags \
    -Wl,-rpath,"$work/usr/lib" -o fit
  ./fit >fitted || true
  holds 'and finds the line' grep -q '^y = 2.000 x + 1.000' fitted
  holds 'the example of a pipeline builds' \
    gcc -std=c11 -Wall -Werror $mode "$OLDPWD/scripts/examples/pipeline.c" $flags \
    -Wl,-rpath,"$work/usr/lib" -o pipeline
}
# dw of rank r is the sum of the inputs, 1 + 2 + .. + 8, times the weights of the other ranks.
echo 'rank 0: w = 2, dw = 36' >want
./pipeline >got || true
holds 'and is right on one rank' diff want got
printf 'rank %d: w = %d, dw = %d\n' 0 2 2160 1 3 1440 2 4 1080 3 5 864 >want
for impl in $impls; do
  "$(launcher_of "$impl")" -n 4 ./pipeline 2>&1 | sort >got || true
  holds "$impl: and on four" diff want got
done
if [ -e usr/bin/rille ]; then
  echo 'local rille = require "rille"; print(rille)' >hello.lua
  holds 'rille runs from anywhere' usr/bin/rille hello.lua
  preload=
  case $mode in *sanitize*) preload=$(gcc -print-file-name=libasan.so) ;; esac
  holds 'require "rille" works in a stock lua5.4' \
    env LD_PRELOAD="$preload" LUA_CPATH="$work/usr/lib/lua/5.4/?.so" lua5.4 hello.lua
fi
cd - >/dev/null
# shellcheck disable=SC2086
holds 'make uninstall succeeds' make $to uninstall
holds 'and leaves no file' sh -c "! find '$work/usr' -type f | grep ."
