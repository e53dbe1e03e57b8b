#!/usr/bin/env bash
# A small Qwen2 learns to call a calculator with GRPO on two CPU cores, from installation to summary.
# Usage: bash launch/run_grpo_tiny_tools.sh [--dry-run] [key=value ...]      (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tiny.sh"
make_tiny tools "a small model that guesses products" --task calculator
run_recipe grpo_tiny_tools "$@"
