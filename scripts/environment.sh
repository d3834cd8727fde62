# shellcheck shell=bash
# Sourced by the other scripts: a virtual environment with the package installed.

# show_help "$@", before any cd: with -h or --help among them, prints the comment that begins the script, and ends it.
show_help() {
  local argument
  for argument in "$@"; do
    if [[ "$argument" == -h || "$argument" == --help ]]; then
      sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' "$0"
      exit 0
    fi
  done
}

use_environment() { # use_environment [EXTRA]: the active environment, or .venv; installs the package, with EXTRA
  local extra=${1:-}
  if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    if [[ ! -e .venv/bin/activate ]]; then # which venv writes last
      local interpreter=${PYTHON:-python3}
      "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "$interpreter is $("$interpreter" --version 2>&1); dapo_jax needs Python 3.11 or newer: set PYTHON" >&2
        exit 2
      }
      make_environment "$interpreter" .venv
    fi
    # shellcheck source=/dev/null
    source .venv/bin/activate
  fi
  local stamp="$VIRTUAL_ENV/.dapo_jax_$extra" package=".${extra:+[$extra]}"
  if [[ ! -e "$stamp" || setup.py -nt "$stamp" ]]; then
    echo "installing dapo_jax${package#.} into $VIRTUAL_ENV"
    python -m pip install --quiet --disable-pip-version-check --editable "$package"
    touch "$stamp"
  fi
}

make_environment() { # make_environment INTERPRETER FOLDER: by venv; where that is missing (Colab), by uv or virtualenv
  local program
  "$1" -m venv "$2" && return
  for program in "uv venv --quiet --seed --python" "virtualenv --quiet --python"; do
    if command -v "${program%% *}" > /dev/null; then
      echo "$1 has no working venv module: making $2 with ${program%% *}"
      rm -rf "$2" # what venv left
      $program "$1" "$2" && return
    fi
  done
  echo "$1 cannot make a virtual environment: install its venv module (apt-get install python3-venv), or uv" \
    "(pip install uv), or activate an environment of your own" >&2
  exit 2
}

use_python() { # use_python ROOT: `python` is the first that imports dapo_jax and what it needs, $PYTHON before others
  local candidate
  export PYTHONPATH="$1${PYTHONPATH:+:$PYTHONPATH}"
  for candidate in "${PYTHON:-}" python python3 "$1/.venv/bin/python"; do
    if [[ -n "$candidate" ]] && "$candidate" -c "import dapo_jax.training.loop" 2> /dev/null; then
      interpreter=$candidate
      return
    fi
  done
  cd "$1" || exit
  use_environment
  cd - > /dev/null || exit
  interpreter=python
}

interpreter_of() { # interpreter_of VERSION: prints its path, on PATH or among pyenv's; fails if it is not here
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python3; do
    if "$candidate" -c '' 2> /dev/null; then # pyenv's python3.12 fails unless that version is chosen
      echo "$candidate"
      return
    fi
  done
  return 1
}

CUDNN="nvidia-cudnn-cu13==9.28.1.4" # with a newer one all of tests/accelerators/compiled.json compiles again

use_compilers() { # puts JAX's compilers for GPUs and TPUs, of which none need be here, on PYTHONPATH; COMPILED is kept too
  local jax python libtpu compilers
  COMPILED="${DAPO_JAX_CACHE:-$HOME/.cache/dapo_jax}/accelerators"
  read -r jax python libtpu < <(python - <<'PYTHON'
import importlib.metadata
import sys

needs = [line.partition(";")[0].strip() for line in importlib.metadata.requires("jax") or () if line.startswith("libtpu")]
print(importlib.metadata.version("jax"), sys.implementation.cache_tag, *needs[:1])
PYTHON
  )
  compilers="$COMPILED/compilers_${jax}_$python"
  if [[ ! -d "$compilers" ]]; then
    echo "installing JAX's compilers for GPUs and TPUs into $compilers"
    rm -rf "$compilers.new"
    python -m pip install --quiet --disable-pip-version-check --no-deps --target "$compilers.new" \
      "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" "$CUDNN" "$libtpu" || {
      echo "cannot install JAX's compilers: the first time needs a network, and 2 GB in $COMPILED (DAPO_JAX_CACHE" \
        "moves it)" >&2
      exit 2
    }
    mv "$compilers.new" "$compilers"
  fi
  export PYTHONPATH="$compilers${PYTHONPATH:+:$PYTHONPATH}"
}
