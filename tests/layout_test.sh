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

cat >"$work/slow.lua" <<'LUA'
local rille = require "rille"
local nn = rille.nn
local model = nn.Sequential { nn.Linear { 64, 64 }, nn.Linear { 64, 64 }, nn.Linear { 64, 64 } }
local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = { "sgd", lr = 0.1 },
  batch = { global = 64, micro = 16 }, parallel = { pp = 3 }, out = arg[1], log = 20 }
local x = rille.randn(64, 64)
for _ in trainer:steps({ batch = function() return { x, x } end }, 20) do trainer:step { x, x } end
LUA
RILLE_FAKE_SLOW=1:30 "$rille" -n 3 "$work/slow.lua" "$work/run" >"$work/said" 2>&1 || status=$?
last=$(tail -n 1 "$work/run/metrics.jsonl")
if grep -q '^rank 1 of the pipeline stays slow' "$work/said" &&
  echo "$last" | grep -q '"late_rank":1,' && echo "$last" | grep -q '"pipeline":"1f1b","pp":3'; then
  echo 'ok a rank that stays slow is named on the terminal and in metrics.jsonl'
else
  echo 'not ok a rank that stays slow is named on the terminal and in metrics.jsonl'
  cat "$work/said"
  echo "$last"
fi
exit "$status"
