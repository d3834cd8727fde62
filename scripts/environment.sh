# shellcheck shell=bash
# Sourced by the other scripts: a virtual environment with the package installed.

use_environment() { # use_environment EXTRA: the active environment, or .venv; installs the package with EXTRA
  local extra=$1
  if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    if [[ ! -x .venv/bin/python ]]; then
      local interpreter=${PYTHON:-python3}
      "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "$interpreter is $("$interpreter" --version 2>&1); dapo_jax needs Python 3.11 or newer: set PYTHON" >&2
        exit 2
      }
      "$interpreter" -m venv .venv
    fi
    # shellcheck source=/dev/null
    source .venv/bin/activate
  fi
  local stamp="$VIRTUAL_ENV/.dapo_jax_$extra"
  if [[ ! -e "$stamp" || setup.py -nt "$stamp" ]]; then
    echo "installing dapo_jax[$extra] into $VIRTUAL_ENV"
    python -m pip install --quiet --disable-pip-version-check --editable ".[$extra]"
    touch "$stamp"
  fi
}
