#!/bin/sh
# Every schedule and layout against one process: the whole matrix, in parts.
set -eu
. tests/pipeline_ranks.sh
ranks 8 tests/pipeline_matrix.lua --full "${RILLE_MATRIX:-1/1}"
