#!/bin/sh
# Tensor parallelism against a split by hand.
set -eu
. tests/pipeline_ranks.sh
ranks 2 tests/tensor_parallel.lua
