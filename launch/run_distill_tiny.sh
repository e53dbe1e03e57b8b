#!/usr/bin/env bash
# A small Qwen2 learns arithmetic from a larger one on two CPU cores, from installation to summary.
# Usage: bash launch/run_distill_tiny.sh [--dry-run] [key=value ...]   (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
setup_environment cpu
cd "$ROOT"
[ -d .cache/tiny_teacher ] || echo "making a small model that slips at sums, and a larger one that does not (once; some minutes)"
"$PYTHON" tools/make_tiny_model.py --out .cache/tiny
"$PYTHON" tools/make_tiny_model.py --out .cache/tiny_teacher --hidden 192 --layers 4 --slip-rate 0
exec "$PYTHON" -m pa_npu.launcher run --config configs/distill_tiny.yaml "$@"
