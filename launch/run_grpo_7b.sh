#!/usr/bin/env bash
# GRPO of a 7B model (or of any recipe in configs/) on Ascend NPUs, on CUDA GPUs, or its structure on two CPU cores.
#
#   bash launch/run_grpo_7b.sh [--device npu|cuda|cpu] [--backend megatron|fsdp] [--config OVERLAY.yaml ...]
#                              [--dry-run [--full]] [key=value ...]
#
# RECIPE             the configuration, configs/grpo_qwen2.5_7b.yaml unless set
# PA_NPU_MODEL       HF directory of the model       (or model.path=DIR; else as the recipe says)
# PA_NPU_TRAIN       training prompts                (or data.train=FILE)
# PA_NPU_TEST        held-out prompts                (or data.test=FILE)
# PA_NPU_VENV        environment of trainers, coordinator and launcher, .venv unless set
# PA_NPU_ENGINE_PYTHON  interpreter of the engines' own environment (or rollout.python=PYTHON)
# Several nodes: launch/slurm.sh, launch/kuberay.yaml and docs/multi_node.md.
# Nothing is downloaded on npu and cuda. On cpu, missing packages are installed into .venv as for run_grpo_tiny.sh (not with
# PA_NPU_INSTALL=0), and a tiny model is made in .cache/tiny unless PA_NPU_MODEL names one.
set -euo pipefail
# shellcheck source=launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

device=npu dry_run='' full=''
configs=() overrides=()
while [ $# -gt 0 ]; do
  case $1 in
    --device | --backend | --config)
      [ $# -ge 2 ] || fail "$1: needs a value; see the head of launch/run_grpo_7b.sh"
      case $1 in
        --device) device=$2 ;;
        --backend)
          case $2 in
            megatron) ;;
            fsdp) configs+=(--config configs/backends/fsdp.yaml) ;;
            *) fail "--backend: $2 is not megatron or fsdp" ;;
          esac
          ;;
        --config) configs+=(--config "$2") ;;
      esac
      shift
      ;;
    --device-memory-gib)
      [ $# -ge 2 ] || fail "$1: needs a value"
      configs+=("$1" "$2")
      shift
      ;;
    --dry-run) dry_run=1 ;;
    --full) full=1 ;;
    -*) fail "$1: unknown option; see the head of launch/run_grpo_7b.sh" ;;
    *=*) overrides+=("$1") ;;
    *) fail "$1: neither an option nor key=value; see the head of launch/run_grpo_7b.sh" ;;
  esac
  shift
done

# The value of a key on the command line, else $2.
given() {
  local override value=$2
  for override in ${overrides[@]+"${overrides[@]}"}; do
    [ "${override%%=*}" = "$1" ] && value=${override#*=}
  done
  printf '%s' "$value"
}

# Environment variables stand for keys that the command line does not set.
from_environment() {
  local key=$1 value=$2
  [ -z "$value" ] || [ -n "$(given "$key" '')" ] || overrides+=("$key=$value")
}

start=$PWD
cd "$ROOT"
recipe=${RECIPE:-configs/grpo_qwen2.5_7b.yaml}
[ -f "$recipe" ] || recipe=$start/$recipe
[ -f "$recipe" ] || fail "RECIPE: ${RECIPE:-} does not exist; name one of configs/grpo_*.yaml"
case $device in
  cpu)
    setup_environment cpu
    [ -n "${PA_NPU_MODEL:-}" ] || "$PYTHON" tools/make_tiny_model.py --out .cache/tiny
    configs+=(--config configs/clusters/cpu_tiny.yaml)
    ;;
  npu | cuda)
    use_environment "$device" "$(given rollout.python "${PA_NPU_ENGINE_PYTHON:-}")" "$dry_run"
    ;;
  *) fail "--device: $device is not npu, cuda or cpu" ;;
esac
from_environment rollout.python "${PA_NPU_ENGINE_PYTHON:-}"
from_environment model.path "${PA_NPU_MODEL:-}"
from_environment data.train "${PA_NPU_TRAIN:-}"
from_environment data.test "${PA_NPU_TEST:-}"
exec "$PYTHON" -m pa_npu.launcher run --config "$recipe" ${configs[@]+"${configs[@]}"} --device "$device" \
  ${dry_run:+--dry-run} ${full:+--full} ${overrides[@]+"${overrides[@]}"}
