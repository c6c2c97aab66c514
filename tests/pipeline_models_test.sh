#!/bin/sh
# Models of every shape over pipelines.
set -eu
. tests/pipeline_ranks.sh
ranks 4 tests/pipeline_models.lua
