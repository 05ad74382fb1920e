#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
# train.sh RECIPE [KEY=VALUE ...]: a rank per GPU. Ten minutes before its time is over the run saves, ends, and goes back into the queue
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" --rdzv-backend c10d \
  --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" --max-restarts 3 -m eyeline train "$@" &
job=$!
trap 'stopped=yes; kill -TERM "$job"' TERM
wait "$job"
code=$?
if [ -n "$stopped" ]; then
  wait "$job"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
