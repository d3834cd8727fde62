#!/usr/bin/env bash
# Sets up a virtual environment and runs every check: style, types, all tests on as many cores as there are, up to four.
#
#   bash scripts/test.sh [pytest arguments]      with arguments, only pytest runs
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment test

if [[ $# -gt 0 ]]; then
  exec python -m pytest "$@"
fi
ruff check .
pyright --pythonpath "$(command -v python)"
python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
