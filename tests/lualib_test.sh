#!/bin/sh
# tests/check.lua: what is wrong fails, with words that say where.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# expect CLAIM LAST-LINE STATUS WORDS BODY: a test file with this body ends so.
expect() {
  printf 'local check <const> = require "tests.check"\n%s\ncheck.done()\n' "$5" >"$work/t.lua"
  status=0
  lua5.4 "$work/t.lua" >"$work/out" 2>&1 || status=$?
  if [ "$(tail -n 1 "$work/out")" = "$2" ] && [ $status -eq "$3" ] && grep -qF "$4" "$work/out"; then
    echo "ok $1"
  else
    echo "not ok $1: status $status" && cat "$work/out"
  fi
}
fails() { expect "$1" '0 passed, 1 failed' 1 "$2" "check.test('a claim', function() $3 end)"; }
passes() { expect "$1" '1 passed, 0 failed' 0 '' "check.test('a claim', function() $2 end)"; }

passes 'equal tables are equal' 'check.equal({1, {x = 2.5}, "a"}, {1, {x = 2.5}, "a"})'
passes 'NaN equals NaN' 'check.equal({0/0}, {0/0})'
fails 'the place of a difference is named' 'got 3, expected 4 at [2]["x"]' \
  'check.equal({1, {x = 3}}, {1, {x = 4}})'
fails 'a missing member differs' 'got nil, expected 2 at [2]' 'check.equal({1}, {1, 2})'
fails 'a surplus member differs' 'got 2, expected nil at [2]' 'check.equal({1, 2}, {1})'
fails 'a number is not its string' 'got 1, expected "1"' 'check.equal(1, "1")'
fails 'NaN equals no number' 'expected 1.0' 'check.near(0/0, 1.0, 10)'
passes 'near allows the tolerance' 'check.near({1.0}, {1.1}, 0.2)'
fails 'and no more' '(tolerance 0.05)' 'check.near({1.0}, {1.1}, 0.05)'
passes 'raises matches every pattern' 'check.raises(function() error("a 1 b") end, "a %d", "b")'
fails 'raises wants every pattern' 'does not match "a 2"' \
  'check.raises(function() error("a 1 b") end, "a %d", "a 2")'
fails 'raises wants an error' 'no error was raised' 'check.raises(function() end)'
fails 'ok wants true' 'as a note' 'check.ok(1 == 2, "as a note")'
fails 'an error is a failure, with claim and line' 't.lua:2' 'local x = nil; x()'
fails 'an error may be a table' '{["code"] = 3}' 'error({code = 3})'
expect 'what is skipped is counted' '0 passed, 0 failed, 1 skipped' 0 'skipped: no GPU' \
  'check.skip("no GPU")'
expect 'a file without tests fails' '0 passed, 0 failed' 1 '' ''
