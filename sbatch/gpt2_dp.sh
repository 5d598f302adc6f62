#!/usr/bin/env bash
# Trains GPT-2 with data parallelism, traced, and reports where the time of the steps went.
#
#   sbatch sbatch/gpt2_dp.sh
#   sbatch -N 4 --ntasks-per-node 4 -c 8 --gpus-per-node 4 sbatch/gpt2_dp.sh --preset small --steps 200
#   bash sbatch/gpt2_dp.sh                    (without Slurm: the same job on this machine)
#
# Arguments are passed to `hpcpace train gpt2`; `hpcpace help slurm` lists the environment variables.
# Each task is a replica of the model. `--mesh` selects another layout.
#SBATCH --job-name=gpt2_dp
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
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
exec "${command[@]}" batch --name gpt2_dp -- train gpt2 "$@"
