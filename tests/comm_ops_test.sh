#!/bin/sh
# The differentiable collectives on 1 to 4 ranks, under every MPI found.
set -eu
build=${BUILD:-build/release}
. tests/launchers.sh
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

# ranks CLAIM N: the claims of tests/comm_ops_ranks.lua on N ranks.
ranks() {
  status=0
  timeout 120 "$build/rille" -n "$2" tests/comm_ops_ranks.lua >"$log" 2>&1 || status=$?
  sed -n "s/^\(ok\|not ok\) /\1 $1: /p" "$log"
  if [ $status -ne 0 ] || ! grep -q '^ok' "$log"; then
    failed=1
    echo "not ok $1: exit code $status" && cat "$log"
  fi
}

sizes='2 3 4'
case $build in *asan*) sizes='2 3' ;; esac # slow there; 4 ranks in the other builds
ranks 'one process' 1
for impl in $impls; do
  choose "$impl"
  for n in $sizes; do ranks "$impl, $n ranks" "$n"; done
  job "$impl: parts of different sizes end the job" 1 '^rille: rank . of 2 .*has not the' \
    "$build/rille" -n 2 tests/comm_ops_ranks.lua sizes
  grep -q caught "$log" || { failed=1 && echo "not ok $impl: the call itself fails" && cat "$log"; }
done
exit $failed
