#!/usr/bin/env bash
# Runs tests on Python 3.12 and 3.13, which get newer releases of JAX and Flax than Python 3.11 can have.
#
#   bash scripts/test_pythons.sh                       a selection
#   bash scripts/test_pythons.sh [pytest arguments]    such as -m "not slow and not full" for the short lane
#
# CI only uses the wheel on them (scripts/test_package.sh). An interpreter is python3.12 on PATH or one of pyenv's; a
# version that is not here is skipped. The environments are kept in $DAPO_JAX_CACHE/pythons (default
# ~/.cache/dapo_jax/pythons).
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."

# What a new Python or JAX can break: imports, dataclasses and types of options, signals, processes, compiled functions
# against reference numbers, one whole run, its checkpoint. The rest follows from these and takes ten minutes.
SELECTED=(
  tests/test_structure.py tests/config tests/command/test_command_line.py tests/algorithms tests/test_checkpoint.py
  tests/parallel/test_compilation.py
  tests/test_train.py::test_resume_equals_not_stopping
)
NOTEBOOK=tests/notebooks/test_notebooks.py::test_the_first_run_trains_compares_and_exports # as on Colab

export PYTHONPATH=$PWD # the environments may have been made for another checkout
for version in 3.12 3.13; do
  interpreter=$(interpreter_of "$version") || {
    echo "Python $version: skipped, neither python$version nor pyenv has it"
    continue
  }
  environment="${DAPO_JAX_CACHE:-$HOME/.cache/dapo_jax}/pythons/$version"
  [[ -e "$environment/bin/activate" ]] || make_environment "$interpreter" "$environment"
  (
    # shellcheck source=/dev/null
    source "$environment/bin/activate"
    use_environment test
    echo "Python $version: $(python -c 'import flax, jax; print("jax", jax.__version__, "flax", flax.__version__)')"
    if [[ $# -eq 0 ]]; then
      set -- -m "(not slow and not full) or colab" "${SELECTED[@]}"
      [[ "$version" == 3.13 ]] && set -- "$@" "$NOTEBOOK"
    fi
    python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal -p no:cacheprovider "$@"
  )
done
