#!/bin/sh
# scripts/prepare_kjv with and without the package, and scripts/train_mlp.lua learning its task.
set -eu
rille=$(pwd)/$BUILD/rille
prepare=$(pwd)/scripts/prepare_kjv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
for program in sh cat sed wc mv mkdir dirname rm awk; do
  ln -s "$(command -v $program)" "$work/bin/$program"
done

# expect CLAIM STATUS WORDS COMMAND...
expect() {
  claim=$1 want=$2 words=$3
  shift 3
  status=0
  "$@" >"$work/log" 2>&1 || status=$?
  if [ $status -eq "$want" ] && grep -qe "$words" "$work/log"; then echo "ok $claim"
  else echo "not ok $claim: status $status" && cat "$work/log"; fi
}
kjv() { PATH=$work/bin sh "$prepare" "$@"; }

# fake_bible LINES: writes verses as bible -f does.
fake_bible() {
  cat >"$work/bin/bible" <<BIBLE
#!/bin/sh
[ "\$*" = '-f gen1:1-rev22:21' ] || exit 1
awk 'BEGIN { for (i = 1; i <= $1; i++) print "1Chr" i ":1 And so: it was 2 John3:16." }'
BIBLE
  chmod +x "$work/bin/bible"
}

expect 'without the package: what to install' 1 'apt-get install bible-kjv' kjv "$work/out/kjv.txt"
expect 'without a file: the usage' 2 'usage: scripts/prepare_kjv FILE' kjv
fake_bible 31101
expect 'a text that is not whole is refused' 1 'expected the 31102 verses' kjv "$work/out/kjv.txt"
if [ -z "$(ls "$work/out")" ]; then echo 'ok and leaves nothing'; else echo 'not ok and leaves files'; fi
fake_bible 31102
expect 'with it: all verses' 0 '31102 verses' kjv "$work/out/kjv.txt"
expect 'the references are gone, and nothing else' 0 '^31102$' \
  grep -c '^And so: it was 2 John3:16\.$' "$work/out/kjv.txt"
fake_bible 5
expect 'again: the file stays' 0 '^31102 ' sh -c "PATH=$work/bin sh '$prepare' '$work/out/kjv.txt' &&
  wc -l <'$work/out/kjv.txt' | sed 's/$/ /'"

expect 'train_mlp.lua learns its spirals' 0 '^\(39[0-9]\|400\) of 400 points on the right spiral' \
  "$rille" scripts/train_mlp.lua --steps 300
expect 'train_mlp.lua: its options' 2 'no option --step; did you mean "--steps"' \
  "$rille" scripts/train_mlp.lua --step 300

seq 2000 >"$work/text.txt"
gpt() { "$rille" scripts/train_gpt.lua --text "$work/text.txt" --layers 1 --d 16 --heads 2 --T 16 \
  --global 4 --micro 2 --steps 2 "$@"; }
expect 'train_gpt.lua trains, evaluates and samples' 0 '^In the beginning' gpt --sample 5
expect 'train_gpt.lua: an option without the one it needs' 2 \
  '^rille: .*--save-every 5 does nothing without --out' gpt --save-every 5
for wrong in '--top-p 0' '--prompt=' '--heads 3' '--kv-heads 3'; do
  # shellcheck disable=SC2086  # two words
  expect "train_gpt.lua $wrong is refused" 2 '^rille: ' gpt $wrong
  if grep -q '^step ' "$work/log"; then echo "not ok before training: $wrong" && cat "$work/log"
  else echo "ok before training: $wrong"; fi
done
