#!/bin/sh
# Layers of one's own under tensor parallelism on two ranks: tests/tensor_layers_ranks.lua.
set -eu
. tests/pipeline_ranks.sh
ranks 2 tests/tensor_layers_ranks.lua
