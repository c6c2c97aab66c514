#!/bin/sh
# The tests of pipelines are tested: each patch of tests/mutants/ breaks something, and the test that
# it names must fail. Its "# run:" line is the number of ranks, a script, and maybe a word of a claim.
# Usage: mutants_full.sh [NAME...]: "drop_send", "skip_*"; without names all.
set -eu
build=${BUILD:-build/release}
config=${build#build/}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
export RILLE_WAIT=passive RILLE_THREADS=1
if ! ls "$build"/rille_mpi_*.so >/dev/null 2>&1; then
  echo 'skipped: there is no MPI'
  exit 0
fi
here=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/build"
cp -a "$build" "$work/build/"
cp -a Makefile core ops parallel lua models scripts tests "$work/"
cd "$work"
failed=0

# Without a mutant the same tests pass: tests/pipeline_*_test.sh.
if [ $# -eq 0 ]; then set -- '*'; fi
for wanted; do
  shift
  # shellcheck disable=SC2086  # a pattern
  set -- "$@" "$here"/tests/mutants/$wanted.patch
done
for mutant; do
  name=$(basename "$mutant" .patch)
  if ! git apply -C1 "$mutant" >log 2>&1; then
    failed=1
    echo "not ok $name: the patch does not apply" && cat log
    continue
  fi
  if ! make -s -j2 "CONFIG=$config" all >log 2>&1; then
    failed=1
    echo "not ok $name: does not build" && cat log
  else
    # shellcheck disable=SC2046  # words
    set -- $(sed -n 's/^# run: //p' "$mutant")
    ranks=$1
    shift
    status=0
    timeout 280 "$build/rille" -n "$ranks" "$@" >log 2>&1 || status=$?
    if [ $status -eq 0 ] || ! grep -q 'not ok' log; then
      failed=1
      echo "not ok $name: no test noticed it (exit code $status)" && tail -n 5 log
    else
      echo "ok $name is noticed: $(grep -m 1 -E 'not ok|rille: rank|rank [0-9]+:' log | cut -c 1-150)"
    fi
  fi
  git apply -R -C1 "$mutant"
done
exit $failed
