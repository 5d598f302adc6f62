#!/usr/bin/env bash
# Baseline and policies of pacing over numbers of nodes: each a job of gpt2_dp.sh, several times, one after the other.
#
#   bash sbatch/pacing_trial.sh STUDY [OPTION...] [-- TRAINING...]   submits what is not done yet
#   bash sbatch/pacing_trial.sh STUDY --table                        throughput and variation beside the published table
#
#   --nodes 1,2,4            numbers of nodes
#   --ranks-per-node 4       ranks on each
#   --policies LIST          of `hpcpace train --pace`, and none; by default none, both published ones, slack, auto
#   --repetitions 3          runs of each
#   --steps 400              of each run
#   --with-trial             let a policy prove itself inside the job and go off where it does not; without this a
#                            policy is on from the start, whatever it does. auto and coschedule always have a trial
#
# TRAINING are further options of `hpcpace train gpt2`. docs/pacing.md is the guide, study.sh lists the environment
# variables; HPCPACE_PACE_... are the settings of pacing.
set -euo pipefail

script=$(realpath -- "${BASH_SOURCE[0]}")
folder=${script%/*}
# shellcheck source=study.sh
source "$folder/study.sh"

# show_table [OPTION...]: throughput and variation of the study's runs, beside which their audits lie.
show_table() {
    local run runs=()
    for run in "$study"/runs/*; do
        [[ $run == *-audit ]] || runs+=("$run")
    done
    exec "${python[@]}" "$repository/analysis/pacing_table.py" "${runs[@]}" "$@"
}

usage='pacing_trial.sh STUDY [OPTION...] [-- TRAINING...]'
(($# > 0)) && [[ $1 != -* ]] || refuse "$usage: name the folder of the study"
study=$1
shift
if [[ ${1:-} == --table ]]; then
    show_table "${@:2}"
fi
nodes=1,2,4 ranks_per_node=4 policies=none,published-window,published-spread,slack,auto repetitions=3 steps=400 trial=''
while (($# > 0)) && [[ $1 != -- ]]; do
    case $1 in
        --with-trial) trial=yes && shift && continue ;;
        --nodes | --ranks-per-node | --policies | --repetitions | --steps) ;;
        *) refuse "$usage: there is no option $1" ;;
    esac
    (($# > 1)) || refuse "$usage: $1 needs a value"
    case $1 in
        --nodes) nodes=$2 ;;
        --ranks-per-node) ranks_per_node=$2 ;;
        --policies) policies=$2 ;;
        --repetitions) repetitions=$2 ;;
        --steps) steps=$2 ;;
    esac
    shift 2
done
training=("${@:2}")
for number in ${nodes//,/ } "$ranks_per_node" "$repetitions" "$steps"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || refuse "$number is no number of nodes, ranks, repetitions or steps"
done

mkdir -p "$study/runs"
study=$(realpath "$study")
IFS=, read -ra names <<<"$policies"

is_done() {
    compgen -G "$1/attempt-*/result.json" >/dev/null
}

# Repetitions outside and policies inside, each time from another one on: what drifts over hours strikes all alike.
planned=()
for ((repetition = 0; repetition < repetitions; repetition++)); do
    for count in ${nodes//,/ }; do
        for ((index = 0; index < ${#names[@]}; index++)); do
            planned+=("$count ${names[(index + repetition) % ${#names[@]}]} $repetition")
        done
    done
done

number=0 jobs=()
for line in "${planned[@]}"; do
    read -r count policy repetition <<<"$line"
    name=n${count}x$ranks_per_node-$policy-$repetition number=$((number + 1))
    run=$study/runs/$name
    is_done "$run" && continue
    # What was stopped in the middle does not count, and does not get in the way.
    [[ ! -e $run ]] || mv "$run" "$study/.$name.$(date +%Y%m%d-%H%M%S)"
    export HPCPACE_RUN_DIR=$run HPCPACE_PACE_POLICY=$policy HPCPACE_PACE_TRIAL=false
    if [[ -n $trial || $policy == auto || $policy == coschedule ]]; then HPCPACE_PACE_TRIAL=true; fi
    jobs+=("$(submit pacing_trial --output "$study/$name.out" --nodes "$count" --ntasks-per-node "$ranks_per_node" \
        "$folder/gpt2_dp.sh" --steps "$steps" "${training[@]}")")
    echo "[$number/${#planned[@]}] $name: job ${jobs[-1]}"
done
((${#jobs[@]})) || echo "all ${#planned[@]} runs are done"
if [[ -n ${HPCPACE_STUDY_WAIT:-} ]]; then
    list=$(IFS=,; echo "${jobs[*]}")
    while ((${#jobs[@]})) && [[ -n $(squeue -h -j "$list" -o %i 2>/dev/null) ]]; do sleep 10; done
    show_table --out "$study/figures"
fi
echo "squeue --name pacing_trial; then: bash $0 $study --table"
