#!/usr/bin/env bash
# Baseline and policies of pacing over numbers of nodes: each a job of gpt2_dp.sh, several times, one after the other.
#
#   bash sbatch/pacing_trial.sh STUDY [OPTION...] [-- TRAINING...]   submits what is not done yet
#   bash sbatch/pacing_trial.sh STUDY --table                        throughput and variation, and the published table
#
# Options are those of `hpcpace study pacing --help`; TRAINING are further options of `hpcpace train gpt2`. docs/pacing.md
# is the guide, study.sh lists the environment variables; HPCPACE_PACE_... are the settings of pacing.
set -euo pipefail

script=$(realpath -- "${BASH_SOURCE[0]}")
folder=${script%/*}
# shellcheck source=study.sh
source "$folder/study.sh"

# The Python that runs hpcpace: the words before `-P -m hpcpace`, or the first line of the program.
if ((${#hpcpace[@]} > 1)); then
    python=("${hpcpace[@]:0:${#hpcpace[@]}-3}")
else
    read -ra python < <(sed -n '1s/^#! *//p' "$(command -v "${hpcpace[0]}")")
fi

# show_table [OPTION...]: show throughput and variation of the study's runs. Their audits are in the same folder.
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
options=()
while (($# > 0)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
done
training=("${@:2}")

# Before any folder is made: a wrong option ends the script here.
planned=$("${studies[@]}" pacing "$study" "${options[@]}")
mapfile -t planned <<<"$planned"
mkdir -p -- "$study/runs"
study=$(realpath -- "$study")

number=0 jobs=()
for line in "${planned[@]}"; do
    read -ra words <<<"$line"
    name=${words[1]} run=$study/runs/${words[1]} number=$((number + 1))
    [[ ${words[0]} == open ]] || continue
    # A run that was stopped in the middle does not count. It is moved out of the way.
    [[ ! -e $run ]] || mv "$run" "$study/.$name.$(date +%Y%m%d-%H%M%S)"
    export HPCPACE_RUN_DIR=$run HPCPACE_PACE_POLICY=${words[4]} HPCPACE_PACE_TRIAL=${words[5]}
    jobs+=("$(submit pacing_trial --output "$study/$name.out" --nodes "${words[2]}" --ntasks-per-node "${words[3]}" \
        "$folder/gpt2_dp.sh" "${words[@]:6}" "${training[@]}")")
    echo "[$number/${#planned[@]}] $name: job ${jobs[-1]}"
done
((${#jobs[@]})) || echo "all ${#planned[@]} runs are done"
if [[ -n ${HPCPACE_STUDY_WAIT:-} ]]; then
    list=$(IFS=,; echo "${jobs[*]}")
    while ((${#jobs[@]})) && [[ -n $(squeue -h -j "$list" -o %i 2>/dev/null) ]]; do sleep 10; done
    show_table --out "$study/figures"
fi
say_next pacing_trial "$study"
