#!/bin/bash
#SBATCH --cpus-per-task=8
# prepare.sh RECIPE DIR: one task of a job array; as a job of its own, all that is left. docs/offline.md says how to submit it
share=()
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
  share=(--shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
fi
exec srun eyeline prepare "$1" --out "$2" --workers "${SLURM_CPUS_PER_TASK:-1}" "${share[@]}"
