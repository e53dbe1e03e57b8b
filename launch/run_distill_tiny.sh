#!/usr/bin/env bash
# A small Qwen2 learns arithmetic from a larger one on two CPU cores, from installation to summary.
# Usage: bash launch/run_distill_tiny.sh [--dry-run] [key=value ...]   (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tiny.sh"
make_tiny tiny "a small model that slips at sums"
make_tiny tiny_teacher "a larger one that does not" --hidden 192 --layers 4 --slip-rate 0
run_recipe distill_tiny "$@"
