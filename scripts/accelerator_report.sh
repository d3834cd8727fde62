#!/usr/bin/env bash
# Measures this machine's accelerator with dapo_jax in at most nine minutes: no network, no model, no data needed.
#
#   bash scripts/accelerator_report.sh [--output DIR] [--minutes N] [--sections NAME,NAME] [--after DIR] [--small]
#
#   --output DIR      new or empty folder for report.json and report.md (default: runs/accelerator_report)
#   --minutes N       most that all sections take together (default: 9)
#   --sections A,B    only these of attention, tokens, training, rollout_0.5b, update_0.5b, rollout_1.5b, update_1.5b,
#                     memory, which needs the updates, rows_0.5b, rows_1.5b, long_tail and variants
#   --after DIR       take over the sections that passed in the report of this folder, on such devices
#   --small           tiny sizes, as on a machine without an accelerator
#
# Uses the first interpreter that can import dapo_jax and what it needs ($PYTHON, the active one, .venv); if there
# is none, it makes .venv and installs the package. Exit code: 0, 1 if a section failed, 2 if an option is wrong.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/environment.sh"
show_help "$@"

use_python "$root"
exec "$interpreter" "$root/scripts/benchmarks/accelerator_report.py" "$@"
