#!/usr/bin/env bash
# Sets up a virtual environment and runs every check: style, types, the fast tests, then the slow ones, on up to four cores.
#
#   bash scripts/test.sh [pytest arguments]      with arguments, only pytest runs
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."
use_environment test

if [[ $# -gt 0 ]]; then
  exec python -m pytest "$@"
fi
ruff check .
ruff format --check .
pyright --pythonpath "$(command -v python)"
WORKERS=(--numprocesses auto --maxprocesses 4 --dist worksteal)
python -m pytest "${WORKERS[@]}" -m "not slow"
python -m pytest "${WORKERS[@]}" -m slow
