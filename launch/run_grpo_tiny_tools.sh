#!/usr/bin/env bash
# A small Qwen2 learns to call a calculator with GRPO on two CPU cores, from installation to summary.
# Usage: bash launch/run_grpo_tiny_tools.sh [--dry-run] [key=value ...]      (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
setup_environment cpu
cd "$ROOT"
[ -d .cache/tools ] || echo "making a small model that guesses products, and its questions (once; about a minute)"
"$PYTHON" tools/make_tiny_model.py --out .cache/tools --task calculator
exec "$PYTHON" -m pa_npu.launcher run --config configs/grpo_tiny_tools.yaml "$@"
