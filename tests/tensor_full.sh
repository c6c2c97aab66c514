#!/bin/sh
# Every schedule and layout with tensor parallelism against one process: the whole matrix, in parts.
set -eu
. tests/pipeline_ranks.sh
ranks 8 tests/pipeline_matrix.lua tp --full "${RILLE_MATRIX:-1/1}"
