#!/usr/bin/env bash
# Sets up a virtual environment and checks style, types and every law, on up to four cores.
#
#   bash scripts/test.sh                         the short form of each test
#   bash scripts/test.sh --all                   the long forms, too (marked slow): half an hour on two cores; and
#                                                what needs the library reasoning-gym, which needs a C compiler
#   bash scripts/test.sh [pytest arguments]      with arguments, only pytest runs
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."

if [[ "$*" == --all ]]; then
  use_environment test,reasoning-gym
  SELECTED=""
else
  use_environment test
  SELECTED="not slow"
  [[ $# -gt 0 ]] && exec python -m pytest "$@"
fi
ruff check .
ruff format --check .
pyright --pythonpath "$(command -v python)"
exec python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal -m "$SELECTED"
