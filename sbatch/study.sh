# shellcheck shell=bash
# Shared by the study scripts in this folder, which source it.
#
# Environment variables, all optional, in addition to those of docs/slurm.md:
#   HPCPACE_SBATCH_ARGS  options of sbatch for each job: `-p gpu -A me --exclusive --gpus-per-node 2 --comment "a b"`
#   HPCPACE_STUDY        what nano_cluster.sh plans: nano-cluster or model-size
#   HPCPACE_STUDY_WAIT   1: wait for the jobs and show progress, instead of leaving them to Slurm
#   HPCPACE_STUDY_SUBMIT 1: submit jobs even from inside a job

repository=$(realpath -- "${BASH_SOURCE[0]}")
repository=${repository%/*/*}

refuse() {
    echo "hpcpace: $1" >&2
    exit 2
}

if [[ -n ${HPCPACE_PRELUDE:-} ]]; then
    # Environment modules and site files seldom work under `set -eu`; `source` searches PATH for a name without a slash.
    set +eu
    [[ $HPCPACE_PRELUDE == */* || ! -f $HPCPACE_PRELUDE ]] || HPCPACE_PRELUDE=./$HPCPACE_PRELUDE
    # shellcheck disable=SC1090 # the user's own file
    if [[ -f $HPCPACE_PRELUDE ]]; then source -- "$HPCPACE_PRELUDE"; else eval "$HPCPACE_PRELUDE"; fi ||
        refuse "HPCPACE_PRELUDE ended with status $?: see what it printed above"
    set -eu
fi

# words_of VARIABLE: print the words of a variable, one a line. Quotes keep blanks, as in a shell; xargs runs and expands
# nothing.
words_of() {
    xargs -r printf '%s\n' <<<"${!1:-}" || refuse "$1 has a quote that is not closed: close it, or leave it out"
}

if [[ -n ${HPCPACE_PYTHON:-} ]]; then
    # -P: do not search the working folder for modules.
    words=$(words_of HPCPACE_PYTHON)
    mapfile -t hpcpace <<<"$words"
    hpcpace+=(-P -m hpcpace)
elif command -v hpcpace >/dev/null; then
    hpcpace=(hpcpace)
elif [[ -x $repository/.venv/bin/hpcpace ]]; then
    hpcpace=("$repository/.venv/bin/hpcpace")
else
    refuse "no hpcpace on PATH or in $repository/.venv: run 'make install' there, or set HPCPACE_PYTHON or HPCPACE_PRELUDE"
fi
studies=("${hpcpace[@]}" study)

# say_next NAME STUDY: print how to go on, as a line to paste.
say_next() {
    printf 'squeue --name %s; then: bash %q %q --table\n' "$1" "$0" "$2"
}

# submit NAME OPTION... SCRIPT ARGUMENT...: submit a job and print its number. Jobs of one name run one after the other:
# side by side they would disturb each other's measurements.
submit() {
    local name=$1 words args=() job
    shift
    words=$(words_of HPCPACE_SBATCH_ARGS) || return
    [[ -z $words ]] || mapfile -t args <<<"$words"
    job=$(sbatch --parsable --job-name "$name" --dependency singleton "${args[@]}" "$@") || return
    # With several clusters it is "17;cluster".
    echo "${job%%;*}"
}

# follow STUDY JOB...: with HPCPACE_STUDY_WAIT, show progress until the study's jobs have ended.
follow() {
    local study=$1 shown='' line list
    shift
    list=$(IFS=,; echo "$*")
    [[ -n ${HPCPACE_STUDY_WAIT:-} ]] || { echo "squeue -j $list; once they have ended, run the same command again to see or continue the study"; return; }
    while [[ -n $(squeue -h -j "$list" -o %i 2>/dev/null) ]]; do
        line=$("${studies[@]}" status "$study")
        [[ $line == "$shown" ]] || echo "$line"
        shown=$line
        sleep 10
    done
    "${studies[@]}" status "$study"
}
