#!/usr/bin/env bash
# An evening's evidence on a GPU in half an hour, in order of worth: kernels, slots, updates, kills, comparisons, tasks.
#
#   bash scripts/gpu_evidence.sh [--output DIR] [--minutes 25] [--parts NAME,NAME] [--trl PYTHON] [--page FILE] [--small]
#
#   --output DIR      folder of results (default: runs/gpu_evidence); parts that have passed there are not run again
#   --minutes N       most that all parts take together
#   --parts A,B       only these of kernels, slots, updates, kill, parts, trl, mawps, spelling, long
#   --trl PYTHON      of an environment with torch, transformers and trl, for the part trl
#   --page FILE       only writes the page from DIR to this file, with "not measured" where nothing ran
#   --small           tiny sizes, as on a machine without a GPU
#
# Uses the same interpreter as accelerator_report.sh. Exit code: 0, 1 if a part failed, 2 if an option is wrong.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/environment.sh"
show_help "$@"
use_python "$root"
exec "$interpreter" "$root/scripts/benchmarks/gpu_evidence.py" "$@"
