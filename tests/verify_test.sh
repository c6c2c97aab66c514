#!/bin/sh
# verify: two layouts of one script are equal, or the first difference is named.
set -eu
rille=$BUILD/rille
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR="$work/tmp" # where verify's folders are made
mkdir "$TMPDIR"
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
local o = rille.options { { "wrong", "", "which unit is wrong on ranks other than 0" },
  { "from", 1, "and from which step on" } }
print(arg[0])
local Unit = nn.class "Unit"
function Unit:init(name)
  self.name, self.linear, self.drop = name, nn.Linear { 6, 6, act = "gelu" }, nn.Dropout(0.1)
end
function Unit:forward(x)
  local y = x + self.drop(self.linear(x))
  local is_wrong = o.wrong == self.name and rille.core.rank > 0
  return is_wrong and rille.core.place().step >= o.from and y * 1.5 or y
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
says 'dp 2: equal to rounding, and says why not more' 0 'equal to rounding: 3 steps, 24 gradients and the losses
step 1: gradients differ by at most .*allowed 1e-06
step 3: gradients differ by at most .*allowed 2e-05
replicas add in another order' \
  "$rille" verify "$work/net.lua" --a 'pp=1' --b 'pp=2 dp=2'
says 'dp 2, wrong from step 2 on: found' 1 'NOT equal to rounding
step 1: .*losses by [^ ]* \(allowed 3e-06\)$
step 2: .*NOT equal$' \
  "$rille" verify "$work/net.lua" --a 'dp=1' --b 'dp=2' --wrong c --from 2
cp README.md "$work/text.md"
says 'dp 2 under both layouts: equal bit for bit while gradients are reduced' 0 'equal bit for bit: 3 steps' \
  "$rille" verify scripts/train_gpt.lua --a dp=2 --b 'dp=2' --text "$work/text.md" --layers 3 \
  --heads 2 --d 32 --T 32 --global 7 --micro 1 --sample 0 --eval-every 0
says 'a wrong unit: step, microbatch, unit, actions, ranks and both values' 1 'NOT equal
step 1, microbatch from sample 0, unit 2: what 2 gives differs
pp=1: 0F0 on rank 0
pp=2: 1F0 on rank 1
12 of 12 elements differ, the first at 0: .* against ' \
  "$rille" verify "$work/net.lua" --a 'pp=1' --b 'pp=2' --wrong c

cat >"$work/loop.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local o = rille.options { { "count", 9, "steps" }, parallel = true }
print(arg[0])
local pipe = rille.Pipeline { model = nn.Sequential { nn.Linear { 6, 6 }, nn.Linear { 6, 6 } },
  loss = nn.mse, seed = 1, batch = { global = 8, micro = 2 }, parallel = o.parallel }
local optimizer = pipe:optimizer { "adamw", lr = 0.01, clip = 0.1 }
local data = rille.data.batch { rille.randn(8, 6), rille.randn(8, 6) }
for _ = 1, o.count do
  local r = pipe:step(data)
  optimizer:step(r.scale, nil, false, r.norms)
end
assert(o.count < 9, "the run went on")
LUA
says 'a loop over a Pipeline: ended and compared; a split with a blank' 0 'equal bit for bit: 2 steps, 60 values compared \(losses, norms, parameters, gradients' \
  "$rille" verify "$work/loop.lua" --a 'pp=1' --b 'pp=2 split=1, 1' --steps 2
says 'a loop that ends: what was compared is said' 0 'equal bit for bit: 2 steps \(the script ends there, before 3\)
parameters but for those after step 2' \
  "$rille" verify "$work/loop.lua" --a 'pp=1' --b 'pp=2' --count 2
says 'a loop over a Pipeline with other replicas' 0 'equal to rounding: 3 steps, 12 gradients' \
  "$rille" verify "$work/loop.lua" --a 'pp=1' --b 'dp=2'
seq 2000 >"$work/numbers"
tiny="--text $work/numbers --layers 2 --heads 4 --kv-heads 2 --d 16 --T 8 --global 4 --micro 2 --sample 0
  --eval-every 0 --eval-batches 1"
# shellcheck disable=SC2086
{
  says 'tp 2 with pp 2 against one process: equal to rounding' 0 'equal to rounding: 3 steps, 84 gradients and the losses compared
step 1: gradients differ by at most .*allowed 1e-06
tp ranks add in another order' \
    "$rille" verify scripts/train_gpt.lua --a 'pp=1' --b 'tp=2 pp=2' $tiny
  says 'tp 4, kv heads that two ranks have, sequence parallel, against tp 2 and replicas' 0 'equal to rounding: 2 steps, 32 gradients and the losses compared
replicas and tp ranks add' \
    "$rille" verify scripts/train_gpt.lua --a 'tp=2 dp=2' --b 'tp=4 sequence_parallel=true' --steps 2 \
    --style llama $tiny
  says 'tp 2 on both sides, sequence parallel on one: to rounding' 0 'equal to rounding: 2 steps
tp ranks add' \
    "$rille" verify scripts/train_gpt.lua --a 'tp=2' --b 'tp=2 sequence_parallel=true' --steps 2 $tiny
  # Of 28 parameters 13 are cut, one of them used twice; 5 units; 2 microbatches. A step: P 13 * 2 + 15,
  # G (14 * 2 + 15) * 2, F 5 * 2 * 2, L 2; less 3 gradients of bytes from 128 on that stay 0.
  says 'tp 2 and tp 2 with pp 2: equal bit for bit, each rank its parts' 0 'equal bit for bit: 2 steps, 295 values' \
    "$rille" verify scripts/train_gpt.lua --a 'tp=2' --b 'tp=2 pp=2 pp-schedule=zbv' --steps 2 $tiny
}
cat >"$work/cut.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local o = rille.options { { "wrong", "", "which layer is wrong on tp rank 1 of a pipeline of two" } }
print(arg[0])
local model = nn.Sequential { nn.Linear { 6, 8, tp = "column" }, nn.Linear { 8, 6, tp = "row" },
  nn.Linear { 6, 6 } }
local trainer = rille.Trainer { model = model, loss = nn.mse, seed = 1, log = 0,
  optimizer = { "sgd", lr = 0.1 }, batch = { global = 4, micro = 2 } }
local l = trainer.layout
if o.wrong ~= "" and l.tp and l.tp.rank == 1 and l.pp > 1 then
  local p = model:get(o.wrong).weight
  if rille.core.is_placed(p) then rille.no_grad(function() p:mul_(1.25) end) end
end
local data = rille.data.batch { rille.randn(4, 6), rille.randn(4, 6) }
for _ = 1, 5 do trainer:step(data) end
LUA
says 'a wrong part of tp rank 1: it is named' 1 'NOT equal
step 1, microbatch from sample 0, unit 0: what 0 \(tp rank 1\) gives differs
tp=2 pp=2: 0F0 on rank' \
  "$rille" verify "$work/cut.lua" --a 'tp=2' --b 'tp=2 pp=2' --wrong 0
says 'the same, to rounding' 1 'NOT equal to rounding
step 1: .*NOT equal$' \
  "$rille" verify "$work/cut.lua" --a 'pp=1' --b 'tp=2 pp=2' --wrong 0
for b in pp dp; do
  says "no step: nothing can be compared, $b" 1 'nothing can be compared' \
    "$rille" verify "$work/loop.lua" --a 'pp=1' --b "$b=2" --count 0
done
says '--split takes the same words' 0 '' \
  "$rille" -n 2 "$work/loop.lua" --pp 2 --split '1, 1' --count 1

# A unit's running mean goes into what it gives, and samples beyond a microbatch are refused.
cat >"$work/buffer.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
print(arg[0])
local Unit = nn.class "Unit"
function Unit:init()
  self.linear = nn.Linear { 6, 6 }
  self:buffer("mean", rille.zeros { 6 })
end
function Unit:forward(x)
  assert(x:size(0) <= 2, "more than a microbatch")
  local y = self.linear(x)
  local now = y:detach():mean(0):keep()
  self:update_buffer("mean", function(old) return old * 0.9 + now * 0.1 end)
  return y - self.mean
end
local data = rille.data.batch { rille.randn(8, 6), rille.randn(8, 6) }
local trainer = rille.Trainer { model = nn.Sequential { Unit(), Unit(), Unit() }, loss = nn.mse,
  optimizer = { "sgd", lr = 0.1 }, batch = { global = 8, micro = 2 }, seed = 1, log = 0,
  example = { data[1], data[2] } }
for _ = 1, 5 do trainer:step(data) end
LUA
says 'split by time: measuring a model with a running mean changes nothing' 0 'equal bit for bit: 3 steps' \
  "$rille" verify "$work/buffer.lua" --a 'pp=1' --b 'pp=2 split=time'
echo 'error [[boom]]' >"$work/bad.lua"
says 'a script that fails: its words' 1 'bad.lua:1: boom' \
  "$rille" verify "$work/bad.lua" --a pp=1 --b pp=1
says 'a layout that is none: exit code 2' 2 'must be dp=, tp=, pp=' \
  "$rille" verify "$work/net.lua" --a 'pp=1' --b 'px=2'
says 'one layout: exit code 2' 2 'two layouts are needed' "$rille" verify "$work/net.lua" --a pp=1
left=$(find "$TMPDIR" -maxdepth 1 -name 'tmp.*')
if [ -z "$left" ]; then echo 'ok no run leaves its folder'; else
  echo "not ok no run leaves its folder: $left"
  failed=1
fi
exit "$failed"
