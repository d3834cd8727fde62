#!/usr/bin/env bash
# Makes the reports of docs/scaling.md: JSON into docs/results, tables into the pages that show them.
# It needs no accelerator, and installs JAX's compilers for them as scripts/test_accelerators.sh does.
#
#   bash scripts/docs/preflight_reports.sh [name ...]
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_help "$@"
cd "$(dirname "$0")/../.."
use_environment test
use_compilers

report() { # name, arguments of the preflight
  local name="$1"
  shift
  if [[ -n "$chosen" && " $chosen " != *" $name "* ]]; then return; fi
  python -m dapo_jax.preflight "$@" --json "docs/results/preflight_$name.json" > /dev/null
}

chosen="$*"
long=(--lengths "lognormal:median=3000,sigma=1")
gsm8k=(--config configs/gsm8k.py --lengths "lognormal:median=200,sigma=0.6")
math=(--config configs/dapo_qwen2.5_7b_math.py "${long[@]}")
report gsm8k_l4 --config configs/gsm8k.py --topology l4:1
report gsm8k_h100 "${gsm8k[@]}" --topology h100:1
report gsm8k_1.5b_h100 "${gsm8k[@]}" --topology h100:1 --config.model.path=Qwen/Qwen2.5-1.5B-Instruct
report qwen3.5_h100 --config configs/qwen3.5_0.8b_gsm8k.py --topology h100:1
report qwen3.5_v5e --config configs/qwen3.5_0.8b_gsm8k.py --topology v5e:2x4 --config.mesh.fsdp=8
report 7b_h100 "${math[@]}" --topology h100:8
report 7b_2k_h100 --config configs/dapo_qwen2.5_7b.py --topology h100:8
report 7b_a100 --config configs/dapo_qwen2.5_7b_math.py --topology a100:8
report 32b_h100 --config configs/dapo_qwen2.5_32b_math.py "${long[@]}" --topology h100:4x8 --config.mesh.fsdp=4
report clip_cov_h100 --config configs/entropy_clip_cov.py --topology h100:8
report kl_cov_h100 --config configs/entropy_kl_cov.py --topology h100:8
report cpo_h100 --config configs/cpo.py --topology h100:8
report smollm3_h100 --config configs/smollm3_3b_math.py --topology h100:8
report smollm3_v5e --config configs/smollm3_3b_math.py --topology v5e:4x4 --config.mesh.fsdp=4 \
  --config.actor.ppo_micro_batch_size_per_device=1
report gemma3_v5e --config configs/gemma3_1b_gsm8k_lora.py --topology v5e:2x4
report gemma3_v6e --config configs/gemma3_1b_gsm8k_lora.py --topology v6e:1x1
report 30b_a3b_v5p --config configs/qwen3_30b_a3b_math.py --topology v5p:4x4x4
report 30b_a3b_h100 --config configs/qwen3_30b_a3b_math.py --topology h100:2x8 --config.mesh.fsdp=4 \
  --config.mesh.expert=1 --config.mesh.tensor=4
report 30b_a3b_h100_e2 --config configs/qwen3_30b_a3b_math.py --topology h100:2x8 --config.mesh.fsdp=8 \
  --config.mesh.expert=2
report qwen3.5_35b_h100 --config configs/qwen3.5_35b_a3b_math.py --topology h100:2x8
report gpt_oss_h100 --config configs/gpt_oss_20b_math.py --topology h100:2x8
report 32b_v5p --config configs/dapo_qwen2.5_32b_math.py "${long[@]}" --topology v5p:4x4x8
v5e=(--topology v5e:8x8 --config.mesh.fsdp=16 --config.mesh.tensor=4)
v5p=(--topology v5p:2x2x4 --config.mesh.fsdp=4 --config.mesh.tensor=4)
report 7b_v5e "${math[@]}" "${v5e[@]}" --config.actor.ppo_micro_batch_size_per_device=1
report 7b_v5p "${math[@]}" "${v5p[@]}"
report gsm8k_v5e "${gsm8k[@]}" --topology v5e:2x2 --config.mesh.fsdp=4
report gsm8k_v5e_8 "${gsm8k[@]}" --topology v5e:2x4 --config.mesh.fsdp=8
python scripts/docs/write_preflight_doc.py
