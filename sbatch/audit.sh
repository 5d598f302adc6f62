#!/usr/bin/env bash
# Audits the nodes of a job and the binding of its ranks, and trains nothing.
#
#   sbatch -N 4 --ntasks-per-node 8 -c 14 --gpus-per-node 8 sbatch/audit.sh
#   sbatch -w n[01-16] --ntasks-per-node 8 sbatch/audit.sh --probe 10 --matrix
#   bash sbatch/audit.sh                      (without Slurm: this machine)
#
# Give the options of the job that is to run; arguments go to `hpcpace audit`, and the exit status is its own: 4 where it
# finds a fault, 1 a warning, 3 something that it cannot tell. traced_training.sh lists the environment variables.
# Snapshots lie in runs/JOB-audit, for `hpcpace audit --from` and `hpcpace audit diff`.
#SBATCH --job-name=audit
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
set -euo pipefail

# sbatch runs a copy of this script from Slurm's spool folder; Slurm knows where the original lies.
folder=$(dirname "${BASH_SOURCE[0]}")
if [[ ! -f $folder/traced_training.sh ]]; then
    folder=$(scontrol show job "${SLURM_JOB_ID:-}" | sed -n 's|^ *Command=\(.*\)/audit\.sh.*|\1|p')
fi
[[ -n $folder ]] || { echo "audit.sh: cannot find its folder: submit it by its path, not from a pipe" >&2; exit 2; }
# shellcheck source=traced_training.sh
source "$folder/traced_training.sh"

status=0
audit_ranks "${HPCPACE_RUN_DIR:-runs/${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}-audit}" "$@" || status=$?
((status != 124)) || echo "audit: not done within $audit_timeout_s s: a node may be dead" >&2
exit "$status"
