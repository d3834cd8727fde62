#!/usr/bin/env bash
# Sets up a virtual environment and checks style, types and every law, on up to four cores.
#
#   bash scripts/test.sh                         the short lane: each law in its cheapest form
#   bash scripts/test.sh --all                   the long lane as well (marked slow), and what needs the library
#                                                reasoning-gym, which needs a C compiler
#   bash scripts/test.sh --everything            every test, those marked full too
#   bash scripts/test.sh [pytest arguments]      with arguments, only pytest runs
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."

case "$*" in
  --everything) EXTRAS=test,reasoning-gym SELECTED="" ;;
  --all) EXTRAS=test,reasoning-gym SELECTED="not full" ;;
  *) EXTRAS=test SELECTED="not slow and not full" ;;
esac
use_environment "$EXTRAS"
[[ $# -gt 0 && "$EXTRAS" == test ]] && exec python -m pytest "$@"
ruff check .
ruff format --check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
pyright --pythonpath "$(command -v python)" > "$types" 2>&1 & # on what the tests leave of two cores
checked=$! status=0
python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal -m "$SELECTED" || status=$?
wait "$checked" || status=$?
cat "$types"
exit "$status"
