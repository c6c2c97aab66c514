#!/bin/sh
# launchers - for tests of several ranks: which MPIs Rille was built for, and how each is started.
# Sourced by tests that have set $build.
# shellcheck disable=SC2034,SC2154
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
  OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none \
  OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader

# Prints the launcher of an MPI; fails if there is none.
launcher_of() {
  case $1 in
    openmpi) names='mpirun.openmpi mpirun mpiexec' sign='Open MPI' ;;
    mpich) names='mpiexec.mpich mpiexec.hydra mpirun.mpich mpiexec mpirun' sign='HYDRA' ;;
  esac
  for name in $names; do
    if command -v "$name" >/dev/null && "$name" --version 2>/dev/null | grep -q "$sign"; then
      echo "$name"
      return
    fi
  done
  return 1
}

# The MPIs that have a plugin and a launcher here.
impls=''
for impl in openmpi mpich; do
  if [ -e "$build/rille_mpi_$impl.so" ] && launcher_of $impl >/dev/null; then
    impls="$impls $impl"
  else
    echo "skipped: $impl is not here"
  fi
done

# For what comes: the MPI that `rille -n` takes. Leaks are looked for under Open MPI: MPICH has threads
# that a leak checker does not survive.
checked=${ASAN_OPTIONS:-}
choose() {
  export RILLE_MPI="$1" ASAN_OPTIONS="$checked"
  if [ "$1" = mpich ]; then ASAN_OPTIONS="$checked:detect_leaks=0"; fi
}

# job CLAIM CODE WORDS COMMAND...: a job whose exit code and output (both streams) are wanted; WORDS
# may begin with ! for what must not be there. `limit`: seconds it may take. What it wrote is in $log.
limit=30
case $build in *asan*) slow=2 ;; *) slow=1 ;; esac
job() {
  claim=$1 want=$2 words=$3 status=0
  shift 3
  began=$(date +%s%N)
  timeout -k 5 60 "$@" >"$log" 2>&1 </dev/null || status=$?
  ms=$((($(date +%s%N) - began) / 1000000)) fits=0
  case $words in
    !*) grep -Eq -- "${words#!}" "$log" || fits=1 ;;
    *) grep -Eq -- "$words" "$log" && fits=1 ;;
  esac
  if [ $status -eq "$want" ] && [ $fits -eq 1 ] && [ $ms -le $((limit * 1000 * slow)) ]; then
    echo "ok $claim"
  else
    failed=1
    echo "not ok $claim: exit code $status of $want after $ms ms, wanted $words in"
    cat "$log"
  fi
}
# also CLAIM COUNT WORDS: how many lines of the last job's output have the words.
also() {
  n=$(grep -Ec -- "$3" "$log" || true)
  if [ "$n" -eq "$2" ]; then echo "ok $1"; else
    failed=1
    echo "not ok $1: $n lines with $3, not $2, in" && cat "$log"
  fi
}
