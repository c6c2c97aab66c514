#!/bin/sh
# Under Slurm: srun's ranks against one process, uses that cannot work, and scripts/train.sbatch
# stopped, requeued and resumed. Starts the daemons of a cluster of this one machine for itself.
# shellcheck disable=SC2317  # functions that trap and within call
set -eu
build=${BUILD:-build/release} failed=0
PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd srun sbatch; do
  if ! command -v $program >/dev/null; then
    echo "skipped: no slurm ($program of slurm-wlm, munge)"
    exit 0
  fi
done
. tests/launchers.sh
if [ -z "$impls" ]; then exit 0; fi
rille=$build/rille
# A socket's path is short; the user whom Slurm runs jobs as enters it.
work=$(mktemp -d)
log=$work/log pids=''

stop() {
  scancel --user="$(id -un)" 2>/dev/null || true
  sleep 2
  for pid in $pids; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" || true
  done
  rm -rf "$work"
}
trap stop EXIT
trap 'exit 1' INT TERM

# ---- a cluster: four CPUs, whatever there are

export SLURM_CONF="$work/slurm.conf"
host=$(hostname -s) port=$((20000 + $$ % 20000 * 2))
mkdir -m 700 "$work/state" "$work/spool" "$work/munge"
head -c 128 /dev/urandom >"$work/munge/key"
chmod 400 "$work/munge/key"
chmod 755 "$work"
cat >"$SLURM_CONF" <<CONF
ClusterName=rille
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthInfo=socket=$work/munge/socket,cred_expire=5
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=5
MailProg=/bin/true
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF

# begin COMMAND...: a daemon, for as long as the test lasts.
begin() {
  "$@" >>"$work/daemons" 2>&1 &
  pids="$! $pids"
}
begin munged -F --force --key-file="$work/munge/key" --socket="$work/munge/socket" \
  --pid-file="$work/munge/pid" --log-file="$work/munge/log" --seed-file="$work/munge/seed"
begin slurmctld -D -f "$SLURM_CONF"
begin slurmd -D -f "$SLURM_CONF" -N "$host"

# within SECONDS COMMAND...: until it succeeds.
within() {
  end=$(($(date +%s) + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    if [ "$(date +%s)" -ge $end ]; then return 1; fi
    sleep 0.5
  done
}
is_up() { [ "$(sinfo -h -o %t)" = idle ]; }
if within 60 is_up; then echo "ok Slurm runs here"; else
  echo "not ok Slurm runs here" && cat "$work/daemons"
  exit 1
fi

# ---- srun

cp README.md "$work/text" # what is prepared from it is kept beside it
train() { # train OUT: the arguments of a small run
  echo scripts/train_gpt.lua --text "$work/text" --layers 2 --d 32 --heads 2 --T 32 --global 8 \
    --micro 2 --log 1 --sample 0 --eval-every 0 --out "$1"
}
losses() { sed -n 's/.*"step":\([0-9]*\).*"loss":\([^,}]*\).*/\1 \2/p' "$1/metrics.jsonl"; }
same_losses() { # same_losses CLAIM OUT OUT STEPS
  losses "$2" >"$work/a" && losses "$3" >"$work/b"
  if [ "$(wc -l <"$work/a")" -eq "$4" ] && cmp -s "$work/a" "$work/b"; then echo "ok $1"; else
    echo "not ok $1" && diff "$work/a" "$work/b"
    failed=1
  fi
}

# shellcheck disable=SC2046  # a list of words
job 'one process' 0 'step 5/5' "$rille" $(train "$work/one") --steps 5
online=$(getconf _NPROCESSORS_ONLN)
for impl in $impls; do
  case $impl in openmpi) mpi=pmix ;; mpich) mpi=pmi2 ;; esac
  # shellcheck disable=SC2046
  job "$mpi: a pipeline of 2 ranks" 0 'layout: .* pp 2' \
    srun -n 2 --mpi="$mpi" "$rille" $(train "$work/$mpi") --steps 5 --pp 2
  same_losses "$mpi: the losses of one process" "$work/one" "$work/$mpi" 5
  job "$mpi: info says who started the ranks" 0 "4 on 1 node, started by srun --mpi=$mpi" \
    srun -n 4 --mpi="$mpi" "$rille" info --pp 2
  each=$((online < 8 ? 1 : online / 4))
  also "$mpi: ranks share the cores of their machine" 4 "^ +[0-3] .* $each +[0-9]+  pp [01] dp [01]"
done
job 'srun without an MPI is explained' 1 'srun --mpi=pmix for Open MPI' \
  srun -n 2 "$rille" -e 'print("ran")'
also 'once' 1 '^rille: '
also 'and nothing runs' 0 '^ran'
job 'srun without an MPI: one task is one process' 0 '^1$' srun -n 1 "$rille" -e 'return rille.core.world'

# ---- a job that outlives its time limit

state_is() { scontrol show job "$id" | grep -q "JobState=$1"; }
has_steps() { [ -e "$1/metrics.jsonl" ] && [ "$(wc -l <"$1/metrics.jsonl")" -ge 3 ]; }
case $impls in *openmpi*) RILLE_SRUN_MPI=pmix ;; *) RILLE_SRUN_MPI=pmi2 ;; esac
export RILLE_SRUN_MPI
PATH=$(cd "$build" && pwd):$PATH
steps=400
# shellcheck disable=SC2046
"$rille" $(train "$work/whole") --steps $steps >"$log" 2>&1
# shellcheck disable=SC2046
id=$(sbatch --parsable --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --time=10 \
  --output="$work/job" scripts/train.sbatch $(train "$work/cut") --steps $steps --pp 2)
within 60 has_steps "$work/cut" || true
scancel --signal=USR1 "$id"
within 200 state_is COMPLETED || { failed=1 && scontrol show job "$id"; }
cp "$work/job" "$log"
also 'train.sbatch: stopped by USR1, with a checkpoint' 1 'SIGUSR1: stopped after step'
also 'train.sbatch: queued again, it resumes' 1 '^resumed at step [1-9]'
same_losses 'train.sbatch: the losses of an unbroken run' "$work/whole" "$work/cut" $steps
exit $failed
