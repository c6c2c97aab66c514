#!/bin/sh
# Runs of a training script: resumed, stopped, killed, failing. What a user keeps and what they see.
set -u # without -e: the status of a condition is what is tested
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rille=$(pwd)/$BUILD/rille
script=$(pwd)/tests/small_run.lua
cd "$work" || exit 1

ok() { # ok CLAIM STATUS: the status of the last command decides
  if [ "$2" -eq 0 ]; then echo "ok $1"; else echo "not ok $1" && cat out 2>/dev/null; fi
}
run() { "$rille" "$script" "$@" >out 2>&1; }
run_status() { status=0 && run "$@" || status=$?; }
fingerprint() { sed -n 's/^fingerprint //p' out; }
wait_for() { # wait_for FILE: until it is there
  for _ in $(seq 200); do
    if [ -e "$1" ]; then return; fi
    sleep 0.05
  done
}

run --out whole && whole=$(fingerprint)
run --out parts --steps 10
run --out parts --steps 20 --resume
[ "$(fingerprint)" = "$whole" ] && grep -q 'resumed at step 10' out
ok '10 steps, resume, 10 steps: the bits of 20 steps' $?

lua5.4 - <<'LUA' >out 2>&1
local function losses(path)
  local list = {}
  for line in io.lines(path) do
    list[#list + 1] = line:match('"step":(%d+)') .. " " .. line:match('"loss":([^,}]+)')
  end
  return list
end
local a, b = losses("whole/metrics.jsonl"), losses("parts/metrics.jsonl")
assert(#a == 20 and #b == 20, #a .. " and " .. #b .. " lines")
for i = 1, 20 do assert(a[i] == b[i], a[i] .. " / " .. b[i]) end
LUA
ok 'the metrics of both are the same, a line a step' $?

run --out cut --steps 18 # the last checkpoint is of step 15
run --out cut --steps 20 --resume
[ "$(fingerprint)" = "$whole" ] && [ "$(wc -l <cut/metrics.jsonl)" -eq 20 ]
ok 'on resume the metrics are cut back to the resumed step' $?

for signal in TERM USR1; do
  rm -rf stopped
  "$rille" "$script" --out stopped --pause 0.1 --every 1000 >out 2>&1 &
  pid=$!
  wait_for stopped/metrics.jsonl
  sleep 0.4
  kill -s $signal $pid
  status=0 && wait $pid || status=$?
  [ $status -eq 75 ] && grep -q "SIG$signal: stopped after step" out
  ok "SIG$signal: a checkpoint and exit 75" $?
  run --out stopped --resume
  [ "$(fingerprint)" = "$whole" ]
  ok "after SIG$signal, resume gives the bits of an unbroken run" $?
done

rm -rf killed
"$rille" "$script" --out killed --pause 0.05 --every 1 --steps 1000 >out 2>&1 &
pid=$!
wait_for killed/checkpoint.json
sleep 1
kill -s KILL $pid
wait $pid 2>/dev/null || true
at=$(sed -n 's/.*"step":\([0-9]*\).*/\1/p' killed/checkpoint.json)
run --out killed --resume --steps "$((at + 1))"
grep -q "resumed at step $at" out
ok 'kill -9: the last checkpoint is usable' $?

# Every n-th system call of the checkpoint's writer fails, as on a full disk.
run --out full --steps 10
n=1
failures=0
while [ $n -lt 40 ]; do
  status=0
  RILLE_FAULT_WRITE=checkpoint:$n "$rille" "$script" --out full --steps 20 --resume >out 2>&1 ||
    status=$?
  if [ $status -eq 0 ]; then break; fi
  failures=$((failures + 1))
  if [ $status -ne 1 ] || ! grep -q 'full/checkpoint' out; then break; fi
  if ls full/*.tmp* >/dev/null 2>&1; then break; fi
  run --out full --steps 10 --resume || break
  n=$((n + 1))
done
[ $failures -ge 4 ] && [ "$status" -eq 0 ] && [ "$(fingerprint)" = "$whole" ]
ok "a full disk at any write of a checkpoint ($failures tried): an error by file name, the old one stays" $?

run_status --out nan --nan-at 7
[ $status -eq 3 ] && grep -q 'step 7: the loss is' out && grep -q 'that of up (Linear)' out
ok 'a loss that is not finite: exit 3, with step and first layer' $?

run_status --out hog --hog
[ $status -eq 1 ] && grep -q 'out of memory' out && grep -q 'small_run.lua:' out
ok 'out of memory: exit 1, with kind and script line' $?

run_status --out none --resume
[ $status -eq 1 ] && grep -q 'none' out
ok 'resume without a checkpoint names what is missing' $?

mkdir short
head -c -100 whole/checkpoint-00000020.safetensors >short/checkpoint-00000020.safetensors
cp whole/checkpoint.json short
run_status --out short --resume
[ $status -eq 1 ] && grep -q 'short/checkpoint-00000020.safetensors' out
ok 'a truncated checkpoint is refused by name' $?

run --out damaged
lua5.4 - <<'LUA'
local path = "damaged/checkpoint-00000020.safetensors"
local f = assert(io.open(path, "r+b"))
f:seek("end", -40) -- within the optimizer's state
local byte = f:read(1):byte()
f:seek("end", -40)
f:write(string.char(byte ~ 1))
f:close()
LUA
run_status --out damaged --steps 30 --resume
[ $status -eq 1 ] && grep -q 'damaged/checkpoint-00000020.safetensors is damaged' out
ok 'one changed bit in the optimizer state of a checkpoint is noticed' $?

run_status --stepps 3
[ $status -eq 2 ] && grep -q 'did you mean' out
ok 'an unknown option: exit 2, with the nearest name' $?

run --out whole --resume --steps 10
grep -q 'the checkpoint is at step 20; nothing left to do of 10' out && [ "$(fingerprint)" = "$whole" ]
ok 'resume past the end says that nothing is left to do' $?

mkdir empty
run_status --out empty --resume
[ $status -eq 1 ] && grep -q 'the directory empty has no checkpoint.json' out
ok 'resume from a directory without a checkpoint says what is expected there' $?

run_status --out other --every -1
[ $status -eq 2 ] && grep -q 'every must be an integer from 0 on, got -1' out && [ ! -e other ]
ok 'an option that the trainer refuses: exit 2, before anything is written' $?

# shellcheck disable=SC2016  # the inner shell's variable
"$rille" -e 'local n = rille.nn.Linear { 2, 2 }
local t = rille.Trainer { model = n, loss = rille.nn.mse, optimizer = "sgd", batch = { 2 }, log = 0 }
local x = rille.ones(2, 2)
for _, batch in t:steps(rille.data.fixed { x, x }, 1) do t:step(batch) end
os.execute("kill -TERM $PPID")
print "alive"' >out 2>&1
[ $? -eq 143 ] && ! grep -q alive out
ok 'after the loop SIGTERM does again what it did before' $?

# As where another rank has heard of it first, and the launcher's signal comes while this one stops.
# shellcheck disable=SC2016  # the inner shell's variable
"$rille" -e 'local checkpoint = require "rille.checkpoint"
local stop = checkpoint.stop
checkpoint.stop = function(...) os.execute("kill -TERM $PPID") return stop(...) end
local n = rille.nn.Linear { 2, 2 }
local t = rille.Trainer { model = n, loss = rille.nn.mse, optimizer = "sgd", batch = { 2 }, log = 0,
  out = "again" }
local x = rille.ones(2, 2)
for _, batch in t:steps(rille.data.fixed { x, x }, 9) do
  t:step(batch)
  os.execute("kill -TERM $PPID")
end' >out 2>&1
[ $? -eq 75 ] && [ -e again/checkpoint.json ]
ok 'a second SIGTERM while a run stops changes nothing: 75' $?
