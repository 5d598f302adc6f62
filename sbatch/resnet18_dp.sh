#!/usr/bin/env bash
# Trains ResNet-18 on 32 x 32 images with data parallelism, traced, and reports where the time of the steps went.
#
#   sbatch sbatch/resnet18_dp.sh
#   sbatch -N 4 --ntasks-per-node 4 -c 8 --gpus-per-node 4 sbatch/resnet18_dp.sh --data cifar-10-batches-bin --steps 2000
#   bash sbatch/resnet18_dp.sh                    (without Slurm: the same job on this machine)
#
# Arguments are passed to `hpcpace train resnet18`; traced_training.sh lists the environment variables.
# Each task is a replica of the model with 32 images per step. Images are synthetic unless `--data` names the folder of
# CIFAR-10's binary version.
#SBATCH --job-name=resnet18_dp
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

script=$(realpath -- "${BASH_SOURCE[0]}")
if [[ ! -f ${script%/*}/traced_training.sh ]]; then
    # sbatch runs a copy from Slurm's spool folder. Slurm knows the original by its path, as a rule from the folder of
    # submission, and the arguments behind it, all unquoted: what is left without the arguments is the path.
    job=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    script=$(unset "${!SQUEUE_@}" && squeue --noheader --jobs "$job" --format %o && echo .) || script=''
    script=${script%"${1+ $*}"$'\n.'}
    [[ $script == /* ]] || script=${SLURM_SUBMIT_DIR:-}/$script
fi
folder=${script%/*}
[[ $script == *.sh && -f $folder/traced_training.sh ]] ||
    { echo "resnet18_dp.sh: cannot find its folder: submit it by its path, not from a pipe" >&2; exit 2; }
# shellcheck source=traced_training.sh
source "$folder/traced_training.sh"

samples_per_task=32
traced_training resnet18_dp "dp=$num_tasks,pp=1,tp=1" resnet18 "$@"
