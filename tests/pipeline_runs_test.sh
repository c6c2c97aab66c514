#!/bin/sh
# Evaluation, sampling, checkpoints, schedules of one's own and refusals over pipelines.
set -eu
. tests/pipeline_ranks.sh
ranks 4 tests/pipeline_runs.lua
