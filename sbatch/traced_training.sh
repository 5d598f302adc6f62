# shellcheck shell=bash
# What the training scripts beside this file share. They source it, choose a mesh for $num_tasks, and call
# traced_training.
#
# Environment variables, all optional:
#   HPCPACE_PRELUDE     file to source, or command line to run, before anything else: `module load mpich cuda`
#   HPCPACE_PYTHON      command line of the Python that has hpcpace: `/sw/venv/bin/python`,
#                       `apptainer exec --nv train.sif python`; else `hpcpace` on PATH, else the repository's .venv
#   HPCPACE_MPI         srun's --mpi, such as pmi2 (MPICH) or pmix (Open MPI); else the site's default
#   HPCPACE_SRUN_ARGS   further options of srun: `--cpu-bind=cores`, `--container-image=train.sqsh`
#   HPCPACE_RANKS       ranks without Slurm, 4 unless set
#   HPCPACE_RUN_DIR     folder of the run, runs/JOB-NAME unless set
#   HPCPACE_TRAIN_...   settings of the training, such as HPCPACE_TRAIN_STEPS, read by hpcpace itself

repository=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")

refuse() {
    echo "hpcpace: $1" >&2
    exit 2
}

if [[ -n ${HPCPACE_PRELUDE:-} ]]; then
    # Environment modules and site files seldom bear `set -eu`.
    set +eu
    # shellcheck disable=SC1090 # the user's own file
    if [[ -f $HPCPACE_PRELUDE ]]; then source "$HPCPACE_PRELUDE"; else eval "$HPCPACE_PRELUDE"; fi ||
        refuse "HPCPACE_PRELUDE ended with status $?: $HPCPACE_PRELUDE"
    set -eu
fi

if [[ -n ${HPCPACE_PYTHON:-} ]]; then
    read -ra hpcpace <<<"$HPCPACE_PYTHON -m hpcpace"
elif command -v hpcpace >/dev/null; then
    hpcpace=(hpcpace)
elif [[ -x $repository/.venv/bin/hpcpace ]]; then
    hpcpace=("$repository/.venv/bin/hpcpace")
else
    refuse "no hpcpace on PATH or in $repository/.venv: run 'make install' there, or set HPCPACE_PYTHON or HPCPACE_PRELUDE"
fi

if [[ -n ${SLURM_JOB_ID:-} ]]; then
    num_tasks=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-1}))}
else
    num_tasks=${HPCPACE_RANKS:-4}
fi

# traced_training NAME MESH WORKLOAD [OPTION...]: train, report, and exit with the status of the training.
traced_training() {
    local name=$1 mesh=$2 workload=$3 status=0
    local run_dir=${HPCPACE_RUN_DIR:-runs/${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}-$name}
    # A requeued job goes on in its folder as a further attempt; another job must not join it.
    [[ ! -e $run_dir || ${SLURM_RESTART_COUNT:-0} -gt 0 ]] ||
        refuse "$run_dir exists already: name another folder by HPCPACE_RUN_DIR"

    local launch=() train=("${hpcpace[@]}" train "$workload" --run-dir "$run_dir")
    # Four sequences per task divide into four microbatches on every mesh.
    train+=(--mesh "${HPCPACE_TRAIN_MESH:-$mesh}" --batch-size "${HPCPACE_TRAIN_BATCH_SIZE:-$((4 * num_tasks))}")
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        local cpus_per_task=${SLURM_CPUS_PER_TASK:-1} srun_args=()
        read -ra srun_args <<<"${HPCPACE_SRUN_ARGS:-}"
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_task}
        # Since Slurm 22.05 srun no longer takes the CPUs per task from the job, so -c is given again.
        launch=(srun --ntasks "$num_tasks" -c "$cpus_per_task" --label --kill-on-bad-exit=1)
        launch+=(${HPCPACE_MPI:+"--mpi=$HPCPACE_MPI"} "${srun_args[@]}")
    else
        train+=(--ranks "$num_tasks")
    fi

    # Else the last lines of a rank that is killed stay in Python's buffer.
    export PYTHONUNBUFFERED=1
    "${launch[@]}" "${train[@]}" "${@:4}" || status=$?
    local reported=0
    "${hpcpace[@]}" report "$run_dir" || reported=$?
    # Status 1 is a report with something missing, as after a rank died.
    ((reported <= 1)) || echo "$name: no report, 'hpcpace report' ended with status $reported" >&2
    exit "$status"
}
