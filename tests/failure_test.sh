#!/bin/sh
# One rank fails, leaves, is killed or hangs: all end, with the first cause as the message. And what
# signals do.
set -eu
build=${BUILD:-build/release} failed=0
. tests/launchers.sh
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
rille=$build/rille
limit=10

# Rank 1 of 3 does what the first argument says ("all ..": all ranks); the others wait for it.
cat >"$work/one.lua" <<'END'
local rille = require "rille"
local core, what = rille.core, ...
local world = core.comm_world()
local mesh = core.mesh(world, { pp = 3 })
local t = rille.ones(100)
for step = 1, 3 do
  core.doing("step " .. step)
  if what == "caught" then pcall(mesh.all(mesh).all_reduce, mesh:all(), t) else mesh:all():all_reduce(t) end
  if step == 2 and world:rank() == 1 then
    if what == "error" then error("the cause") end
    if what == "memory" then rille.zeros(1 << 20, 1 << 20) end
    if what == "exit" then os.exit(0) end
    if what == "exit 3" then os.exit(3) end
    if what == "end" then return end
    if what == "kill" then os.execute("kill -9 $PPID") end
    if what == "crash" then
      os.execute("kill -SEGV $PPID")
      while true do end -- the thread that got it prints its stack before it dies
    end
    if what == "stop" then os.execute("kill -STOP $PPID") end
    if what == "loop" then while true do end end
    if what == "other" then world:barrier() end
    if what == "size" or what == "caught" then mesh:all():all_reduce(rille.ones(50)) end
    if what == "busy" then
      local till = core.clock() + 6
      while core.clock() < till do t:exp() end
    end
  end
  if what == "pause" and step == 2 then -- all ranks are stopped while two of them wait
    os.execute("P=$PPID; (sleep 0.6; kill -STOP $P; sleep 4; kill -CONT $P) >/dev/null 2>&1 &")
    local till = core.clock() + 1
    while world:rank() == 1 and core.clock() < till do t:exp() end
  end
  if what == "all loop" and step == 2 then while true do end end
  if what == "errors" and step == 2 then error("the cause of rank " .. world:rank()) end
  if what == "ring" and world:rank() ~= 2 then world:split(0, 0) end
end
print("done")
END

# The update of step 3 fails on rank 1 of 2; or a buffer is declared when the trainer has been made,
# which that rank alone uses in a pipeline, and both do as replicas.
cat >"$work/update.lua" <<'END'
local rille = require "rille"
local nn, what, axis, catches = rille.nn, ...
local is_here, step = rille.core.rank == 1, 0
local function fault(of)
  if what == of and is_here and step == 3 then error("the cause", 0) end
end
local Unit = nn.class "Unit"
function Unit:init()
  self.linear = nn.Linear { 4, 4 }
  if what == "buffer" then self:buffer("seen", rille.zeros { 1 }) end
end
function Unit:forward(x)
  if self._buffers.seen then
    self:update_buffer("seen", function(old)
      fault "buffer"
      return old + 1
    end)
  end
  return self.linear(x)
end
local last = Unit()
local function rate()
  fault "advance"
  fault "clip"
  return 1
end
local trainer = rille.Trainer { model = nn.Sequential { nn.Linear { 4, 4 }, last }, loss = nn.mse,
  optimizer = { "sgd", lr = 0.1, clip = what == "clip" and 1 or nil, schedule = rate }, log = 0,
  batch = { 4, 2 }, parallel = { [axis] = 2 } }
if what == "late" then last:buffer("seen", rille.zeros { 1 }) end
local x = rille.ones(4, 4)
for k = 1, 6 do
  step = k
  if catches then pcall(trainer.step, trainer, { x, x }) else trainer:step { x, x } end
end
print "done"
END

begin='^rille: rank 1 of 3 \(node [^ ]+, pp 1\), in step 2: .*one.lua:[0-9]+: '
waits='^rille: rank [02] of 3 \(node [^ ]+, pp [02]\), in step 3(, and 1 other rank)?: .*one.lua:[0-9]+: '
for impl in $impls; do
  choose "$impl"
  on="$RILLE_MPI:"
  one() { # one CLAIM CODE WORDS WHAT
    job "$on $1" "$2" "$3" "$rille" -n 3 "$work/one.lua" "$4"
    also "$on ... and only that" 1 '^rille: '
  }
  job "$on a job without a fault" 0 '^done$' "$rille" -n 3 "$work/one.lua" nothing
  one 'an error ends the job, named with rank, node, coordinates and action' 1 "${begin}the cause$" error
  one 'a rank that exits early, with a code' 3 "${waits}rank 1 has left the script with exit code 3" 'exit 3'
  one 'kill -9' 137 '^rille: (a rank|rank 1) .*was killed by signal 9' kill
  case $(cat "$log") in
    *'rank 1 '*) also "$on ... and what it was doing" 1 '^rille: rank 1 .node [^ ]+., in step 2, was killed' ;;
  esac
  export RILLE_STALL_TIMEOUT=1.5
  stalled="${waits}rank 1 has given no sign of life for [12]\.[0-9] s, last in step 2, and"
  one 'a stopped rank' 1 "$stalled" stop
  job "$on a job that is stopped as a whole goes on" 0 '^done$' "$rille" -n 3 "$work/one.lua" pause
  unset RILLE_STALL_TIMEOUT
  [ "$RILLE_MPI" = openmpi ] || continue

  one 'out of memory' 1 "${begin}out of memory: 4.0 TiB more" memory
  one 'a rank that exits early' 1 "${waits}rank 1 has left the script with exit code 0" exit
  one 'a script that ends early on one rank' 1 "${waits}rank 1 has left the script" end
  export ASAN_OPTIONS="$checked:handle_segv=0" # else the sanitizer reports it in our place
  one 'a crash' 139 '^rille: (a rank|rank 1) .*was killed by signal 11' crash
  choose "$RILLE_MPI"
  job "$on ranks that do not run the same steps" 1 'a message from rank . has not the' \
    "$rille" -n 3 "$work/one.lua" size
  job "$on ... nor where the script catches the error" 1 'a message from rank . has not the' \
    "$rille" -n 3 "$work/one.lua" caught
  job "$on errors on all ranks, in other words" 1 'the cause of rank' "$rille" -n 3 "$work/one.lua" errors
  for axis in pp dp; do
    for what in advance clip buffer late; do
      claim="$on an update that fails on one rank ($axis, $what)"
      there="^rille: rank 1 of 2 .node [^ ]+, $axis 1., in the script: " words='the cause$'
      [ $what = late ] && words='.*a module has declared a buffer after the trainer was made$'
      [ $axis-$what = dp-late ] && there='^rille: '
      job "$claim" 1 "$there$words" "$rille" -n 2 "$work/update.lua" $what $axis
      also "$claim: ... and only that" 1 '^rille: '
      job "$claim: ... nor does a script go on that catches it" 1 \
        "${there}an earlier step failed on this rank" "$rille" -n 2 "$work/update.lua" $what $axis yes
    done
  done
  export RILLE_STALL_TIMEOUT=1.5
  job "$on an endless loop" 1 "$stalled" "$rille" -n 3 "$work/one.lua" loop
  also "$on ... and the rank itself says where it hangs" 1 \
    '^rille: rank 1 of 3 .*, in step 2: no sign of life for [12]\.[0-9] s$'
  job "$on ... of all ranks" 1 \
    '^rille: rank [0-2] of 3 .*, in step 2: no sign of life for [4-6]\.[0-9] s: the job ends$' \
    "$rille" -n 3 "$work/one.lua" 'all loop'
  job "$on ranks that wait for each other" 1 'has done no work for [2-4]\.[0-9] s, waiting itself in' \
    "$rille" -n 3 "$work/one.lua" other
  job "$on ... or for another collective" 1 'has done no work for' "$rille" -n 3 "$work/one.lua" ring
  job "$on a rank that works longer than the time-out is no fault" 0 '^done$' \
    "$rille" -n 3 "$work/one.lua" busy
  unset RILLE_STALL_TIMEOUT
done
choose openmpi
unset RILLE_MPI

# Rank 1 has other kernels than rank 0.
cat >"$work/mixed" <<'END'
#!/bin/sh
if [ "${OMPI_COMM_WORLD_RANK-}${PMI_RANK-}" = 1 ]; then RILLE_CPU=plain; else RILLE_CPU=$1; fi
export RILLE_CPU
exec "$2" -e 'local r = require "rille" local model = r.nn.Linear(4, 4)
r.Trainer { model = model, loss = r.nn.mse, optimizer = { "sgd", lr = 1 }, log = 0,
  parallel = { dp = 2 }, batch = { global = 4, micro = 1 } }
print("made")'
END
chmod +x "$work/mixed"

case $impls in *openmpi*)
  mpirun=$(launcher_of openmpi)
  job 'ranks with the same kernels' 0 '^made$' "$mpirun" -n 2 "$work/mixed" plain "$rille"
  best=$(env -u RILLE_CPU "$rille" info | sed -n 's/^kernels *\([a-z0-9]*\),.*/\1/p')
  if [ "$best" != plain ]; then
    job 'ranks with other kernels are refused' 1 \
      "the ranks disagree: rank 1 has kernels plain, .* where rank 0 has kernels $best" \
      "$mpirun" -n 2 "$work/mixed" "$best" "$rille"
    also '... and what to set is said' 1 'hint: .*RILLE_CPU'
  else
    echo 'skipped: ranks with other kernels: this machine has only one kind'
  fi
  job 'mpirun by hand: an error ends the job' 1 "${begin}the cause$" "$mpirun" -n 3 "$rille" "$work/one.lua" error
  also '... reported once' 1 '^rille: '
  ;;
esac

# ---- signals: until a rank has been asked to stop, which all ranks learn of

cat >"$work/steps.lua" <<'END'
local rille = require "rille"
local core = rille.core
local world, stop, why = core.comm_world(), nil, "the word of another rank"
core.catch_signals()
world:barrier()
if world:rank() == 0 then io.stdout:write("ready\n") io.stdout:flush() end
repeat
  local asked = core.stop_requested()
  why = asked or why
  local flag = rille.full({ 1 }, asked and 1 or 0)
  world:all_reduce(flag, "max")
  stop = flag:item() > 0
  local till = core.clock() + 0.005
  while core.clock() < till do end
until stop
rille.print_all("stopped by " .. why)
os.exit(75)
END

# child_of PROCESS: its first child; nothing for nothing.
child_of() { [ -z "$1" ] || sed 's/ .*//' "/proc/$1/task/$1/children"; }

# signalled CLAIM CODE SIGNAL STOPPED COMMAND...: how many ranks stop by agreement. SIGNAL is for the
# command; launcher-KILL is for the launcher that it has started.
signalled() {
  claim=$1 want=$2 signal=$3 stopped=$4 status=0
  shift 4
  : >"$log"
  timeout -k 5 30 "$@" "$work/steps.lua" >"$log" 2>"$work/err" </dev/null &
  job=$!
  for _ in $(seq 150); do
    if grep -q ready "$log"; then break; fi
    sleep 0.1
  done
  pid=$(child_of $job)
  case $signal in launcher-*) pid=$(child_of "$pid") ;; esac
  # Where nobody is left the exit code is wrong, which is reported.
  if [ -n "$pid" ]; then kill "-${signal#launcher-}" "$pid"; fi
  wait $job || status=$?
  n=$(grep -c stopped "$log" || true)
  case " $want " in
    *" $status "*) [ "$stopped" = any ] || [ "$n" -eq "$stopped" ] || status=wrong ;;
    *) status="$status, wrong" ;;
  esac
  case $status in
    *wrong) failed=1 && echo "not ok $claim: exit code $status, $n ranks stopped" && cat "$log" "$work/err" ;;
    *) echo "ok $claim" ;;
  esac
}

signalled 'TERM, one process: stops by itself' 75 TERM 1 "$rille"
signalled 'USR1, one process: the same' 75 USR1 1 "$rille"
signalled 'INT, one process: ends at once' 130 INT 0 "$rille"
for impl in $impls; do
  choose "$impl"
  signalled "$RILLE_MPI: TERM, rille -n: all ranks stop by agreement" 75 TERM 2 "$rille" -n 2
  if grep -q 'stopped by SIGTERM' "$log"; then echo "ok $RILLE_MPI: ... and know by what"; else
    failed=1 && echo "not ok $RILLE_MPI: ... and know by what" && cat "$log"
  fi
  [ -s "$work/err" ] && failed=1 && echo "not ok $RILLE_MPI: nothing else is said" && cat "$work/err"
  signalled "$RILLE_MPI: USR1, rille -n: the same" 75 USR1 2 "$rille" -n 2
  signalled "$RILLE_MPI: INT, rille -n: ends at once" 130 INT 0 "$rille" -n 2
  [ -s "$work/err" ] && failed=1 && echo "not ok $RILLE_MPI: nothing is said of it" && cat "$work/err"
  signalled "$RILLE_MPI: kill -9 of the launcher" 137 launcher-KILL any "$rille" -n 2
  if grep -q '^rille: mpi[a-z.]* was killed by signal 9' "$work/err"; then
    echo "ok $RILLE_MPI: ... is said"
  else
    failed=1 && echo "not ok $RILLE_MPI: ... is said" && cat "$work/err"
  fi
done
case $impls in *mpich*)
  choose mpich
  mpich=$(launcher_of mpich) # which now and then exits with 0, whatever its processes exited with
  signalled "USR1, MPICH's mpirun: all ranks stop by agreement" '75 0' USR1 2 "$mpich" -n 2 "$rille"
  signalled "TERM, MPICH's mpirun: the same" '75 0' TERM 2 "$mpich" -n 2 "$rille"
  signalled "INT, MPICH's mpirun: ends at once" '2 130 0' INT 0 "$mpich" -n 2 "$rille"
  ;;
esac
choose openmpi
unset RILLE_MPI
case $impls in *openmpi*)
  signalled 'USR1, mpirun: all ranks stop by agreement' 75 USR1 2 "$mpirun" -n 2 "$rille"
  signalled 'TERM, mpirun: ends within seconds, with or without a checkpoint' '1 143' TERM any "$mpirun" -n 2 "$rille"
  signalled 'INT, mpirun: the same' '1 130' INT any "$mpirun" -n 2 "$rille"
  ;;
esac
exit $failed
