#!/bin/sh
# Every schedule and layout with tensor parallelism against one process: cases in which every two
# values of the matrix meet.
set -eu
. tests/pipeline_ranks.sh
ranks 8 tests/pipeline_matrix.lua tp
