#!/usr/bin/env bash
# Builds the sdist and the wheel, installs the wheel into fresh environments, and uses it as a user would.
#
#   bash scripts/test_package.sh
#
# PYTHON names the interpreter with which every command runs, then the steps of the Dockerfile. Python 3.12 and 3.13, where
# they are here, run a short training and the first cells of the notebook. Nothing in the clone is read once the wheel is
# built.
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
grep -q '/scripts/launch/slurm_gpu.sbatch$' "$folder/files.txt"
unset PYTHONPATH VIRTUAL_ENV
export JAX_PLATFORMS=cpu

in_fresh_environment() { # in_fresh_environment INTERPRETER FUNCTION: the wheel is installed, an empty directory is current
  local environment
  environment=$(mktemp -d -p "$folder")
  "$1" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$folder"/dist/*.whl
  (
    cd "$(mktemp -d -p "$folder")"
    PATH="$environment/bin:$PATH"
    "$2"
  )
}

trains() {
  dapo-jax --version
  dapo-jax train --config tiny --config.trainer.total_training_steps=2 --config.trainer.save_freq=2 \
    --config.trainer.test_freq=2
}

runs_every_command() {
  trains
  dapo-jax configs > recipes.txt
  grep -q '^  quickstart ' recipes.txt
  dapo-jax configs slurm_gpu.sbatch > train.sbatch
  cmp train.sbatch "$folder/scripts/launch/slurm_gpu.sbatch"
  dapo-jax data aime-2024 --input "$folder/tests/scripts/data/aime24.jsonl"
  dapo-jax evaluate --config tiny --config.model.path=runs/tiny
  dapo-jax export --config tiny --output exported
  dapo-jax preflight --config tiny --json preflight.json > preflight.txt
  dapo-jax monitor runs/tiny
  dapo-jax replay runs/tiny --step 2
  dapo-jax report runs/tiny
  dapo-jax sweep --config tiny --seeds 0 --output runs/sweep trainer.total_training_steps=2
  dapo-jax env > env.md
  python - <<'PYTHON'
import dapo_jax as dx

assert "site-packages" in dx.__file__, dx.__file__
assert dx.keep_groups([[0, 1], [1, 1]]).tolist() == [True, False]
assert dx.load_config("quickstart").rollout.n == 8
PYTHON
  builds_the_image
}

builds_the_image() { # the Dockerfile's steps as plain commands, as this user; few packages are missing here
  local step words entry=()
  mkdir image && cd image
  while read -r -u 3 step words; do
    case "$step" in
      COPY) copies "$words" ;;
      RUN) EXTRA=judge bash -euc "useradd() { :; }; chown() { :; }; $words" ;;
      ENTRYPOINT) read -r -a entry <<< "${words//[][\",]/ }" ;;
      "" | "#"* | FROM | ARG | WORKDIR | USER) ;;
      *) echo "test_package.sh does not know the step $step of the Dockerfile" >&2 && return 1 ;;
    esac
  done 3< "$folder/Dockerfile"
  "${entry[@]}" --help | grep 'config.trainer.total_training_steps' > /dev/null # which reads all, unlike -q
  python - <<'PYTHON'
import dapo_jax as dx

assert dx.__file__.endswith("/image/dapo_jax/__init__.py"), dx.__file__
assert dx.load_config("configs/tiny.py") == dx.load_config("tiny")
PYTHON
}

copies() { # "SOURCE ... TARGET", as COPY does: the content of folders
  local names source
  read -r -a names <<< "$1"
  mkdir -p "${names[-1]}"
  for source in "${names[@]:0:${#names[@]}-1}"; do
    [[ ! -d "$folder/$source" ]] || source+=/.
    cp -r "$folder/$source" "${names[-1]}"
  done
}

trains_and_runs_a_notebook() {
  trains
  DAPO_JAX_NOTEBOOK_SMALL=1 python - "$folder/notebooks/first_run.ipynb" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    cells = [cell["source"] for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
for source in cells[:4]:  # what to install is here; the devices, the config, answers before the training
    exec("".join(line for line in source if not line.lstrip().startswith("%")))
assert len(before) == len(PAIRS), before
PYTHON
}

in_fresh_environment "${PYTHON:-python}" runs_every_command
for version in 3.12 3.13; do
  if interpreter=$(interpreter_of "$version"); then
    echo "Python $version:"
    in_fresh_environment "$interpreter" trains_and_runs_a_notebook
  else
    echo "Python $version: skipped, neither python$version nor pyenv has it"
  fi
done
echo "the package works"
