#!/usr/bin/env bash
# The scaling study: one workload in data parallelism over nodes, oversubscription of the uplinks and placement of the
# ranks; --faults adds a run for each failure mode. Every run is a job of gpt2_dp.sh with its own report.
#
#   bash sbatch/scaling_study.sh STUDY [OPTION...] [-- TRAINING...]   plans the study and submits what is not done yet
#   bash sbatch/scaling_study.sh STUDY --table                        one table of what the reports of all runs say
#
# Options are those of `hpcpace study scaling --help`; TRAINING are further options of `hpcpace train gpt2`.
# In a lab (`hpcpace lab run -- bash sbatch/scaling_study.sh ...`) each run gets the network that its name says, and
# the script waits for it. Elsewhere oversubscription is only part of a run's name, and jobs are left to Slurm.
# docs/scale.md is the guide, study.sh lists the environment variables.
set -euo pipefail

script=$(realpath -- "${BASH_SOURCE[0]}")
folder=${script%/*}
# shellcheck source=study.sh
source "$folder/study.sh"

(($# > 0)) || refuse "scaling_study.sh STUDY [OPTION...] [-- TRAINING...]: name the folder of the study"
study=$1
shift
if [[ ${1:-} == --table ]]; then
    exec "${studies[@]}" verdicts "$study"
fi
options=()
while (($# > 0)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
done
training=("${@:2}")

network='' faults=()
if [[ -n ${HPCPACE_LAB_NAME:-} ]]; then
    # Status 1 means that something is wrong in the lab, such as a fault.
    network=$("${hpcpace[@]}" lab status --json) || (($? == 1)) || refuse "no lab $HPCPACE_LAB_NAME is up"
fi

undo() {
    local fault
    for fault in "${faults[@]}"; do "${hpcpace[@]}" lab fault undo "$fault" >/dev/null || true; done
    faults=()
}
trap undo EXIT

# set_network NAME: give the lab the network of a run.
set_network() {
    local line words said
    while read -r line; do
        read -ra words <<<"$line"
        said=$("${hpcpace[@]}" lab fault "${words[@]}")
        faults+=("${said%% *}")
    done < <("${studies[@]}" scaling-network "$study" "$1" <<<"$network")
}

"${studies[@]}" scaling "$study" "${options[@]}"
study=$(realpath -- "$study")
only=()
[[ -n $network ]] || only=(--no-lab)
mapfile -t open < <("${studies[@]}" scaling-jobs "$study" "${only[@]}")
number=0 options_of_srun=${HPCPACE_SRUN_ARGS:-}
for line in "${open[@]}"; do
    read -ra words <<<"$line"
    name=${words[0]} number=$((number + 1))
    # A run that was stopped in the middle does not count. It is moved out of the way.
    [[ ! -e $study/runs/$name ]] || mv "$study/runs/$name" "$study/runs/.$name.$(date +%Y%m%d-%H%M%S)"
    export HPCPACE_RUN_DIR=$study/runs/$name
    how=(--output "$study/$name.out" --nodes "${words[1]}" --ntasks-per-node "${words[2]}")
    job=("$folder/gpt2_dp.sh" "${words[@]:4}" "${training[@]}")
    export HPCPACE_SRUN_ARGS="$options_of_srun --distribution=${words[3]}"
    if [[ -n $network ]]; then
        set_network "$name"
        submit scaling_study --wait "${how[@]}" "${job[@]}" >/dev/null || echo "$name: failed, see $study/$name.out" >&2
        undo
    else
        submit scaling_study "${how[@]}" "${job[@]}" >/dev/null
    fi
    echo "[$number/${#open[@]}] $name"
done
[[ -z $network ]] || exec "${studies[@]}" verdicts "$study"
say_next scaling_study "$study"
