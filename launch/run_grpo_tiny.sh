#!/usr/bin/env bash
# The quick start: a small Qwen2 learns arithmetic with GRPO on two CPU cores, from installation to summary.
# Usage: bash launch/run_grpo_tiny.sh [--dry-run] [key=value ...]      (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
setup_environment cpu
cd "$ROOT"
[ -d .cache/tiny ] || echo "making a small model that slips at sums, and its questions (once; about a minute)"
"$PYTHON" tools/make_tiny_model.py --out .cache/tiny
exec "$PYTHON" -m pa_npu.launcher run --config configs/grpo_tiny.yaml "$@"
