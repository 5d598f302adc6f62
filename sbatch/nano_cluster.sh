#!/usr/bin/env bash
# The nano-cluster study: GPT-2 in data, tensor and pipeline parallelism, and ResNet-18, over 1x1, 1x2, 2x1 and 2x2
# servers x ranks, several batches, five repetitions.
#
#   bash sbatch/nano_cluster.sh STUDY [OPTION...]          plans the study, and submits a job for each layout
#   bash sbatch/nano_cluster.sh STUDY                      once more: submits what is not done yet
#   python analysis/nano_cluster.py STUDY                  tables and plots beside the published values
#
# Options are those of `hpcpace study nano-cluster --help`, such as --batches, --steps and --repetitions.
# HPCPACE_STUDY=model-size plans the study of model sizes instead. docs/studies.md is the guide, study.sh lists the
# environment variables.
#SBATCH --job-name=nano_cluster
#SBATCH --output=%x-%j.out
set -euo pipefail

script=$(realpath -- "${BASH_SOURCE[0]}")
if [[ ! -f ${script%/*}/study.sh ]]; then
    # sbatch runs a copy from Slurm's spool folder. Slurm knows the original by its path, as a rule from the folder of
    # submission, and the arguments behind it, all unquoted: what is left without the arguments is the path.
    job=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    script=$(unset "${!SQUEUE_@}" && squeue --noheader --jobs "$job" --format %o && echo .) || script=''
    script=${script%"${1+ $*}"$'\n.'}
    [[ $script == /* ]] || script=${SLURM_SUBMIT_DIR:-}/$script
fi
folder=${script%/*}
[[ $script == *.sh && -f $folder/study.sh ]] ||
    { echo "nano_cluster.sh: cannot find its folder: submit it by its path, not from a pipe" >&2; exit 2; }
# shellcheck source=study.sh
source "$folder/study.sh"

(($# > 0)) || refuse "nano_cluster.sh STUDY [OPTION...]: name the folder of the study"
study=$1

if [[ -n ${SLURM_JOB_ID:-} && -z ${HPCPACE_STUDY_SUBMIT:-} ]]; then
    study_job "$study" "${SLURM_JOB_NUM_NODES}x$((num_tasks / SLURM_JOB_NUM_NODES))"
    exit 0
fi

"${studies[@]}" "${HPCPACE_STUDY:-nano-cluster}" "$study" "${@:2}"
jobs=()
while read -r layout servers ranks; do
    job=$(submit nano_cluster --nodes "$servers" --ntasks-per-node "$ranks" "$folder/nano_cluster.sh" "$study")
    echo "layout $layout: job $job"
    jobs+=("$job")
done < <("${studies[@]}" layouts "$study")
((${#jobs[@]})) || { "${studies[@]}" status "$study"; exit 0; }
follow "$study" "${jobs[@]}"
