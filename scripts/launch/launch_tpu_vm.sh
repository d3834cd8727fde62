#!/usr/bin/env bash
# Trains on every worker of a Cloud TPU VM, one host or a pod slice, which must exist.
#
#   export TPU_NAME=my-slice ZONE=europe-west4-b     PROJECT too, if it is not gcloud's own
#   bash scripts/launch/launch_tpu_vm.sh install [GIT_URL [REF]]    the checkout here, or a git repository
#   bash scripts/launch/launch_tpu_vm.sh run --config FILE [--config.key=value ...]
#   bash scripts/launch/launch_tpu_vm.sh logs [WORKER]      last lines of every worker, or follow one
#   bash scripts/launch/launch_tpu_vm.sh stop [SECONDS]     SIGTERM, and SIGKILL after SECONDS (120)
#   bash scripts/launch/launch_tpu_vm.sh exec COMMAND       in every worker's shell, for example to mount a shared directory
#
# The workdir has to be a directory that all workers share. On a worker, everything is in ~/dapo_jax: source, venv,
# train.out (what the process prints) and train.pid. `run` again after `stop` or a failure resumes from the checkpoint.
set -euo pipefail

usage() {
  sed -n '4,9s/^# *//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

if [[ "${1:-}" != run && "${1:-}" != exec && " $* " =~ " "(-h|--help)" " ]]; then # theirs are of another command
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"
  exit
fi

# Functions with the prefix on_worker_ run there, in ~/dapo_jax.

on_worker_unpack() { # ARCHIVE of the checkout, in the home directory
  mkdir -p source
  tar -xzf ~/"$1" -C source
  rm ~/"$1"
}

on_worker_clone() { # GIT_URL REF
  git init --quiet source
  git -C source fetch --quiet --depth 1 "$1" "$2"
  git -C source checkout --quiet --force FETCH_HEAD
}

on_worker_install() { # uv brings its own Python: that of the TPU images is too old
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --allow-existing --python 3.12 venv
  python3 -m uv pip install --quiet --python venv/bin/python --editable './source[tpu,gcs]'
  echo "$HOSTNAME: installed"
}

on_worker_pid() { # the training process, if it runs; a process that has got its number since is another one
  local pid
  pid=$(cat train.pid 2>/dev/null) && grep -aqs dapo_jax.train "/proc/$pid/cmdline" && echo "$pid"
}

on_worker_run() { # OPTIONS of dapo_jax.train
  local pid
  if pid=$(on_worker_pid); then
    echo "$HOSTNAME: process $pid is already training: stop it first" >&2
    return 1
  fi
  cd source
  nohup ../venv/bin/python -m dapo_jax.train "$@" >>../train.out 2>&1 </dev/null &
  echo $! >../train.pid
  echo "$HOSTNAME: started process $!"
}

on_worker_logs() {
  tail -n 20 train.out | sed "s/^/$HOSTNAME: /"
}

on_worker_follow() {
  tail -n 100 -F train.out
}

on_worker_stop() { # SECONDS until SIGKILL
  local pid
  pid=$(on_worker_pid) || { echo "$HOSTNAME: no process is training"; return 0; }
  kill -TERM "$pid"
  for ((second = 0; second < $1; second++)); do
    on_worker_pid >/dev/null || { echo "$HOSTNAME: stopped process $pid"; return 0; }
    sleep 1
  done
  kill -KILL "$pid" 2>/dev/null || true
  echo "$HOSTNAME: killed process $pid, which ran for $1 s after SIGTERM"
}

tpu_vm() { # gcloud's tpu-vm command: SUBCOMMAND ARGUMENTS
  gcloud compute tpus tpu-vm "$@" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"}
}

on() { # WORKER (a number, or all) FUNCTION ARGUMENTS
  local worker=$1 command
  shift
  command="$(declare -f on_worker_pid "$1")
set -euo pipefail; mkdir -p ~/dapo_jax; cd ~/dapo_jax; $(printf '%q ' "$@")"
  tpu_vm ssh "$TPU_NAME" --worker="$worker" --command="$command"
}

send_checkout() { # tracked files and new ones, as they are now
  local archive=dapo_jax_source.tar.gz folder root
  root=$(git rev-parse --show-toplevel) || { echo "install: run it in a checkout, or name a GIT_URL" >&2; exit 2; }
  folder=$(mktemp -d)
  (
    cd "$root"
    git ls-files -z --cached --others --exclude-standard | tar -czf "$folder/$archive" --null --files-from=-
  )
  tpu_vm scp "$folder/$archive" "$TPU_NAME:" --worker=all
  rm -r "$folder"
  on all on_worker_unpack "$archive"
}

[[ -n "${TPU_NAME:-}" && -n "${ZONE:-}" ]] || usage
subcommand=${1:-}
shift || usage
case "$subcommand" in
  install)
    if [[ $# -eq 0 ]]; then
      send_checkout
    else
      on all on_worker_clone "$1" "${2:-HEAD}"
    fi
    on all on_worker_install
    ;;
  run) on all on_worker_run "$@" ;;
  logs)
    if [[ $# -eq 0 ]]; then
      on all on_worker_logs
    else
      on "$1" on_worker_follow
    fi
    ;;
  stop) on all on_worker_stop "${1:-120}" ;;
  exec)
    [[ $# -gt 0 ]] || usage
    tpu_vm ssh "$TPU_NAME" --worker=all --command="$*"
    ;;
  *) usage ;;
esac
