#!/bin/sh
# Starting several ranks: `rille -n`, launchers that do not fit, and `rille info`.
set -eu
build=${BUILD:-build/release} failed=0
. tests/launchers.sh
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
rille=$build/rille

cat >"$work/options.lua" <<'END'
local o = require("rille").options { help = "H.", { "layers", 6, "blocks" } }
print("layers", o.layers)
END

for impl in $impls; do
  choose "$impl"
  on="$RILLE_MPI:"
  for code in 0 1 2 3 75; do
    job "$on the script's exit code $code comes through" $code '!.' "$rille" -n 3 -e "os.exit($code)"
  done
  job "$on an exit code of one rank alone" 3 '!mpi' "$rille" -n 2 -e 'if rille.core.rank == 1 then os.exit(3) end'
  job "$on print is rank 0's" 0 '^a$' "$rille" -n 3 -e 'print("a") rille.print_all("b")'
  also "$on and said once" 1 '^a$'
  also "$on print_all is tagged" 1 '^\[rank 2\] b$'
  job "$on arguments go to every rank" 0 '^\[rank 1\] --x	7$' "$rille" -n 2 -e 'rille.print_all(...)' --x 7
  job "$on standard input is rank 0's" 0 '^hello$' \
    sh -c "echo hello | $rille -n 2 -e 'if rille.core.rank == 0 then return io.read() end'"
  job "$on a wrong option is reported once" 2 'did you mean .--layers' "$rille" -n 4 "$work/options.lua" --layer 7
  also "$on and nothing else is said" 2 .
  job "$on so is one in front of the script" 2 'there is no option --stall' "$rille" -n 2 --stall 3 x.lua
  also "$on ... with its hint, and that all ranks say so" 3 .
  job "$on --help is shown once" 0 '^ *--layers N' "$rille" -n 2 "$work/options.lua" --help
  job "$on the same error on all ranks is one message" 1 '^rille: -e:1: oh$' "$rille" -n 4 -e 'error("oh")'
  also "$on that says so, alone" 2 .
  job "$on a missing script" 2 'there is no script' "$rille" -n 2 "$work/nothing.lua"
  also "$on is one message" 2 .
  job "$on a script's own words stay, rules too" 0 '^==* *$' "$rille" -n 2 -e \
    'if rille.core.rank == 0 then io.stderr:write(("="):rep(50), "\nmine\n", ("-"):rep(50), "\n")
     io.stdout:write("\n", ("="):rep(50), "\nmine\n\n", ("-"):rep(50), "\n") end'
  also "$on all of them" 2 '^-{50}$'
  also "$on and what is between" 2 '^mine$'
  job "$on long output arrives whole" 0 '^20000$' "$rille" -n 2 -e 'for i = 1, 20000 do print(i) end'
  also "$on line by line" 20000 '^[0-9]+$'
  job "$on a layout of another size names the options" 2 'dp 3 x pp 2 makes 6 ranks, but there are 2' \
    "$rille" -n 2 -e 'rille.core.mesh(rille.core.comm_world(), {pp = 2, dp = 3})'
  also "$on and the command that starts them" 1 'hint: start 6 ranks \(rille -n 6 \.\.\.\)'
  job "$on info says who is where" 0 '^ *1 +node1 +[0-9,-]+ +1 +[0-9]+ +pp 0 dp 0 tp 1' \
    env RILLE_FAKE_NODE=rank/1 RILLE_THREADS=1 "$rille" -n 4 info --tp 2 --sequence-parallel --pp 2
  also "$on that a tp group spans nodes" 1 '^warning: tp 2 spans nodes: ranks 0 and 1 .* on node0 and node1'
  job "$on nodes may be named by rank" 0 '^ *1 +b ' env RILLE_FAKE_NODE=0:a,1:b "$rille" -n 2 info
  job "$on an error is none without a failing code" 1 'a table instead of a message' "$rille" -n 2 -e 'error { code = 256 }'
  job "$on verify starts its ranks itself" 2 'leave out mpirun, or -n' "$rille" -n 2 verify x.lua --a pp=1 --b pp=2
  job "$on the prompt is for one process" 2 'the prompt is for one process' "$rille" -n 2 -i
done
choose openmpi
unset RILLE_MPI

job 'one rank needs no launcher' 0 '^1$' env PATH=/nowhere "$rille" -n 1 -e 'return rille.core.world'
job 'a number is wanted' 2 'a number of ranks is wanted' "$rille" -n two x.lua
job 'a script is wanted' 2 'a script is wanted' "$rille" -n 2
job 'no launcher on the PATH' 1 'there is no launcher of .* on the PATH' env PATH=/nowhere "$rille" -n 2 x.lua
cat >"$work/train.lua" <<'END'
local rille = require "rille"
local nn, o = rille.nn, require("rille").options { help = "H.", parallel = true }
rille.Trainer { model = nn.Sequential { nn.Linear { 2, 2 }, nn.Linear { 2, 2 } }, loss = nn.mse,
  optimizer = { "sgd", lr = 0.1 }, batch = { global = 4, micro = 2 }, parallel = o.parallel }
END
echo '1F0,x' >"$work/broken.csv"
refused() { # refused RANKS WORDS OPTION...
  ranks=$1 words=$2
  shift 2
  job "on $ranks ranks, $* is refused" 2 "$words" "$rille" -n "$ranks" "$work/train.lua" "$@"
}
refused 1 'split = "garbage": it must be' --split garbage
refused 1 'split = ",": it must be' --split ,
refused 1 'split = "3,,2": it must be' --split 3,,2
refused 1 'there is no pipeline schedule "1f2b"; did you mean "1f1b"' --pp-schedule 1f2b
refused 1 'stages_per_rank = 2 needs a pipeline: pp is 1' --stages-per-rank 2
if [ -n "$impls" ]; then
  refused 2 'pp 3 makes 3 ranks a copy of the model, but there are 2' --pp 3
  refused 3 'pp 2 makes 2 ranks a copy' --pp 2
  refused 2 'split = \{1, 2\} places 3 units; the model has 2' --pp 2 --split 1,2
  refused 2 'group = 2: only the schedule interleaved' --pp 2 --group 2
  refused 2 'the schedule .*broken.csv: row 0, cell 1' --pp 2 --pp-schedule "$work/broken.csv"
fi
for value in RILLE_MPI=lam RILLE_STALL_TIMEOUT=0 RILLE_STALL_TIMEOUT=0:5 RILLE_STALL_TIMEOUT=3s RILLE_FAKE_SLOW=1:0.5 \
  RILLE_FAKE_CLOCK=a RILLE_FAKE_LINK=-1 RILLE_TEST_PIECE=0; do
  job "$value is refused" 2 "^rille: $value: .* wanted" env "$value" "$rille" -e 'return 1'
done

# A launcher that is not one, as far as MPI knows: as many singletons as it starts.
job 'N singletons are explained by the first' 1 'started 4 ranks, but .* sees 1' \
  env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 "$rille" -e 'print("ran")'
also 'and nothing runs' 0 '^ran'
job 'the others keep silent' 1 '!.' \
  env OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 "$rille" -e 'print("ran")'
job 'srun without an MPI is explained' 1 'srun --mpi=pmix for Open MPI' \
  env SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 "$rille" -e 'print("ran")'
job 'a batch script of Slurm is one process' 0 '^1$' \
  env SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_NTASKS=4 "$rille" -e 'return rille.core.world'
job "Slurm's tasks of a node share its cores" 0 'kernels .* 1 thread$' \
  env SLURM_LOCALID=9 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE='1(x2),100000' "$rille" info
job 'and those of another node do not count' 0 "$("$rille" info | sed -n 's/^kernels.*by/by/p')" \
  env SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE='1(x2),100000' "$rille" info

# A build with one MPI, started by the other.
for impl in $impls; do
  mkdir "$work/$impl"
  cp "$build/rille" "$build/librille.so" "$work/$impl"
  job "$impl without its plugin says what is missing" 1 'the plugin for it cannot be used' \
    "$(launcher_of "$impl")" -n 3 "$work/$impl/rille" -e 'print("ran")'
  also "$impl: once" 1 '^rille: '
  also "$impl: and nothing runs" 0 '^ran'
done
case $impls in *mpich*)
  job 'srun with an MPI that is missing names the other' 1 'srun --mpi=pmi2' \
    env PMIX_RANK=0 SLURM_STEP_NUM_TASKS=3 "$work/mpich/rille" -e 'print("ran")'
  ;;
esac
job 'a build without an MPI says so' 1 'Rille was built without an MPI' "$work/${impls##* }/rille" -n 2 x.lua
if [ "$impls" = ' openmpi mpich' ]; then
  cp "$build/rille_mpi_mpich.so" "$work/openmpi"
  job 'rille -n takes the MPI that was built for' 0 '^\[rank 1\] 2$' \
    "$work/openmpi/rille" -n 2 -e 'rille.print_all(rille.core.world)'
fi

case $impls in *openmpi*)
  mpirun=$(launcher_of openmpi)
  job 'mpirun by hand' 0 '^\[rank 1\] 2$' "$mpirun" -n 2 "$rille" -e 'rille.print_all(rille.core.world)'
  job 'cores that a launcher keeps from the threads' 0 'rank 0 has 2 threads on 1 core, to which' \
    env RILLE_THREADS=2 OMPI_MCA_hwloc_base_binding_policy=core "$mpirun" -n 2 "$rille" info
  also 'with the flag that mends it' 1 'mpirun --bind-to none'
  job 'rille -n inside of mpirun' 2 'this process is a rank already' "$mpirun" -n 2 "$rille" -n 2 x.lua
  ;;
esac
exit $failed
