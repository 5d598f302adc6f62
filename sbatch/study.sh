# shellcheck shell=bash
# What the study scripts beside this file share. They source it.
#
# Environment variables, all optional, beside those of traced_training.sh:
#   HPCPACE_SBATCH_ARGS  options of sbatch for each job: `-p gpu -A me --exclusive --gpus-per-node 2 -t 240`
#   HPCPACE_STUDY        nano-cluster, or model-size: what nano_cluster.sh plans
#   HPCPACE_STUDY_WAIT   1: wait for the jobs, with a progress line, instead of leaving them to Slurm
#   HPCPACE_STUDY_SUBMIT 1: submit jobs also from within a job

# shellcheck source=traced_training.sh
source "${BASH_SOURCE[0]%/*}/traced_training.sh"

studies=("${hpcpace[@]}" study)

_most_failures=2

# submit NAME OPTION... SCRIPT ARGUMENT...: submit a job and print its number. Jobs of one name run one after the other,
# for side by side they would disturb what they measure.
submit() {
    local name=$1 args=()
    shift
    read -ra args <<<"${HPCPACE_SBATCH_ARGS:-}"
    sbatch --parsable --job-name "$name" --dependency singleton "${args[@]}" "$@"
}

# follow STUDY JOB...: with HPCPACE_STUDY_WAIT, show how far the study is until its jobs have ended.
follow() {
    local study=$1 shown='' line list
    shift
    list=$(IFS=,; echo "$*")
    [[ -n ${HPCPACE_STUDY_WAIT:-} ]] || { echo "squeue -j $list; once they have ended, the same command shows or goes on"; return; }
    while [[ -n $(squeue -h -j "$list" -o %i 2>/dev/null) ]]; do
        line=$("${studies[@]}" status "$study")
        [[ $line == "$shown" ]] || echo "$line"
        shown=$line
        sleep 10
    done
    "${studies[@]}" status "$study"
}

# study_job STUDY LAYOUT: do all open runs of a layout in this job. A run that ends the ranks, as one out of memory does,
# costs a start; the study then goes on behind it.
study_job() {
    local study=$1 layout=$2 failures=0 before after status
    local cpus_per_task=${SLURM_CPUS_PER_TASK:-1} srun_args=()
    read -ra srun_args <<<"${HPCPACE_SRUN_ARGS:-}"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_task} PYTHONUNBUFFERED=1
    before=$("${studies[@]}" left "$study" --layout "$layout")
    ((!before)) || audit_first "$layout" "$study/audit/$layout"
    while ((before)); do
        status=0
        srun --ntasks "$num_tasks" -c "$cpus_per_task" --kill-on-bad-exit=1 ${HPCPACE_MPI:+"--mpi=$HPCPACE_MPI"} \
            "${srun_args[@]}" "${studies[@]}" series "$study" --layout "$layout" || status=$?
        # A wrong launch, and a signal that ends the job, do not get better by another start.
        ((status != 1 && status != 2)) || exit "$status"
        after=$("${studies[@]}" left "$study" --layout "$layout")
        if ((after < before)); then failures=0; else failures=$((failures + 1)); fi
        ((failures <= _most_failures)) || refuse "layout $layout: $after runs are left, and no start gets on (status $status)"
        before=$after
    done
    "${studies[@]}" status "$study"
}
