#!/bin/sh
# sched_freestanding_test - the schedule files ask nothing of libc but mem* functions, so that the
# same source can run where there is no libc. (Compilers make strlen of a loop that counts; where
# there is no libc they are told not to.)
set -eu
objects=${BUILD:-build/release}/obj/parallel
own='sched_|action_|_GLOBAL_OFFSET_TABLE_$|__(stack_chk|asan|ubsan|sanitizer|sancov)_'
failed=0
for object in "$objects"/sched*.o; do
  name=${object##*/}
  case $name in sched_heap.o | sched_cli.o) continue ;; esac
  foreign=$(nm -u "$object" | awk '{ print $NF }' |
    grep -Ev "^($own|mem(cpy|set|move|cmp)\$|strlen\$)" | tr '\n' ' ' || true)
  if [ -z "$foreign" ]; then
    echo "ok $name needs no libc"
  else
    echo "not ok $name needs $foreign"
    failed=1
  fi
done
exit $failed
