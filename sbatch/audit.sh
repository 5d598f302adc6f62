#!/usr/bin/env bash
# Audits the nodes of a job and the binding of its ranks, without training.
#
#   sbatch -N 4 --ntasks-per-node 8 -c 14 --gpus-per-node 8 sbatch/audit.sh
#   sbatch -w n[01-16] --ntasks-per-node 8 sbatch/audit.sh --probe 10 --matrix
#   bash sbatch/audit.sh                      (without Slurm: this machine)
#
# Use the sbatch options of the job that you want to run. Arguments are passed to `hpcpace audit`, which also determines
# the exit status: 4 for a failure, 1 for a warning, 3 if something is unknown. traced_training.sh lists the environment
# variables. Snapshots are saved in runs/JOB-audit, for `hpcpace audit --from` and `hpcpace audit diff`.
#SBATCH --job-name=audit
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
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
    { echo "audit.sh: cannot find its folder: submit it by its path, not from a pipe" >&2; exit 2; }
# shellcheck source=traced_training.sh
source "$folder/traced_training.sh"

status=0
audit_ranks "${HPCPACE_RUN_DIR:-runs/${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}-audit}" "$@" || status=$?
((status != 124)) || echo "audit: not finished after $audit_timeout_s s: a node may be dead" >&2
exit "$status"
