# shellcheck shell=bash
# Shared by the study scripts in this folder, which source it.
#
# Environment variables, all optional, in addition to those of traced_training.sh:
#   HPCPACE_SBATCH_ARGS  options of sbatch for each job: `-p gpu -A me --exclusive --gpus-per-node 2 -t 240`
#   HPCPACE_STUDY        what nano_cluster.sh plans: nano-cluster or model-size
#   HPCPACE_STUDY_WAIT   1: wait for the jobs and show progress, instead of leaving them to Slurm
#   HPCPACE_STUDY_SUBMIT 1: submit jobs even from inside a job

# shellcheck source=traced_training.sh
source "${BASH_SOURCE[0]%/*}/traced_training.sh"

studies=("${hpcpace[@]}" study)

_most_failures=2

# submit NAME OPTION... SCRIPT ARGUMENT...: submit a job and print its number. Jobs of one name run one after the other:
# side by side they would disturb each other's measurements.
submit() {
    local name=$1 args=()
    shift
    read -ra args <<<"${HPCPACE_SBATCH_ARGS:-}"
    sbatch --parsable --job-name "$name" --dependency singleton "${args[@]}" "$@"
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

# study_job STUDY LAYOUT: do all open runs of a layout in this job. A run that ends the ranks, for example out of memory,
# costs one start; the study then continues with the next run.
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
        # Another start does not help after a wrong launch or a signal that ends the job.
        ((status != 1 && status != 2)) || exit "$status"
        after=$("${studies[@]}" left "$study" --layout "$layout")
        if ((after < before)); then failures=0; else failures=$((failures + 1)); fi
        ((failures <= _most_failures)) || refuse "layout $layout: $after runs are left, but new starts make no progress (status $status)"
        before=$after
    done
    "${studies[@]}" status "$study"
}
