#!/usr/bin/env bash
# Builds the sdist and the wheel, installs the wheel into a fresh environment, and uses it as a user would.
#
#   bash scripts/test_package.sh
#
# PYTHON names the interpreter of both environments. Nothing in the clone is read once the wheel is built.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."
use_environment test

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git ls-files -z | xargs -0 cp --parents -t "$folder" # what is committed or staged, without build outputs
python -m build --outdir "$folder/dist" "$folder" > "$folder/build.log" || { cat "$folder/build.log" >&2; exit 1; }
tar -tzf "$folder"/dist/*.tar.gz > "$folder/files.txt"
grep -q '/configs/tiny.py$' "$folder/files.txt"
"${PYTHON:-python}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$folder"/dist/*.whl

cd "$(mktemp -d -p "$folder")"
export PATH="$folder/venv/bin:$PATH" JAX_PLATFORMS=cpu
unset PYTHONPATH VIRTUAL_ENV
dapo-jax --version
dapo-jax configs > recipes.txt
grep -q '^quickstart ' recipes.txt
dapo-jax train --config tiny --config.trainer.total_training_steps=2 --config.trainer.save_freq=2 \
  --config.trainer.test_freq=2
dapo-jax evaluate --config tiny --config.model.path=runs/tiny
dapo-jax export --config tiny --output exported
dapo-jax preflight --config tiny --quick --json preflight.json > preflight.txt
dapo-jax monitor runs/tiny
dapo-jax report runs/tiny
dapo-jax env > env.md
python - <<'PYTHON'
import dapo_jax as dx

assert "site-packages" in dx.__file__, dx.__file__
assert dx.keep_groups([[0, 1], [1, 1]]).tolist() == [True, False]
assert dx.load_config("quickstart").rollout.n == 8
PYTHON
echo "the package works"
