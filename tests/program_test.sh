#!/bin/sh
# The program `rille`: scripts, one-liners, exit codes, strict globals, messages; rille.so in lua5.4.
set -eu
build=${BUILD:-build/release}
rille=$build/rille
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# expect CLAIM STATUS PATTERN COMMAND...: the command ends so, and its output has the pattern.
expect() {
  claim=$1 want=$2 pattern=$3
  shift 3
  status=0
  "$@" >"$work/out" 2>&1 </dev/null || status=$?
  if [ "$status" -eq "$want" ] && grep -q -e "$pattern" "$work/out"; then
    echo "ok $claim"
  else
    failed=1
    echo "not ok $claim: status $status, expected $want and $pattern in"
    sed 's/^/    /' "$work/out"
  fi
}
script() { cat >"$work/$1"; }

expect '-e prints what the code returns' 0 '^1	a$' "$rille" -e 'return 1, "a"'
expect '-e has rille' 0 '^f32' "$rille" -e 'return rille.ones(2)'
expect '-e passes arguments' 0 '^y	x	y$' "$rille" -e 'return arg[2], ...' x y
expect '-e without code is wrong usage' 2 'wants code' "$rille" -e
expect 'an unknown option is wrong usage' 2 'no option --foo' "$rille" --foo
expect 'a missing script is named' 2 'no script none.lua' "$rille" none.lua
for words in --help --version 'schedule --list' 'schedule --help'; do
  # shellcheck disable=SC2086  # words
  expect "$words: output that cannot be written is an error" 1 'could not be written' \
    sh -c '"$@" >/dev/full' sh "$rille" $words
done
expect 'an error is none without a failing code' 1 'code = 0' "$rille" -e 'error { code = 0 }'
expect '--help lists the environment' 0 'RILLE_CPU' "$rille" --help
for wrong in RILLE_CPU=fast RILLE_THREADS=two RILLE_THREADS=0 RILLE_THREADS=999 RILLE_WAIT=maybe \
  OMP_NUM_THREADS=many RILLE_FAULT_WRITE=full; do
  expect "$wrong is wrong usage" 2 "^rille: $wrong: " env -u RILLE_THREADS "$wrong" "$rille" -e 'return 1'
done
expect 'RILLE_CPU: what this machine can run is told' 2 'can run .*plain$' \
  env RILLE_CPU=fast "$rille" -e 'return 1'
expect 'values that mean something are taken' 0 'plain, .*, 3 threads' env RILLE_CPU=plain \
  RILLE_THREADS= OMP_NUM_THREADS=3,2 RILLE_WAIT=active "$rille" info
expect '--version' 0 '^rille [0-9]' "$rille" --version
expect 'info says what was found' 0 '^memory ' "$rille" info
expect 'info says which MPI was found' 0 '^libraries libedit; MPI:' "$rille" info
expect 'help says what a function is that is no op' 0 '^dropout(x, p' "$rille" -e 'rille.help "dropout"'
expect 'help has every op of the table and more' 0 '^  cross_entropy ' "$rille" -e 'rille.help()'
expect 'a misspelt name gets a suggestion' 0 'did you mean "softmax"' "$rille" -e 'rille.help "sofmax"'
expect 'schedule draws one' 0 '^rank 0' "$rille" schedule 1f1b -p 2 -m 4
expect 'schedule refuses what it does not know' 2 'nosuch' "$rille" schedule nosuch
expect 'schedule: a script that is not there' 2 'none.lua: No such file' "$rille" schedule none.lua -p 2 -m 2
expect 'schedule: a file that is not there' 2 'none.csv: No such file' "$rille" schedule none.csv
expect 'schedule: a script that takes options is refused' 2 'train_gpt.lua has options of its own: ' \
  "$rille" schedule scripts/train_gpt.lua -p 2 -m 2

script args.lua <<'END'
print(arg[0]:match("[^/]+$"), arg[1], select("#", ...), ...)
END
script trains.lua <<'END'
local rille = require "rille"
rille.Trainer { model = rille.nn.Sequential { rille.nn.Linear { 2, 2 } }, loss = rille.nn.mse,
  optimizer = { "sgd", lr = 1 }, batch = { global = 2 } }
END
expect 'schedule: so is one that trains, before it does' 2 \
  'trains.lua trains a model: the script of a schedule only returns' \
  "$rille" schedule "$work/trains.lua" -p 2 -m 2
expect 'a script gets its arguments' 0 '^args.lua	--lr	2	--lr	3$' "$rille" "$work/args.lua" --lr 3
script beside.lua <<'END'
return {word = "found"}
END
script uses.lua <<'END'
print(require("beside").word)
END
expect 'require looks beside the script' 0 '^found$' "$rille" "$work/uses.lua"
script typo.lua <<'END'
local count = 1
print(cuont, count)
prnt(3)
END
expect 'reading an undeclared global is an error with its line' 1 'typo.lua:2: there is no global "cuont"' \
  "$rille" "$work/typo.lua"
expect 'and the nearest name is told' 1 'did you mean "print"' "$rille" -e 'prnt(3)'
expect 'writing one too' 1 'no global "total"' "$rille" -e 'total = 3'
expect 'a script sets its exit code' 75 '' "$rille" -e 'print(1) rille.exit(75)'
expect 'and runs its clean-up first' 3 'closed' "$rille" -e \
  'local _ <close> = setmetatable({}, {__close = function() print("closed") end}) rille.exit(3)'
script deep.lua <<'END'
local rille = require "rille"
local function inner() return rille.ones(2, 3):matmul(rille.ones(2, 3)) end
local function outer() return inner() + 1 end
outer()
END
expect 'errors name the line' 1 'deep.lua:2: matmul: inner sizes differ' "$rille" "$work/deep.lua"
expect 'and the way there' 1 'deep.lua:3 in outer' "$rille" "$work/deep.lua"
expect 'a syntax error names its line' 1 'e:1: unexpected symbol' "$rille" -e 'return ('
expect 'an error that is a table names the line and what was raised' 1 \
  '^rille: -e:1: error(...) was called with a table instead of a message: {3, a = "b"}$' \
  "$rille" -e 'error { 3, a = "b" }'
expect 'and one that is nothing' 1 '^rille: -e:1: error.* with a nil' "$rille" -e 'error()'
expect 'an option that the library refuses is wrong usage' 2 '^rille: -e:1: Dropout: p must be' \
  "$rille" -e 'rille.nn.Dropout { p = 2 }'
expect 'but not where it was caught' 1 'later' "$rille" -e \
  'pcall(rille.nn.Dropout, 2) error("later")'
# shellcheck disable=SC2016  # the inner shell's variable
expect 'stop_requested names the signal' 0 '^SIGUSR1$' "$rille" -e \
  'rille.core.catch_signals() local before = rille.core.stop_requested()
   os.execute("kill -USR1 $PPID") return before or rille.core.stop_requested()'

# A sanitizer's runtime must come first in a program that was built without it.
runtime=$(ldd "$build/rille.so" | awk '/libasan/ { print $3 }')
expect 'require works in a stock lua5.4' 0 '4\.0' env LD_PRELOAD="$runtime" LUA_CPATH="$build/?.so" lua5.4 -e \
  'local rille = require "rille" print(rille.ones(2, 2):sum())'

# Not a timed test of speed: a start that loads what it should not takes ten times as long.
start=$(date +%s%N)
"$rille" -e 'return 1' >/dev/null
ms=$((($(date +%s%N) - start) / 1000000))
if [ "$ms" -lt 300 ]; then echo 'ok a one-liner starts at once'
else failed=1 && echo "not ok a one-liner starts at once: $ms ms"; fi
exit $failed
