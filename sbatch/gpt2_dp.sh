#!/usr/bin/env bash
# Trains GPT-2 with data parallelism, traced, and reports where the time of the steps went.
#
#   sbatch sbatch/gpt2_dp.sh
#   sbatch -N 4 --ntasks-per-node 4 -c 8 --gpus-per-node 4 sbatch/gpt2_dp.sh --preset small --steps 200
#   bash sbatch/gpt2_dp.sh                    (without Slurm: the same job on this machine)
#
# Arguments are passed to `hpcpace train gpt2`; traced_training.sh lists the environment variables.
# Each task is a replica of the model. `--mesh` selects another layout.
#SBATCH --job-name=gpt2_dp
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
    { echo "gpt2_dp.sh: cannot find its folder: submit it by its path, not from a pipe" >&2; exit 2; }
# shellcheck source=traced_training.sh
source "$folder/traced_training.sh"

traced_training gpt2_dp "dp=$num_tasks,pp=1,tp=1" gpt2 "$@"
