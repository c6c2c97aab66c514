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
