#!/usr/bin/env bash
# A small Qwen2 learns two tasks from two teachers on two CPU cores, from installation to summary.
# Usage: bash launch/run_distill_two_tiny.sh [--dry-run] [key=value ...]   (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tiny.sh"
make_tiny tiny_both "a small model that slips at sums and mostly guesses products" --task both
make_tiny tiny_teacher "a larger one that does not slip" --hidden 192 --layers 4 --slip-rate 0
make_tiny tiny_caller "one that asks a calculator for products" --task calculator --call-rate 1
run_recipe distill_two_tiny "$@"
