#!/usr/bin/env bash
# Draws combinations of three to eight options and checks that each is refused with its reason, or trains alike whatever
# stops or divides the run (tests/test_option_combinations.py). CI tries nine, other ones for each commit.
#
#   bash scripts/test_combinations.sh [COUNT [SEED]]       200 unless given; a new seed each day
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."
use_environment test
seed=${2:-$(date +%Y%m%d)}
echo "combinations ${1:-200}, seed $seed"
OPTION_COMBINATIONS="${1:-200}:$seed" exec python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal \
  tests/test_option_combinations.py
