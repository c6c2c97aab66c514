#!/bin/sh
# The prompt, typed at through a pseudo-terminal (script, of util-linux), and fed from a pipe.
set -eu
failed=0
rille=${BUILD:-build/release}/rille
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export XDG_STATE_HOME="$work/state" TERM=dumb
interrupt=$(printf '\003')
enter=$(printf '\r')

# session PIECE...: types the pieces, a moment apart, and shows what the terminal got; a piece
# "wait" is a longer moment. The end of the input is Ctrl-D.
session() {
  {
    sleep 1
    for piece; do
      if [ "$piece" = wait ]; then sleep 1; else printf '%s' "$piece" && sleep 0.3; fi
    done
    sleep 0.5
    printf '\004'
    sleep 0.5
  } | timeout 60 script -qec "$rille; echo exit=\$?" /dev/null | tr -d '\r' >"$work/out" 2>&1
}
piped() {
  status=0
  "$rille" >"$work/out" 2>&1 || status=$?
}
bad() {
  failed=1
  echo "not ok $1"
  sed 's/^/    /' "$work/out"
}
# claim CLAIM PATTERN...: every pattern (a basic regular expression) is in the output.
claim() {
  name=$1
  shift
  for pattern; do
    if ! grep -q -e "$pattern" "$work/out"; then
      bad "$name: no $pattern in"
      return
    fi
  done
  echo "ok $name"
}
lacks() {
  if grep -q -e "$2" "$work/out"; then
    bad "$1: $2 in"
  else
    echo "ok $1"
  fi
}

session "1 + 1$enter" "x = ones(2, 2)$enter" "x:sum()$enter" 'print((7' "$enter" "$enter" "40 + 2$enter"
claim 'values of expressions are printed, globals of the prelude included' '^2$' 'f32\[\]' '4\.0'
claim 'an empty line gives an incomplete chunk up' 'expected .* near <eof>' '^42$'
claim 'Ctrl-D leaves with 0' 'exit=0'

session "for i = 1, 2 do$enter" "print(i * 11)$enter" "end$enter" "f(($enter" "$interrupt" "3 + 4$enter"
claim 'a chunk goes on while it is incomplete' '^11$' '^22$'
claim 'Ctrl-C gives an incomplete chunk up' '^7$'
lacks 'and its error is not shown' 'eof'

session "while true do end$enter" wait "$interrupt" "y = ones(400, 400)$enter" \
  "while true do y = y:matmul(y):clamp(0, 1) end$enter" wait "$interrupt" "5 + 5$enter"
claim 'Ctrl-C stops a loop, and tensor work, and leaves the session alive' 'interrupted' '^10$'

session "1 = 1$enter" 'abc' "$interrupt" "6 * 7$enter" "error('ouch')$enter" "8 * 8$enter"
claim 'Ctrl-C drops a half-typed line' '^42$'
claim 'errors leave the session alive' 'near' 'ouch' '^64$'

session "$(printf '\033[A')" "$enter"
claim 'the history lasts: the last line of the last session comes back' '^64$'

printf '%s\n' 'x = randn(1000, 1000)' 'x' >"$work/in"
piped <"$work/in"
claim 'a large tensor prints short' 'f32\[1000, 1000\]' '\.\.\.'
if [ "$(wc -l <"$work/out")" -lt 12 ]; then echo 'ok in a few lines'; else bad 'in a few lines'; fi

printf '%s\n' 'randn(1000, 1000)' 'for i = 1, 2 do collectgarbage() end' \
  'rille.core.memory().activations.current < 1000' >"$work/in"
piped <"$work/in"
claim 'nothing keeps a printed result alive' '^true$'

printf '%s\n' 'help' 'quit' 'print("still here")' >"$work/in"
piped <"$work/in"
claim 'help alone says how' 'rille.help("softmax")'
lacks 'quit alone leaves' 'still here'
printf '%s\n' 'exit()' 'print("still here")' >"$work/in"
piped <"$work/in"
lacks 'exit() leaves' 'still here'
printf '%s\n' 'help = 5' 'help' 'helpp' >"$work/in"
piped <"$work/in"
claim 'a variable of that name is the variable' '^5$'

printf '%s\n' 'local a = 3' 'a + 1' 'for i = 1, 1 do' '  print(i + 5)' 'end' 'aa' '{1, x = "y"}' >"$work/in"
piped <"$work/in"
claim 'lines from a pipe run; local lasts' '^4$' '^6$' '{1, x = "y"}'
claim 'an unknown name is told with the nearest' 'no variable "aa"' 'did you mean "a"'
if [ "$status" -eq 1 ]; then echo 'ok a piped session with an error ends with 1'
else bad "a piped session with an error ends with 1: $status"; fi
exit $failed
