#!/bin/sh
# pipeline_ranks - starts a Lua test on several ranks, under the first MPI found: what it prints and
# its exit status are the test's. Sourced.
export RILLE_WAIT=passive RILLE_THREADS=1
build=${BUILD:-build/release}

# ranks N SCRIPT [ARGUMENT...]
ranks() {
  if ! ls "$build"/rille_mpi_*.so >/dev/null 2>&1; then
    echo 'skipped: there is no MPI' && echo '0 passed, 0 failed, 1 skipped'
    return 0
  fi
  n=$1
  shift
  "$build/rille" -n "$n" "$@"
}
