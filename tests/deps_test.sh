#!/bin/sh
# scripts/deps on machines that lack something: a PATH of few programs stands for such a machine.
set -eu
deps=$(pwd)/scripts/deps
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
for program in sh touch; do ln -s "$(command -v $program)" "$work/bin/$program"; done
fake() { # fake NAME LINE...: a program of that name that does what the lines say
  name=$1
  shift
  printf '%s\n' '#!/bin/sh' "$@" >"$work/bin/$name"
  chmod +x "$work/bin/$name"
}

# expect CLAIM STATUS WORDS [OPTION...]
expect() {
  claim=$1 want=$2 words=$3
  shift 3
  status=0
  PATH=$work/bin sh "$deps" "$@" >"$work/out" 2>&1 || status=$?
  if [ $status -eq "$want" ] && grep -qe "$words" "$work/out"; then echo "ok $claim"
  else echo "not ok $claim: status $status" && cat "$work/out"; fi
}

fake id 'echo 1000'
expect 'a user gets the line for Debian' 1 'sudo apt-get install.* gcc .*liblua5.4-dev.*'
expect 'and for Fedora' 1 'sudo dnf install.* gcc .*lua-devel'
expect 'and for brew' 1 'brew install.* gcc .*lua'
expect 'another BLAS is one more package' 1 'apt-get install.* libopenblas-dev' --openblas
expect 'oneDNN too' 1 'apt-get install.* libdnnl-dev' --onednn
expect 'several ranks want an MPI' 1 'apt-get install.* libopenmpi-dev openmpi-bin' --mpi
expect 'the tools of lint are apart' 1 'apt-get install.* clang-format-14.* shellcheck' --lint
expect 'an unknown option is an error' 2 'unknown option --nothing' --nothing

fake apt-get 'echo "$@" >>'"$work/apt"
fake id 'echo 0'
expect 'a report installs nothing, not even for root' 1 'sudo apt-get install' --report
if [ -e "$work/apt" ]; then echo 'not ok apt-get was not called'; else echo 'ok apt-get was not called'; fi
expect 'root on Debian installs' 0 'installing.* gcc .* bible-kjv'
if grep -q 'install .*-y.* gcc .* bible-kjv' "$work/apt"; then echo 'ok with apt-get'
else echo 'not ok with apt-get'; fi
fake apt-get 'echo "E: no network" >&2; exit 100'
expect 'a failed installation is a failure' 100 'no network'
fake id 'echo 1000'

for program in gcc make pkg-config bible; do fake $program 'exit 0'; done
claim='with everything there it says nothing'
if PATH=$work/bin sh "$deps" >"$work/out" 2>&1 && [ ! -s "$work/out" ]; then echo "ok $claim"
else echo "not ok $claim" && cat "$work/out"; fi
expect 'MPI alone is said to be missing, and is no failure' 0 'Missing: MPI (several ranks need it)' \
  --mpi
fake pkg-config 'case $* in *libedit*) exit 1 ;; esac'
expect 'and is a failure where MPI is missing too' 1 'Missing: libedit MPI\.' --mpi
expect 'one that is missing is named' 1 'Missing: libedit\.'
if grep -q 'sudo apt-get install libedit-dev$' "$work/out"; then echo 'ok and nothing else asked for'
else echo 'not ok and nothing else asked for'; fi
