#!/bin/sh
# The patches of tests/mutants/ still apply; tests/mutants_full.sh runs them.
set -eu
for mutant in tests/mutants/*.patch; do
  if out=$(git apply --check -C1 "$mutant" 2>&1); then
    echo "ok $(basename "$mutant") applies"
  else
    echo "not ok $(basename "$mutant") does not apply: $out"
    failed=1
  fi
done
exit "${failed:-0}"
