#!/usr/bin/env bash
# The nano-cluster study: GPT-2 in data, tensor and pipeline parallelism, and ResNet-18, over 1x1, 1x2, 2x1 and 2x2
# servers x ranks, with several batch sizes and five repetitions.
#
#   bash sbatch/nano_cluster.sh STUDY [OPTION...]          plans the study and submits a job for each layout
#   bash sbatch/nano_cluster.sh STUDY                      again: submits what is not done yet
#   python analysis/nano_cluster.py STUDY                  tables and plots, with the published values
#
# Options are those of `hpcpace study nano-cluster --help`, such as --batches, --steps and --repetitions.
# HPCPACE_STUDY=model-size plans the study of model sizes instead. docs/scale.md is the guide, study.sh lists the
# environment variables.
#SBATCH --job-name=nano_cluster
#SBATCH --output=%x-%j.out
set -euo pipefail

if [[ -n ${HPCPACE_PRELUDE:-} ]]; then
    # Environment modules and site files seldom work under `set -eu`; `source` searches PATH for a name without a slash.
    set +eu
    [[ $HPCPACE_PRELUDE == */* || ! -f $HPCPACE_PRELUDE ]] || HPCPACE_PRELUDE=./$HPCPACE_PRELUDE
    # shellcheck disable=SC1090 # the user's own file
    if [[ -f $HPCPACE_PRELUDE ]]; then source -- "$HPCPACE_PRELUDE"; else eval "$HPCPACE_PRELUDE"; fi ||
        { echo "hpcpace: HPCPACE_PRELUDE ended with status $?: see what it printed above" >&2; exit 2; }
    set -eu
fi
# Where hpcpace is if PATH has none. `hpcpace sbatch` fills this in; a checkout has it in .venv.
hpcpace=
if [[ -z $hpcpace ]]; then
    script=$(realpath -- "${BASH_SOURCE[0]:-/}")
    if [[ -n ${SLURM_JOB_ID:-} && $script != *.sh ]]; then
        # sbatch runs a copy from Slurm's spool folder. Slurm knows the original by its path, as a rule from the folder
        # of submission, and the arguments behind it, all unquoted: what is left without the arguments is the path.
        job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
        script=$(unset "${!SQUEUE_@}" && squeue --noheader --jobs "$job" --format %o 2>/dev/null && echo .) || script=''
        script=${script%"${1+ $*}"$'\n.'}
        [[ $script == /* ]] || script=${SLURM_SUBMIT_DIR:-}/$script
    fi
    [[ $script != *.sh ]] || hpcpace=${script%/*/*}/.venv/bin/hpcpace
fi
command=("$(type -P hpcpace || echo "$hpcpace")")
if [[ ! -x ${command[0]} ]]; then
    [[ -n ${HPCPACE_PYTHON:-} ]] ||
        { echo "hpcpace: no hpcpace on PATH or at '$hpcpace': set HPCPACE_PRELUDE (docs/site.md)" >&2; exit 2; }
    # Quotes keep blanks, as in a shell; xargs runs and expands nothing.
    words=$(xargs -r printf '%s\n' <<<"$HPCPACE_PYTHON") ||
        { echo "hpcpace: HPCPACE_PYTHON has a quote that is not closed: close it, or leave it out" >&2; exit 2; }
    mapfile -t command <<<"$words"
    command+=(-P -m hpcpace)
fi

refuse() {
    echo "hpcpace: $1" >&2
    exit 2
}

(($# > 0)) || refuse "nano_cluster.sh STUDY [OPTION...]: name the folder of the study"
study=$1
if [[ -n ${SLURM_JOB_ID:-} && -z ${HPCPACE_STUDY_SUBMIT:-} ]]; then
    exec "${command[@]}" batch --name nano_cluster -- study series "$study"
fi
folder=${script%/*}
[[ -f $folder/study.sh ]] || refuse "nano_cluster.sh: cannot find its folder: run it by its path, not from a pipe"
# shellcheck source=study.sh
source "$folder/study.sh"

"${studies[@]}" "${HPCPACE_STUDY:-nano-cluster}" "$study" "${@:2}"
jobs=()
while read -r layout servers ranks; do
    job=$(submit nano_cluster --nodes "$servers" --ntasks-per-node "$ranks" "$folder/nano_cluster.sh" "$study")
    echo "layout $layout: job $job"
    jobs+=("$job")
done < <("${studies[@]}" layouts "$study")
((${#jobs[@]})) || { "${studies[@]}" status "$study"; exit 0; }
follow "$study" "${jobs[@]}"
