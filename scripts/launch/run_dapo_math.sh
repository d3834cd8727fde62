#!/usr/bin/env bash
# DAPO-Math-17k from end to end: prepares the data, checks that it fits, trains, evaluates, exports.
# In the environment with the package: on one host, or the same command on every host of a pod, in a folder that they share.
#
#   bash scripts/launch/run_dapo_math.sh [--config.model.path=DIR] [--config.workdir=DIR] [--config.key=value ...]
#
#   CONFIG     recipe (dapo_qwen2.5_7b_math, which has no group filter), or a file; it reads data/*.parquet
#   DAPO_FILE  dapo-math-17k.parquet as published; without it, it is downloaded from the Hugging Face hub
#   AIME_FILE  aime-2024.parquet, the same
#   TOPOLOGY   for the preflight: gpu or tpu on one host (gpu), on a pod its name, such as v5p:2x2x4; none leaves it out
#   OUTPUT     directory of the exported model (build/dapo_math); next to it OUTPUT-evaluation with metrics and generations
#   HOST       number of this process; process 0 exports (what TPU, GKE or Slurm say, else 0)
#   PYTHON     interpreter (python)
#
# Rerun the same command after a kill: data, model and evaluation get their names once they are complete, and are not
# made again; training resumes from its last checkpoint.
set -euo pipefail
case " $* " in *" -h "* | *" --help "*)
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"
  exit
  ;;
esac

python=${PYTHON:-python}
config=${CONFIG:-dapo_qwen2.5_7b_math}
topology=${TOPOLOGY:-gpu}
output=${OUTPUT:-build/dapo_math}
host=${HOST:-${TPU_WORKER_ID:-${JOB_COMPLETION_INDEX:-${SLURM_PROCID:-0}}}}

prepare() { # NAME PUBLISHED_FILE: the file may be empty
  "$python" -m dapo_jax.tools.data "$1" ${2:+--input "$2"}
}

preflight() {
  local report
  report=$(mktemp)
  "$python" -m dapo_jax.preflight --config "$config" "$@" --topology "$topology" --json "$report"
  "$python" -c 'import json, sys; sys.exit(0 if json.load(open(sys.argv[1]))["fits"] else 1)' "$report" || {
    echo "run_dapo_math: the run does not fit; the report above says what to change" >&2
    exit 2
  }
  rm -- "$report"
}

train() { # ends as training ends, also when this shell gets SIGTERM
  "$python" -m dapo_jax.train --config "$config" "$@" &
  local training=$! status=0
  trap 'kill -TERM "$training"' TERM INT
  wait "$training" || status=$?
  while kill -0 "$training" 2>/dev/null; do # the signal ended the wait, not the training
    status=0
    wait "$training" || status=$?
  done
  trap - TERM INT
  [[ "$status" -eq 0 ]] || exit "$status"
}

export_model() { # in the memory of one host, and as one process: the others of a pod are not asked
  JAX_PLATFORMS=cpu "$python" -m dapo_jax.export --config "$config" "$@" \
    --config.mesh.fsdp=1 --config.mesh.tensor=1 --config.trainer.num_processes=1 --output "$output"
}

prepare dapo-math-17k "${DAPO_FILE:-}"
prepare aime-2024 "${AIME_FILE:-}"
[[ "$topology" == none ]] || preflight "$@"
train "$@"
# On all hosts, as training; process 0 says whether it is missing, and writes.
"$python" -m dapo_jax.evaluate --config "$config" "$@" --all-steps --if-missing --output "$output-evaluation"
if [[ "$host" == 0 && ! -e "$output/config.json" ]]; then # last: no other host waits for it
  export_model "$@"
fi
