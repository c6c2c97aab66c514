#!/bin/sh
# Checkpoints of several ranks that are interrupted, mixed up, damaged and pruned; stops; and what a
# run says before it starts rather than after it.
set -u # without -e: the status of a condition is what is tested
. tests/pipeline_ranks.sh
if ! ls "$build"/rille_mpi_*.so >/dev/null 2>&1; then
  echo 'skipped: there is no MPI' && echo '0 passed, 0 failed, 1 skipped'
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rille=$(pwd)/$build/rille
script=$(pwd)/tests/shards_run.lua
gpt=$(pwd)/scripts/train_gpt.lua
cd "$work" || exit 1
failed=0

ok() { # ok CLAIM STATUS: the status of the last command decides
  if [ "$2" -eq 0 ]; then echo "ok $1"; else echo "not ok $1" && cat out && failed=1; fi
}
run() { # run N ARGUMENT...
  ranks=$1 && shift
  status=0
  timeout 30 "$rille" -n "$ranks" "$script" --pp "$ranks" "$@" >out 2>&1 || status=$?
}
value() { sed -n "s/^$1 //p" out; }
files() { (cd "$1" && echo checkpoint*); }

run 2 --save-every 2 --out one && first=$(value fingerprint)
run 2 --save-every 2 --out other --lr 0.1 && second=$(value fingerprint)
[ -n "$first" ] && [ -n "$second" ] && [ "$first" != "$second" ]
ok 'two runs of two ranks' $?

# fails PART STEPS: whether a second run into the directory that fails at each system call of the
# writer of PART leaves one whole checkpoint and nothing else. Counts.
tried=0
fails() {
  for nth in $(seq 40); do
    rm -rf again && cp -r one again && before=$(files again)
    RILLE_FAULT_WRITE="$1:$nth" run 2 --out again --lr 0.1 --steps "$2" --save-every "$2"
    [ "$status" -eq 0 ] && [ "$nth" -gt 4 ] && return
    tried=$((tried + 1))
    [ $status -eq 1 ] && grep -q 'No space left' out || return
    if grep -q 'what this save had written is removed' out; then want=$first
      [ "$(files again)" = "$before" ] || return
    else want=$second
      grep -q 'are in place, whole' out || return
      [ "$(files again | wc -w)" -le 6 ] || return # where the folder is not synced, old ones too
    fi
    if ls again/*.tmp* >/dev/null 2>&1; then return 1; fi
    run 2 --out again --resume again
    [ $status -eq 0 ] && [ "$(value loaded)" = "$want" ] || return
  done
  return 1
}
fails 00002-of 2 && fails index.json 2 && fails checkpoint.json 2
ok "a second run into a directory fails at any write ($tried tried): one whole checkpoint stays" $?
rm -rf again && cp -r one again && before=$(files again)
RILLE_FAULT_WRITE=checkpoint.json:1 run 2 --out again --lr 0.1 --steps 1 --save-every 1
[ "$status" -eq 1 ] && [ "$(files again)" = "$before" ]
ok 'the pointer of a save of another step fails: no file of that save stays' $?

rm -rf again && cp -r one again
run 2 --save-every 2 --out again --lr 0.1
[ $status -eq 0 ] && [ "$(files again | wc -w)" -eq 4 ]
ok 'a save of the same name takes the place of the older one: no file of it stays' $?

rm -rf mixed && cp -r one mixed
cp other/checkpoint-*-00002-of-00002.safetensors mixed/"$(cd one && echo checkpoint-*-00002-of-*)"
run 2 --out mixed --resume mixed
[ $status -eq 1 ] && grep -q 'of the 2 files that it names, 1 are of the save that wrote it' out
ok 'files of two saves under one index are refused' $?
for n in 1 2; do
  part=$(echo one/checkpoint-*-00002-of-00002.safetensors)
  run $n --out part --resume "$part"
  [ $status -eq 1 ] && ! grep -q damaged out && grep -q "file 2 of the 2 of a checkpoint" out &&
    grep -q 'hint: resume from one/checkpoint-00000002.safetensors.index.json' out
  ok "one file of several is refused as what it is, with the name that resumes ($n ranks)" $?
done
cp "$part" renamed.safetensors && run 1 --out part --resume renamed.safetensors
[ $status -eq 1 ] && grep -q 'file 2 of a checkpoint of several' out && grep -q 'index.json that names' out
ok '... also under another name' $?

"$rille" "$script" --out alone --save-every 2 >out 2>&1
cat >forge.lua <<'LUA'
local path = "alone/checkpoint-00000002.safetensors"
local tensors, metadata = rille.load(path)
local t = tensors["model.2.weight"]
t[1][1] = t[1][1] + 1
local digests = rille.core.json_decode(metadata["rille.digests.1"])
digests["model.2.weight"] = ("%016x"):format(rille.core.digest(t, 0))
metadata["rille.digests.1"] = rille.core.json_encode(digests)
rille.save(path, tensors, metadata)
LUA
sed -i '1i local rille = require "rille"' forge.lua
"$rille" forge.lua >out 2>&1
for n in 1 2; do
  run $n --out alone --resume alone
  [ $status -eq 1 ] && grep -q 'damaged: its weights have the fingerprint' out
  ok "weights that are not those of the record are refused ($n ranks)" $?
done

for n in 1 2; do
  rm -rf kept
  run $n --out kept --save-every 1 --steps 4
  run $n --out kept --save-every 1 --steps 6 --resume kept
  [ $status -eq 0 ] && [ "$(files kept | wc -w)" -eq $((n == 1 ? 3 : 7)) ] &&
    ! files kept | grep -q '0000000[1-4]'
  ok "after a resume the checkpoints of before it are pruned ($n ranks)" $?
done
before=$(files kept)
run 2 --out elsewhere --save-every 1 --keep 1 --steps 8 --resume kept
[ $status -eq 0 ] && [ "$(files kept)" = "$before" ] && [ "$(files elsewhere | wc -w)" -eq 4 ]
ok 'what is resumed from another directory stays there' $?

"$rille" -n 2 "$script" --pp 2 --out stopped --steps 5000 --pause 0.01 >out 2>&1 &
pid=$!
for _ in $(seq 200); do
  if [ -e stopped/metrics.jsonl ]; then break; fi
  sleep 0.05
done
sleep 0.3
kill -s USR1 $pid
status=0 && wait $pid || status=$?
at=$(sed -n 's/^SIGUSR1: stopped after step \([0-9]*\).*/\1/p' out)
[ $status -eq 75 ] && [ ! -e stopped/metrics-1.jsonl ] && [ "$(wc -l <stopped/metrics.jsonl)" -eq "$at" ]
ok 'SIGUSR1 on two ranks: exit 75, and a line for each step in one file' $?

touch plain
for path in nowhere/x.svg plain/x.svg .; do
  run 2 --out line --timeline $path
  [ $status -eq 2 ] && grep -q "the timeline cannot be written to $path: " out && [ ! -e line ]
  ok "--timeline $path: refused before the first step" $?
done
run 2 --out fresh --timeline fresh/x.svg
[ $status -eq 0 ] && [ -e fresh/metrics.jsonl ]
ok '--timeline in the folder of --out, which is yet to be made' $?
run 1 --timeline x.svg
[ $status -eq 0 ] && grep -q '^no pipeline' out
ok 'without a pipeline there is no timeline: known before the first step' $?
seq 2000 >text
small="--text text --layers 1 --heads 1 --d 8 --T 8 --steps 1 --sample 1 --eval-batches 1"
# shellcheck disable=SC2086
"$rille" "$gpt" $small --timeline nowhere/x.svg >out 2>&1
[ $? -eq 2 ] && grep -q 'cannot be written to nowhere/x.svg' out && ! grep -q '^step 1' out
ok 'train_gpt: a timeline that cannot be written is refused at the start' $?
# shellcheck disable=SC2086
"$rille" "$gpt" $small --timeline x.svg >out 2>&1 && [ "$(grep -n '^no pipeline, no timeline' out | cut -d: -f1)" = 1 ]
ok 'train_gpt: no pipeline, no timeline, said first' $?

here=$OLDPWD
mkdir state && (cd "$here" && timeout 240 "$rille" -n 4 tests/state_ranks.lua "$work/state") >out 2>&1
ok "checkpoints and exports of layouts that cut parameters ($(tail -n 1 out))" $?
text="--text text --layers 2 --heads 2 --d 16 --T 8 --steps 1 --sample 0 --eval-batches 1 --log 0"
# shellcheck disable=SC2086
"$rille" -n 4 "$gpt" $text --tp 2 --pp 2 --export four.safetensors >out 2>&1 &&
  "$rille" "$gpt" $text --export one.safetensors >>out 2>&1
cat >same.lua <<'LUA'
local rille = require "rille"
local a, b = rille.load "four.safetensors", rille.load "one.safetensors"
for name, x in pairs(a) do assert((x - b[name]):abs():max():item() < 1e-5, name) b[name] = nil end
assert(next(a) and not next(b))
LUA
"$rille" same.lua >>out 2>&1
ok 'train_gpt --export: the same file from four ranks and from one' $?
for nth in 1 2 9 20 40; do
  # shellcheck disable=SC2086
  RILLE_FAULT_WRITE="full.safetensors:$nth" "$rille" -n 4 "$gpt" $text --tp 2 --export full.safetensors >out 2>&1
  [ $? -eq 1 ] && grep -q 'No space left' out && ! ls full.safetensors* >/dev/null 2>&1 || break
done && [ "$nth" -eq 40 ]
ok 'an export to a full disk: fails on all ranks, and leaves nothing' $?
# shellcheck disable=SC2086
"$rille" "$gpt" $small --export nowhere/x >out 2>&1
[ $? -eq 2 ] && grep -q 'the export cannot be written to nowhere/x' out && ! grep -q '^step 1' out
ok 'train_gpt: an export that cannot be written is refused at the start' $?

"$rille" "$script" --memory >out 2>&1 && whole=$(value limit)
"$rille" -n 4 "$script" --memory >out 2>&1 && share=$(value limit)
[ "$whole" -gt 0 ] && [ "$share" -eq "$((whole / 4))" ]
ok 'four ranks on a machine: each may have a quarter of its memory' $?
exit $failed
