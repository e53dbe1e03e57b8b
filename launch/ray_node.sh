#!/usr/bin/env bash
# Make this machine a node of a Ray cluster, in the environment that the run's processes on it get; stays until it is stopped.
#
#   bash launch/ray_node.sh --device npu|cuda|cpu head ADDRESS:PORT [ray start options ...]
#   bash launch/ray_node.sh --device npu|cuda|cpu worker ADDRESS:PORT [ray start options ...]
#
# ADDRESS:PORT is the head's on both. PA_NPU_VENV and PA_NPU_ENGINE_PYTHON as for launch/run_grpo_7b.sh; the environment needs the
# extra "ray" (pip install -e '.[ray]'). Ray finds NPUs and GPUs by itself.
set -euo pipefail
# shellcheck source=launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[ $# -ge 4 ] && [ "$1" = --device ] || fail "usage: ray_node.sh --device npu|cuda|cpu head|worker ADDRESS:PORT [options]"
device=$2 role=$3 address=$4
shift 4
case $device in
  npu | cuda) use_environment "$device" "${PA_NPU_ENGINE_PYTHON:-}" '' ;;
  cpu) ;;
  *) fail "--device: $device is not npu, cuda or cpu" ;;
esac
"$PYTHON" -c 'import ray' 2>/dev/null || fail "Ray is not installed in $VENV; pip install -e '.[ray]'"
# Engines and trainers are no workers of Ray: it must not end their host when they fill the machine's memory.
export RAY_memory_monitor_refresh_ms=0
cd "$ROOT"
common=(--disable-usage-stats --block "$@")
case $role in
  head)
    exec "$PYTHON" -m ray.scripts.scripts start --head --node-ip-address "${address%:*}" --port "${address##*:}" \
      --include-dashboard false "${common[@]}"
    ;;
  worker) exec "$PYTHON" -m ray.scripts.scripts start --address "$address" "${common[@]}" ;;
  *) fail "$role is not head or worker" ;;
esac
