#!/bin/bash
#SBATCH --job-name=drafter
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
# One task a node, whose launcher makes the node's ranks. Submitted again, it goes on where the last job stopped.
set -euo pipefail
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots=${SLURM_GPUS_ON_NODE:-8}/" > "hosts-$SLURM_JOB_ID"
FIRST=$(head -n 1 "hosts-$SLURM_JOB_ID" | cut -d' ' -f1)
export FIRST EXPERIMENT="${EXPERIMENT:-qwen3_8b}"
srun bash -c 'exec deepspeed --hostfile "hosts-$SLURM_JOB_ID" --no_ssh --node_rank "$SLURM_NODEID" \
    --master_addr "$FIRST" --master_port 29500 launch/train_drafter.py "+experiment=$EXPERIMENT"'
