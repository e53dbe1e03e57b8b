#!/usr/bin/env bash
# A small Qwen2 learns two tasks from two teachers on two CPU cores, from installation to summary.
# Usage: bash launch/run_distill_two_tiny.sh [--dry-run] [key=value ...]   (pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
setup_environment cpu
cd "$ROOT"
[ -d .cache/tiny_caller ] || echo "making a small model that slips at sums, a larger one that does not, and one that asks a calculator (once; some minutes)"
"$PYTHON" tools/make_tiny_model.py --out .cache/tiny
"$PYTHON" tools/make_tiny_model.py --out .cache/tiny_teacher --hidden 192 --layers 4 --slip-rate 0
"$PYTHON" tools/make_tiny_model.py --out .cache/tiny_caller --task calculator --call-rate 1
mkdir -p .cache/two
sed 's/^{/{"teacher": "sums", /' .cache/tiny/train.jsonl >.cache/two/sums.jsonl
sed 's/^{/{"teacher": "products", /' .cache/tiny_caller/train.jsonl >.cache/two/products.jsonl
exec "$PYTHON" -m pa_npu.launcher run --config configs/distill_two_tiny.yaml "$@"
