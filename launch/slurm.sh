#!/usr/bin/env bash
# SLURM: a Ray cluster on the nodes of the job, and the launcher on the first of them.
#
#   sbatch --nodes 4 launch/slurm.sh --device npu --config configs/clusters/7b_4_nodes.yaml [key=value ...]
#
# Arguments are those of launch/run_grpo_7b.sh. RECIPE, PA_NPU_MODEL, PA_NPU_TRAIN, PA_NPU_TEST, PA_NPU_VENV and
# PA_NPU_ENGINE_PYTHON reach the nodes with the environment. Repository, model, data and run.dir must be on a file system that
# all nodes share. Ask for all devices of a node in your cluster's way: --gres=npu:8, --gpus-per-node=8.
# PA_NPU_RAY_PORT: the head's port, 6379 unless set; another for each job where several share a node.
#SBATCH --job-name=pa_npu
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@60
set -euo pipefail

root=${PA_NPU_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
[ -f "$root/launch/run_grpo_7b.sh" ] || {
  echo "error: $root has no launch/run_grpo_7b.sh; submit from the repository's root, or name it in PA_NPU_ROOT" >&2
  exit 2
}
device=npu previous=''
for argument in "$@"; do
  [ "$previous" = --device ] && device=$argument
  previous=$argument
done
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
on_head=(srun --overlap --nodes 1 --ntasks 1 --nodelist "$head")
address=$("${on_head[@]}" hostname --ip-address | tr ' ' '\n' | grep -v '^127\.' | head -n 1):${PA_NPU_RAY_PORT:-6379}

# Ray ends with the job, and with it whatever a host still runs.
"${on_head[@]}" bash "$root/launch/ray_node.sh" --device "$device" head "$address" &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  workers=$((SLURM_JOB_NUM_NODES - 1))
  srun --overlap --nodes "$workers" --ntasks "$workers" --exclude "$head" \
    bash "$root/launch/ray_node.sh" --device "$device" worker "$address" &
fi
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# The launcher needs a node of the cluster to run on; that there are enough of them it waits for itself.
# shellcheck disable=SC2016
"${on_head[@]}" bash -c 'for _ in $(seq 120); do (exec 3<>"/dev/tcp/${0%:*}/${0##*:}") 2>/dev/null && break; sleep 1; done
  exec "$@"' "$address" env "RAY_ADDRESS=$address" bash "$root/launch/run_grpo_7b.sh" "$@" placement.cluster=ray
