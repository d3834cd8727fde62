#!/usr/bin/env bash
# Compiles every program for NVIDIA GPUs and TPUs, without having one: tests/accelerators/cases.py is the table.
#
#   bash scripts/test_accelerators.sh [pytest arguments]    such as -m "not slow", which CI runs: every program for a GPU
#                                                           or a TPU in turn, the most used ones for both, without the
#                                                           cases that combine what others have one by one
#
# The compilers (2 GB) and the compiled programs are kept in $DAPO_JAX_CACHE (default ~/.cache/dapo_jax): a second run
# installs nothing, and compiles only what has changed.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."
use_environment test

use_compilers
find "$COMPILED" -name '*.json.gz' -mtime +30 -delete
unset XLA_FLAGS LIBTPU_INIT_ARGS JAX_COMPILATION_CACHE_DIR
export DAPO_JAX_ACCELERATORS="$COMPILED"
REPORT=tests/preflight/test_preflight.py::test_the_report_for_a_slice_that_is_not_here
exec python -m pytest tests/accelerators "$REPORT" --numprocesses auto --maxprocesses 4 --dist worksteal "$@"
