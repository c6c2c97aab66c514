#!/bin/sh
# scripts/check counts what happened: nothing that crashed, hung or said nothing passes.
set -eu
check=$(pwd)/scripts/check
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p build/fake tests
export BUILD=build/fake LIMIT=2

# The fake C runner has one suite, which does what the file `body` says.
cat >build/fake/tests <<'SH'
#!/bin/sh
if [ "$1" = --list ]; then echo one; else . ./body; fi
SH
cat >build/fake/rille <<'SH'
#!/bin/sh
. "$1"
SH
chmod +x build/fake/*

# expect CLAIM STATUS LAST-LINE WORDS [NAME...]
expect() {
  claim=$1 want=$2 last=$3 words=$4
  shift 4
  status=0
  sh "$check" "$@" >out 2>&1 || status=$?
  if [ $status -eq "$want" ] && [ "$(tail -n 1 out)" = "$last" ] && grep -q "$words" out; then
    echo "ok $claim"
  else
    echo "not ok $claim: status $status" && cat out
  fi
}

echo 'echo "3 passed, 0 failed"' >body
expect 'counts of a suite that passes' 0 '3 passed, 0 failed' '^ok  *one'
echo 'echo "a.c:3: wrong"; echo "2 passed, 1 failed"; exit 1' >body
expect 'a failure is shown with its words' 1 '2 passed, 1 failed' 'a.c:3: wrong'
echo 'echo "3 passed, 0 failed"; exit 1' >body
expect 'an exit status alone is a failure' 1 '3 passed, 1 failed' 'exit status 1'
echo 'echo "2 passed, 1 failed"; exit 0' >body
expect 'failures with exit status 0 are failures' 1 '2 passed, 1 failed' 'exit status 0'
echo 'kill -SEGV $$' >body
expect 'a crash is a failure' 1 '0 passed, 1 failed' 'no counts, signal 11'
echo 'echo "3 passed, 0 failed"; echo halfway; exit 0' >body
expect 'only a last line counts' 1 '0 passed, 1 failed' 'no counts'
echo 'echo halfway; exit 0' >body
expect 'a suite without counts is a failure' 1 '0 passed, 1 failed' 'no counts'
echo 'echo before; sleep 20; echo "3 passed, 0 failed"' >body
expect 'a suite that hangs is a failure' 1 '0 passed, 1 failed' 'stopped after 2 s'
echo 'echo "skipped: no GPU"; echo "3 passed, 0 failed, 1 skipped"' >body
expect 'what is skipped is said and counted' 0 '3 passed, 0 failed, 1 skipped' '^skipped: no GPU'
echo 'echo "0 passed, 0 failed, 1 skipped"' >body
expect 'a suite may skip all' 0 '0 passed, 0 failed, 1 skipped' '^ok  *one'

echo 'echo "3 passed, 0 failed"' >body
printf 'echo "ok a"\necho "ok b"\n' >tests/a_test.sh
echo 'echo "1 passed, 0 failed"' >tests/b_test.lua
expect 'three kinds of tests are summed' 0 '6 passed, 0 failed' '^ok  *a_test.sh'
expect 'tests can be named' 0 '3 passed, 0 failed' '^ok' a_test.sh b_test.lua
expect 'an unknown name is a failure' 1 '0 passed, 1 failed' 'no test is named nothing' nothing
printf 'no test is named nothing\n0 passed, 1 failed\n' >want
if cmp -s want out; then echo 'ok ... and nothing else is said'; else
  echo 'not ok ... and nothing else is said' && cat out
fi
printf 'echo "ok a"\necho "not ok b"\n' >tests/a_test.sh
expect 'a line "not ok" is a failure' 1 '5 passed, 1 failed' 'not ok b'
printf 'echo "ok a"\nexit 3\n' >tests/a_test.sh
expect 'a shell test that stops early is a failure' 1 '5 passed, 1 failed' 'exit status 3'
rm tests/a_test.sh
# shellcheck disable=SC2016  # for the file to expand
echo 'echo "1 passed, 0 failed"; exit $RILLE_FULL' >tests/c_full.lua
expect 'long tests wait' 0 '4 passed, 0 failed' '^ok'
expect 'long tests run with --full' 1 '5 passed, 1 failed' 'c_full.lua.*exit status 1' --full
