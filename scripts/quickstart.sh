#!/usr/bin/env bash
# Sets up everything on a fresh machine and trains SmolLM2-135M-Instruct with DAPO to add numbers.
#
#   bash scripts/quickstart.sh [--model DIR] [--config.key=value ...]
#
# Uses the active virtual environment, or makes .venv. PYTHON names the interpreter (3.11 or newer).
# The model is kept in $DAPO_JAX_CACHE (default ~/.cache/dapo_jax), outside the repository.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."

model=()
if [[ "${1:-}" == --model ]]; then
  [[ -n "${2:-}" ]] || { echo "quickstart: --model needs the path of a model directory" >&2; exit 2; }
  model=("--config.model.path=$2")
  shift 2
fi
use_environment
exec python -m dapo_jax.train --config quickstart "${model[@]}" "$@"
