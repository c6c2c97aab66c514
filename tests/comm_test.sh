#!/bin/sh
# Messages, collectives, groups and meshes on 2 to 8 ranks, under every MPI found.
set -eu
build=${BUILD:-build/release}
. tests/launchers.sh
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

# ranks CLAIM COMMAND...: its "ok" lines count under the claim; a bad exit is a failure.
ranks() {
  claim=$1 status=0
  shift
  timeout 60 "$@" >"$log" 2>&1 || status=$?
  sed -n "s/^\(ok\|not ok\) /\1 $claim: /p" "$log"
  if [ $status -ne 0 ] || ! grep -q '^ok' "$log"; then
    failed=1
    echo "not ok $claim: exit code $status" && cat "$log"
  fi
}

ranks 'one process' "$build/ranks"
for impl in $impls; do
  choose "$impl"
  start=$(launcher_of "$impl")
  for n in 2 3 4 8; do ranks "$impl, $n ranks" "$start" -n $n "$build/ranks"; done
  export RILLE_TEST_PIECE=1000
  ranks "$impl, pieces of 1000 bytes" "$start" -n 3 "$build/ranks"
  unset RILLE_TEST_PIECE
  ranks "$impl" env RILLE_FAKE_CLOCK=1:0.25 "$start" -n 4 "$build/ranks" clock 0.25
  # Rank 1 in a time namespace, whose clock is 100 s ahead: the machine is the same, its clock not.
  if unshare -T --fork --monotonic 100 true 2>/dev/null; then
    # shellcheck disable=SC2016 # for the rank's shell
    ranks "$impl, a time namespace" "$start" -n 2 sh -c 'ahead=
      [ "${OMPI_COMM_WORLD_RANK-}${PMI_RANK-}" = 1 ] && ahead="unshare -T --fork --monotonic 100"
      exec $ahead "$0" clock 100' "$build/ranks"
  else
    echo "skipped: $impl, a time namespace: none can be made here"
  fi
  job "$impl: a claim that does not hold is the exit status" 1 '^not ok clocks' \
    env RILLE_FAKE_CLOCK=1:0.25 "$start" -n 2 "$build/ranks" clock 0.5
  ranks "$impl" env RILLE_FAKE_LINK=20 "$start" -n 2 "$build/ranks" link 20
  ranks "$impl" env RILLE_WAIT=passive "$start" -n 2 "$build/ranks" sleep
  ranks "$impl" env RILLE_FAKE_SLOW=0:1,1:2.5 "$start" -n 2 "$build/ranks" slow 2.5
  ranks "$impl" env RILLE_FAKE_NODE=rank%2 "$start" -n 4 "$build/ranks" node
  for bytes in 16 4; do
    job "$impl: a message of $bytes bytes for 8 ends the job" 1 '^rille: rank 0 of 2 .*has not the 8 bytes' \
      "$start" -n 2 "$build/ranks" wrong-size $bytes
    also "$impl: ... and what is asked for later fails alike" 1 '^ok'
  done
done
exit $failed
