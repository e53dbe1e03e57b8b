#!/usr/bin/env bash
# SLURM: one launcher per node; node 0 of the job is the head.
#
#   sbatch --nodes 4 launch/slurm.sh --device npu --config configs/clusters/7b_4_nodes.yaml [key=value ...]
#
# Arguments are those of launch/run_grpo_7b.sh. RECIPE, PA_NPU_MODEL, PA_NPU_TRAIN, PA_NPU_TEST, PA_NPU_VENV and
# PA_NPU_ENGINE_PYTHON reach the nodes with the environment. Repository, model, data and run.dir must be on a file system that
# all nodes share. Ask for all devices of a node in your cluster's way: --gres=npu:8, --gpus-per-node=8.
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
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PA_NPU_HEAD=${hosts%%$'\n'*} PA_NPU_ROOT=$root

# SLURM_NODEID exists only inside the step. One launcher that ends takes the others with it.
# shellcheck disable=SC2016
exec srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --kill-on-bad-exit=1 \
  bash -c 'exec bash "$PA_NPU_ROOT/launch/run_grpo_7b.sh" --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
    --master-addr "$PA_NPU_HEAD" "$@"' run_grpo_7b "$@"
