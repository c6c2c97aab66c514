#!/bin/sh
# layouts over two ranks: tests/layout_ranks.lua, and what a run says of a rank that is slow.
set -eu
rille=$BUILD/rille
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
"$rille" -n 2 tests/layout_ranks.lua "$work" >"$work/out" 2>&1 || status=$?
grep -v '^[0-9]* passed' "$work/out" || true
[ "$status" -eq 0 ] || echo "not ok layout_ranks.lua: exit code $status"

# A unit at the end of a stage that gives what cannot go to the next one.
cat >"$work/gives.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local Odd = nn.class "Odd"
function Odd:init() self.up = nn.Linear { 2, 2 } end
function Odd:forward(x)
  if arg[1] == "string" then return "text" end
  local list = {}
  for i = 1, 17 do list[i] = self.up(x) end
  return table.unpack(list)
end
local x = rille.randn(4, 2)
local trainer = rille.Trainer { model = nn.Sequential { Odd(), nn.Linear { 2, 2 } }, loss = nn.mse,
  optimizer = { "sgd", lr = 0.1 }, batch = { global = 4, micro = 2 }, parallel = { pp = 2 } }
trainer:step { x, x }
LUA
gives() { # gives WHAT WORDS
  if "$rille" -n 2 "$work/gives.lua" "$1" 2>&1 | grep -q "$2"; then
    echo "ok a unit that gives $1 is named"
  else
    echo "not ok a unit that gives $1 is named" && status=1
  fi
}
gives string ': unit 0 gave a string to stage 1: only tensors and nil go'
gives many ': unit 0 gave 17 tensors to stage 1 .*, at most 16 are possible'

# A schedule of one's own whose stages finish in another order with another number of microbatches.
cat >"$work/uneven.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local turns = rille.schedule { name = "turns", placement = { 0, 1, 0, 1 }, stages_per_rank = 2,
  order = function(r, _, m)
    local list, a, b = {}, r, r + 2
    local function add(stage, kind)
      for i = 0, m - 1 do list[#list + 1] = stage .. kind .. i end
    end
    add(a, "F") add(b, "F") add(b, "I") add(a, "I")
    add(m % 2 == 0 and b or a, "W")
    add(m % 2 == 0 and a or b, "W")
    return list
  end }
local function loss_of(parallel, n, micro)
  rille.manual_seed(1)
  local x, r = rille.randn(n, 6), nil
  local model = nn.Sequential { nn.Linear { 6, 5 }, nn.Linear { 5, 7 }, nn.Linear { 7, 9 },
    nn.Linear { 9, 6 } }
  local trainer = rille.Trainer { model = model, loss = nn.mse, seed = 1, parallel = parallel,
    optimizer = { "sgd", lr = 0.1 }, batch = { global = n, micro = micro } }
  for _ = 1, 3 do r = trainer:step { x, x } end
  return r.loss
end
for _, case in ipairs { { 3, 1 }, { 5, 3 } } do -- 2 and 1 microbatches; 1 and 1, a share below micro
  local alone = rille.core.comm_world():split(rille.core.rank, 0)
  local a = loss_of({ pp = 2, dp = 2, pipeline = turns }, case[1], case[2])
  local b = loss_of({ comm = alone }, case[1], case[2])
  if math.abs(a - b) > 1e-6 then print(("%.9g against %.9g"):format(a, b)) end
end
print "equal"
LUA
said=$("$rille" -n 4 "$work/uneven.lua" 2>&1) || status=$?
if [ "$said" = equal ]; then echo 'ok replicas with another number of microbatches reduce in one order'; else
  echo "not ok replicas with another number of microbatches reduce in one order: $said"
fi

cat >"$work/caught.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local model = nn.Sequential { nn.Linear { 4, 4 }, nn.Linear { 4, 4 } }
model:on("0", function() if rille.core.place().step == 2 then error("broken", 0) end end)
local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = "sgd",
  batch = { 4, 2 }, parallel = { pp = 2 } }
local x = rille.randn(4, 4)
while true do pcall(trainer.step, trainer, { x, x }) end
LUA
code=0
said=$(timeout 60 "$rille" -n 2 "$work/caught.lua" 2>&1) || code=$?
if [ "$code" -eq 1 ] && echo "$said" | grep -q 'let the error end the run'; then
  echo 'ok a loop that catches the error of a step is ended'
else
  echo "not ok a loop that catches the error of a step is ended: exit code $code, $said"
fi

cat >"$work/leaves.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local model = nn.Sequential { nn.Linear { 4, 8, tp = "column" }, nn.Linear { 8, 4, tp = "row" } }
local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = { "sgd", lr = 0.1 },
  batch = { global = 4, micro = 2 }, parallel = { tp = 2 }, log = 0 }
local x = rille.ones(4, 4)
trainer:step { x, x }
if rille.core.comm_world():rank() == 1 then os.exit(0) end
trainer:step { x, x }
LUA
code=0
said=$(timeout 60 "$rille" -n 2 "$work/leaves.lua" 2>&1) || code=$?
if [ "$code" -eq 1 ] && echo "$said" | grep -q 'rank 1 has left the script' &&
  ! echo "$said" | grep -q 'other gradients'; then
  echo 'ok a rank that leaves while tp ranks compare their weights is said to have left, and no more'
else
  echo "not ok a rank that leaves while tp ranks compare their weights: exit code $code, $said"
fi

cat >"$work/slow.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local model = nn.Sequential { nn.Linear { 128, 128 }, nn.Linear { 128, 128 }, nn.Linear { 128, 128 } }
local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = { "sgd", lr = 0.1 },
  batch = { global = 64, micro = 16 }, parallel = { pp = 3 }, out = arg[1], log = 20 }
local x = rille.randn(64, 128)
for _ in trainer:steps({ batch = function() return { x, x } end }, 60) do trainer:step { x, x } end
LUA
RILLE_FAKE_CLOCK=1:5 RILLE_FAKE_SLOW=1:20 "$rille" -n 3 "$work/slow.lua" "$work/run" >"$work/said" 2>&1 || status=$?
late=$(grep -c '"late_rank":1,.*"pipeline":"1f1b","pp":3' "$work/run/metrics.jsonl" || true)
if grep -q '^rank 1 of the pipeline stays slow' "$work/said" && [ "$late" -ge 40 ]; then
  echo 'ok a rank that stays slow, its clock off by 5 s, is named on the terminal and in metrics.jsonl'
else
  echo 'not ok a rank that stays slow, its clock off by 5 s, is named on the terminal and in metrics.jsonl'
  cat "$work/said"
  echo "late in $late of 60 steps"
fi

# Rank 1 holds nearly all; 0.2 s pass between the steps.
cat >"$work/uneven.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local model = nn.Sequential { nn.Linear { 8, 8 }, nn.Linear { 8, 2048 }, nn.Linear { 2048, 8 } }
local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = { "sgd", lr = 0.1 },
  batch = { global = 8, micro = 4 }, parallel = { pp = 2, split = { 1, 2 } }, out = arg[1], log = 0 }
local data = rille.data.fixed { rille.randn(8, 8), rille.randn(8, 8) }
for _, batch in trainer:steps(data, 4) do
  trainer:step(batch)
  for _ = 1, 20 do trainer:evaluate(data) end
  local till = rille.core.clock() + 0.2
  while rille.core.clock() < till do rille.core.clock() end
end
LUA
"$rille" -n 2 "$work/uneven.lua" "$work/uneven" >"$work/said" 2>&1 || status=$?
lines=$(grep -Ec '"seconds":(0\.[01]|[0-9.]+e-).*"peak":\{"bytes":[0-9]{6,},"rank":1\}' "$work/uneven/metrics.jsonl" || true)
if [ "$lines" -eq 4 ]; then
  echo 'ok a step takes its own time alone, and the highest memory is that of the rank that has it'
else
  status=1
  echo 'not ok a step takes its own time alone, and the highest memory is that of the rank that has it'
  cat "$work/said" "$work/uneven/metrics.jsonl"
fi
exit "$status"
