#!/usr/bin/env bash
# What a device computes and how fast, in at most six minutes (on cpu more, where it shows that it works):
#   bash tools/device_check.sh [--device cuda|npu|cpu] [--out FOLDER]
#
#   trainer   a step of a 1.5B shape in bf16, both backends, shared and separate prompts, beside
#             transformers: tokens/s, share of the peak, where the time goes (tools/bench_device.py)
#   run       the quick start with the transformers engine, engine and trainer on one device in turn
#   asleep    the same in bf16, the engine's memory and the optimizer's state off the device while
#             the other one works
#
# FOLDER gets trainer.md, and a log of each part; the last line says what failed. The environment is
# the one whose python3 is first on PATH. On cpu the step is that of a tiny model.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
device=cuda
out=device_check
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?--device: name cuda, npu or cpu} ;;
    --out) out=${2:?--out: name a folder} ;;
    *)
      echo "device_check.sh: $1 is not an option; use --device and --out" >&2
      exit 2
      ;;
  esac
  shift 2
done
case $device in cuda | npu | cpu) ;; *)
  echo "device_check.sh: --device: $device is not cuda, npu or cpu" >&2
  exit 2
  ;;
esac
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1
patience=1
[ "$device" = cpu ] && patience=3 # cores are slow, and other work may have them
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=()

# part NAME SECONDS COMMAND ...: runs it with a deadline, its output in NAME.log
part() {
  local name=$1 limit=$(($2 * patience)) start=$SECONDS
  shift 2
  if timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: done in $((SECONDS - start)) s"
  else
    echo "$name: FAILED after $((SECONDS - start)) s; the end of $out/$name.log:"
    tail -5 "$out/$name.log"
    failed+=("$name")
  fi
}

step=(--device "$device")
tiny_run=(run.device="$device" rollout.backend=transformers placement.colocate=true
  trainer.devices=1 rollout.engines=1 schedule.compare_iterations=0 data.test=null)
if [ "$device" = cpu ]; then
  step+=(--shape tiny --prompt 64 --response 32 --repetitions 3)
  tiny_run+=(schedule.prompts_per_iteration=8)
fi

part trainer 170 python3 tools/bench_device.py "${step[@]}" --markdown "$out/trainer.md"
part model 90 python3 tools/make_tiny_model.py --out .cache/tiny
part run 70 python3 -m pa_npu.launcher run --config configs/grpo_tiny.yaml "${tiny_run[@]}" \
  schedule.iterations=6 run.dir="$scratch/run"
# Memory of engines and optimizers is moved between device and host, of which cpu has one.
asleep=(model.dtype=bf16 schedule.iterations=3)
[ "$device" = cpu ] || asleep+=(rollout.sleep=true optimizer.offload=true)
part asleep 30 python3 -m pa_npu.launcher run --config configs/grpo_tiny.yaml "${tiny_run[@]}" \
  "${asleep[@]}" run.dir="$scratch/asleep"

[ ! -e "$out/trainer.md" ] || cat "$out/trainer.md"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all parts are done"
