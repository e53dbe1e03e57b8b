#!/usr/bin/env bash
# A small Qwen2 that knows nothing learns sums from solutions with mistakes, then from a reward, on two CPU cores, from installation to summary.
# Usage: bash launch/run_sft_grpo_tiny.sh [key=value ...]      (of the second run; pa-npu run --help lists the keys)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tiny.sh"
make_tiny tiny_random "a small model with random weights" --random
test=data.test=.cache/tiny_random/test.jsonl
if [ ! -d runs/sft_random/hf ]; then
  "$PYTHON" -m pa_npu.launcher run --config configs/sft_tiny.yaml run.dir=runs/sft_random model.path=.cache/tiny_random/model \
    data.train=.cache/tiny_random/demonstrations.jsonl "$test" \
    schedule.iterations=150 schedule.evaluate_every=50 optimizer.learning_rate=3e-3 optimizer.warmup_iterations=20
fi
run_recipe grpo_tiny run.dir=runs/sft_grpo_tiny model.path=runs/sft_random/hf data.train=.cache/tiny_random/train.jsonl "$test" \
  optimizer.learning_rate=1e-4 schedule.evaluate_every=5 "$@"
