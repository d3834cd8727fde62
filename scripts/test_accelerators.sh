#!/usr/bin/env bash
# Compiles every program for NVIDIA GPUs and TPUs, without having one: tests/accelerators/cases.py is the table.
#
#   bash scripts/test_accelerators.sh [pytest arguments]    such as -m "not full", which CI runs: every program for a GPU
#                                                           or a TPU in turn, the most used ones for both, without the
#                                                           cases that combine what others have one by one
#
# A case is lowered, and compiled if its programs or the compilers have changed since tests/accelerators/compiled.json was
# written, which this script does: commit it. DAPO_JAX_COMPILE_ALL=1 compiles all. The compilers (2 GB) and the compiled
# programs are kept in $DAPO_JAX_CACHE (default ~/.cache/dapo_jax): a second run installs nothing.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."
use_environment test

use_compilers
find "$COMPILED" -name '*.json.gz' -mtime +30 -delete
unset XLA_FLAGS LIBTPU_INIT_ARGS JAX_COMPILATION_CACHE_DIR
export DAPO_JAX_ACCELERATORS="$COMPILED" JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 # a moved line changes no program
REPORT=tests/preflight/test_preflight.py::test_the_report_for_a_slice_that_is_not_here
exec python -m pytest tests/accelerators "$REPORT" --numprocesses auto --maxprocesses 4 --dist worksteal "$@"
