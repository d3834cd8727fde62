#!/usr/bin/env bash
# Compiles every program for NVIDIA GPUs and TPUs, none of which need be here: tests/accelerators/cases.py is the table.
#
#   bash scripts/test_accelerators.sh [pytest arguments]
#
# The compilers (2 GB) and what they have compiled are kept in $DAPO_JAX_CACHE (default ~/.cache/dapo_jax): a second run
# installs nothing, and compiles only what has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment test

kept="${DAPO_JAX_CACHE:-$HOME/.cache/dapo_jax}/accelerators"
read -r jax python libtpu < <(python - <<'PYTHON'
import importlib.metadata
import sys

needs = [line.partition(";")[0].strip() for line in importlib.metadata.requires("jax") or () if line.startswith("libtpu")]
print(importlib.metadata.version("jax"), sys.implementation.cache_tag, *needs[:1])
PYTHON
)
compilers="$kept/compilers_${jax}_$python"
if [[ ! -d "$compilers" ]]; then
  echo "installing JAX's compilers for GPUs and TPUs into $compilers"
  rm -rf "$compilers.new"
  python -m pip install --quiet --disable-pip-version-check --no-deps --target "$compilers.new" \
    "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" "nvidia-cudnn-cu13<10" "$libtpu" || {
    echo "cannot install JAX's compilers: the first run needs a network, and 2 GB in $kept (DAPO_JAX_CACHE moves it)" >&2
    exit 2
  }
  mv "$compilers.new" "$compilers"
fi
find "$kept" -name '*.json.gz' -mtime +30 -delete
unset XLA_FLAGS LIBTPU_INIT_ARGS JAX_COMPILATION_CACHE_DIR
export PYTHONPATH="$compilers${PYTHONPATH:+:$PYTHONPATH}" DAPO_JAX_ACCELERATORS="$kept"
exec python -m pytest tests/accelerators --numprocesses auto --maxprocesses 4 --dist worksteal "$@"
