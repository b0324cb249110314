#!/usr/bin/env bash
# A job of one node with 8 GPUs: sbatch examples/slurm.sh train.py
# Of two nodes:                  sbatch --nodes=2 examples/slurm.sh train.py
# The program's Trainer has devices=8, num_nodes=1 or 2, and on two nodes
# AutoTPStrategy(tensor_parallel_size=8, data_parallel_size=2): one copy of the model on each node.
#SBATCH --job-name=autotp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=SIGUSR1@90
#SBATCH --output=%x-%j.out

# 90 seconds before the end SLURM's signal lets Lightning save a checkpoint and put the job into the queue again.
set -euo pipefail
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-8}"

srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 lightning-autotp doctor # on every node, before the job takes its time
srun --kill-on-bad-exit=1 python "$@"
