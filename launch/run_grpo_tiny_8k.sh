#!/usr/bin/env bash
# A small Qwen2 learns arithmetic with GRPO behind prompts of 8,000 tokens, which two ranks share, from installation to summary.
# Usage: bash launch/run_grpo_tiny_8k.sh [--dry-run] [key=value ...]      (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tiny.sh"
make_tiny tiny_8k "a small model that slips at sums behind 268 others" --examples 268 --max-positions 8448 \
  --train-questions 512 --test-questions 100
run_recipe grpo_tiny_8k "$@"
