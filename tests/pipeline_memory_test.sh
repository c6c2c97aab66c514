#!/bin/sh
# What ranks of a pipeline keep in memory, and the order in which they work.
set -eu
. tests/pipeline_ranks.sh
ranks 4 tests/pipeline_memory.lua
