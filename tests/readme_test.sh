#!/bin/sh
# readme_test - what README.md shows of `rille schedule` is what it prints: every line below a
# command, and below the slip in the example, and the example itself.
set -eu
rille=${BUILD:-build/release}/rille
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# shown NAME FILE: each line of FILE stands in $work/printed.
shown() {
  missing=$(grep -vxFf "$work/printed" "$2" || true)
  if [ -s "$2" ] && [ -z "$missing" ]; then
    echo "ok $1"
  else
    printf 'not ok %s\n%s\n' "$1" "${missing:-nothing is shown}"
    failed=1
  fi
}

# The blocks: one file a command, its arguments in the first line, what is shown in the others.
awk -v work="$work" '
  /^    \$ build\/rille schedule / { sub(/^    \$ build\/rille /, ""); file = work "/block" ++n
                                    print > file; next }
  /^    ./ && file { print substr($0, 5) > file; next }
  /./ { file = "" }' README.md
for block in "$work"/block*; do
  arguments=$(head -n 1 "$block")
  # shellcheck disable=SC2086  # several words
  COLUMNS=125 "$rille" $arguments | sed 's/ *$//' >"$work/printed"
  tail -n +2 "$block" >"$work/lines"
  shown "$arguments" "$work/lines"
done

sed 's/p - 1 - r + AHEAD/r + AHEAD/' scripts/examples/schedule.lua >"$work/slip.lua"
"$rille" schedule "$work/slip.lua" -p 3 -m 6 2>&1 | sed 's/ *$//' >"$work/printed" || true
sed -n '/^    ahead breaks/,/^    *`-- /s/^    //p' README.md >"$work/lines"
shown 'what the checker says to a slip' "$work/lines"

sed -n '/^local rille/,$p' scripts/examples/schedule.lua >"$work/printed"
sed -n '/^    local AHEAD/,/^    }/s/^    //p' README.md >"$work/lines"
shown 'the example is the file' "$work/lines"
exit $failed
