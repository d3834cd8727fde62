#!/usr/bin/env bash
# Everything that can be tested without an accelerator, in full. CI runs a part of it in each stage (.ci/run).
#
#   bash scripts/test_everything.sh
#
# Run it before a release, and after a change of a kernel or of a pinned version. docs/reliability.md has the last result.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$(dirname "$0")/.."
bash scripts/test.sh --everything
bash scripts/test_combinations.sh
bash scripts/test_pythons.sh
DAPO_JAX_COMPILE_ALL=1 bash scripts/test_accelerators.sh
bash scripts/test_package.sh
bash scripts/docs/build_site.sh
