#!/bin/sh
# verify: two layouts of one script are equal, or the first difference is named.
set -eu
rille=$BUILD/rille
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# says CLAIM CODE LINES COMMAND...: the command ends with this code and says what matches each line.
says() {
  claim=$1 code=$2 lines=$3
  shift 3
  status=0 missing=
  "$@" >"$work/out" 2>&1 || status=$?
  echo "$lines" >"$work/lines"
  while read -r line; do
    grep -qE -e "$line" "$work/out" || missing="$missing; no $line"
  done <"$work/lines"
  if [ "$status" -eq "$code" ] && [ -z "$missing" ]; then echo "ok $claim"; else
    echo "not ok $claim: exit code $status$missing"
    sed 's/^/    /' "$work/out"
    failed=1
  fi
}

cat >"$work/net.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local o = rille.options { { "wrong", "", "which unit is wrong on ranks other than 0" } }
local Unit = nn.class "Unit"
function Unit:init(name)
  self.name, self.linear, self.drop = name, nn.Linear { 6, 6, act = "gelu" }, nn.Dropout(0.1)
end
function Unit:forward(x)
  local y = x + self.drop(self.linear(x))
  return o.wrong == self.name and rille.core.rank > 0 and y * 1.5 or y
end
local model = nn.Sequential { Unit "a", Unit "b", Unit "c", Unit "d" }
local trainer = rille.Trainer { model = model, loss = nn.mse, seed = 1, log = 0,
  optimizer = { "adamw", lr = 0.01, clip = 0.1 }, batch = { global = 8, micro = 2 } }
local data = rille.data.batch { rille.randn(8, 6), rille.randn(8, 6) }
for _ = 1, 5 do trainer:step(data) end
error("the run went on")
LUA

says 'pp 1 and pp 2 with zbv: equal bit for bit' 0 'equal bit for bit: 2 steps, [0-9]+ values' \
  "$rille" verify "$work/net.lua" --a 'pp=1' --b 'pp=2 pipeline=zbv' --steps 2
says 'dp 2: equal to rounding, and says why not more' 0 'equal to rounding: gradients of the first step differ by at most .*allowed 1e-06
replicas add in another order' \
  "$rille" verify "$work/net.lua" --a 'pp=1' --b 'pp=2 dp=2'
says 'a wrong unit: step, microbatch, unit, actions, ranks and both values' 1 'NOT equal
step 1, microbatch from sample 0, unit 2: what 2 gives differs
pp=1: 0F0 on rank 0
pp=2: 1F0 on rank 1
12 of 12 elements differ, the first at 0: .* against ' \
  "$rille" verify "$work/net.lua" --a 'pp=1' --b 'pp=2' --wrong c
echo 'error [[boom]]' >"$work/bad.lua"
says 'a script that fails: its words' 1 'bad.lua:1: boom' \
  "$rille" verify "$work/bad.lua" --a pp=1 --b pp=1
says 'a layout that is none: exit code 2' 2 'must be dp=, tp=, pp=' \
  "$rille" verify "$work/net.lua" --a 'pp=1' --b 'px=2'
says 'one layout: exit code 2' 2 'two layouts are needed' "$rille" verify "$work/net.lua" --a pp=1
exit "$failed"
