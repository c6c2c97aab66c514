#!/bin/sh
# Every schedule and layout with tensor parallelism against one process: cases in which every two
# values of the matrix meet. Under a sanitizer, and with the plain kernels, which are slow, every
# fourth of them.
set -eu
. tests/pipeline_ranks.sh
case $build in
  *asan*) some='--every 4' ;;
  *) [ "${RILLE_CPU:-}" = plain ] && some='--every 4' || some='' ;;
esac
# shellcheck disable=SC2086  # words
ranks 8 tests/pipeline_matrix.lua tp $some
