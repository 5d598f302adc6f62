# shellcheck shell=bash
# Shared by the training scripts in this folder. They source this file, choose a mesh for $num_tasks, and call
# traced_training.
#
# Environment variables, all optional:
#   HPCPACE_PRELUDE     file to source, or command line to run, before everything else: `module load mpich cuda`
#   HPCPACE_PYTHON      command line of the Python with hpcpace installed: `/sw/venv/bin/python`,
#                       `apptainer exec --nv train.sif python`; by default `hpcpace` on PATH, or in .venv
#   HPCPACE_MPI         srun's --mpi, such as pmi2 (MPICH) or pmix (Open MPI); by default the site's default
#   HPCPACE_SRUN_ARGS   additional srun options: `--cpu-bind=cores`, `--container-image=train.sqsh`
#   HPCPACE_RANKS       number of ranks without Slurm; 4 by default
#   HPCPACE_RUN_DIR     folder of the run; runs/JOB-NAME by default
#   HPCPACE_AUDIT       warn (default): audit all ranks before training, and train whatever the audit finds;
#                       strict: end with status 4 if the audit finds a failure (F); off: no audit
#   HPCPACE_REQUEUE_AFTER_S  seconds that a job must have trained to be requeued near its time limit; 300 by
#                       default. Without it, a limit barely longer than its advance warning would requeue forever
#   HPCPACE_WORLD_START_TIMEOUT_S  seconds after which ranks that hang in MPI startup end and are started again;
#                       120 by default
#   HPCPACE_TRAIN_...   training settings, such as HPCPACE_TRAIN_STEPS, read by hpcpace itself
#
# `--signal` makes Slurm send SIGUSR1 to this shell before the time limit. The ranks then write a checkpoint and stop,
# and the job is requeued: its next attempt continues in the same folder, with the same losses as without the stop.

repository=$(realpath -- "${BASH_SOURCE[0]}")
repository=${repository%/*/*}

refuse() {
    echo "hpcpace: $1" >&2
    exit 2
}

case ${HPCPACE_AUDIT:=warn} in
    off | warn | strict) ;;
    *) refuse "HPCPACE_AUDIT is $HPCPACE_AUDIT: it must be off, warn or strict" ;;
esac

if [[ -n ${HPCPACE_PRELUDE:-} ]]; then
    # Environment modules and site files seldom work under `set -eu`.
    set +eu
    # `source` searches PATH for a name without a slash.
    [[ $HPCPACE_PRELUDE == */* || ! -f $HPCPACE_PRELUDE ]] || HPCPACE_PRELUDE=./$HPCPACE_PRELUDE
    # shellcheck disable=SC1090 # the user's own file
    if [[ -f $HPCPACE_PRELUDE ]]; then source -- "$HPCPACE_PRELUDE"; else eval "$HPCPACE_PRELUDE"; fi ||
        refuse "HPCPACE_PRELUDE ended with status $?: see what it printed above"
    set -eu
fi

# bash arithmetic runs commands inside variables, as in `a[$(id)]`.
for name in SLURM_{JOB_NUM_NODES,NTASKS,NTASKS_PER_NODE,CPUS_PER_TASK,RESTART_COUNT} HPCPACE_{RANKS,REQUEUE_AFTER_S}; do
    [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse "$name is ${!name}: it must be a whole number"
done
[[ ${HPCPACE_WORLD_START_TIMEOUT_S:-0} =~ ^(0|[1-9][0-9]{0,8})(\.[0-9]+)?$ ]] ||
    refuse "HPCPACE_WORLD_START_TIMEOUT_S is $HPCPACE_WORLD_START_TIMEOUT_S: it must be a number of seconds"

if [[ -n ${HPCPACE_PYTHON:-} ]]; then
    # -P: do not search the working folder for modules.
    read -ra hpcpace <<<"$HPCPACE_PYTHON -P -m hpcpace"
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
# Sequences or images per task and step; four sequences divide into four microbatches on every mesh.
samples_per_task=4

# At scancel and at the time limit Slurm sends SIGTERM to every task, to this shell and to srun, and SIGKILL KillWait
# seconds later (30 by default); the report must be done by then. bash runs a trap only after its foreground command has
# ended, but immediately while it waits for a background command.
training=0 num_signals=0 ended_by=0 is_early=0
launch=()
# An audit takes seconds; one that hangs, as on a dead node, must not hold up the job.
audit_timeout_s=120

# signal_ranks SIGNAL: send a signal to the ranks, if they are running.
signal_ranks() {
    ((training)) || return 0
    # With `--signal=B:...` only this shell gets the signal. srun would answer SIGTERM with SIGKILL to the ranks.
    if [[ -z ${SLURM_JOB_ID:-} ]] || ! scancel --signal="$1" "$SLURM_JOB_ID" 2>/dev/null; then
        # Never SIGINT: bash makes background commands ignore it.
        kill "-$1" "$training" 2>/dev/null || true
    fi
}

# note_end NAME SIGNAL NUMBER REASON: say once why the job ends, and end the training.
note_end() {
    ((ended_by)) || echo "$1: $4 (SIG$2)" >&2
    ended_by=$((128 + $3)) num_signals=$((num_signals + 1))
    signal_ranks TERM
}

# note_early NAME: the time limit is near; make the ranks write a checkpoint and stop.
note_early() {
    ((is_early)) || echo "$1: the time limit is near (SIGUSR1): writing a checkpoint and stopping" >&2
    is_early=1 num_signals=$((num_signals + 1))
    signal_ranks USR1
}

# requeue NAME: requeue this job, which then resumes from its checkpoint.
requeue() {
    if [[ -z ${SLURM_JOB_ID:-} ]]; then return; fi
    if ((SECONDS - started_s < ${HPCPACE_REQUEUE_AFTER_S:-300})); then
        echo "$1: not requeued: trained for only $((SECONDS - started_s)) s; request a longer time limit (-t)" >&2
    # Slurm ends this script along with the job that it requeues.
    elif (trap '' TERM && scontrol requeue "$SLURM_JOB_ID"); then
        echo "$1: requeued, resumes from its checkpoint" >&2
    else
        echo "$1: not requeued: submit a job with --resume and the folder of this run" >&2
    fi
}

# train_until_signal COMMAND...: run it, and return its status.
train_until_signal() {
    local status=127 waited=0 seen=-1
    "$@" &
    training=$!
    # A signal ends `wait`, not the training.
    while ((seen != num_signals)); do
        seen=$num_signals waited=0
        wait "$training" || waited=$?
        # 127: bash has returned the status before and no longer has it.
        ((waited == 127)) || status=$waited
    done
    training=0
    return "$status"
}

# set_launch OPTION...: set `launch` to this job's srun command line with additional options; empty without Slurm.
set_launch() {
    local cpus_per_task=${SLURM_CPUS_PER_TASK:-1} srun_args=()
    launch=()
    [[ -n ${SLURM_JOB_ID:-} ]] || return 0
    read -ra srun_args <<<"${HPCPACE_SRUN_ARGS:-}"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_task}
    # Since Slurm 22.05 srun no longer inherits the CPUs per task from the job, so -c is repeated.
    launch=(srun --ntasks "$num_tasks" -c "$cpus_per_task" "$@")
    launch+=(${HPCPACE_MPI:+"--mpi=$HPCPACE_MPI"} "${srun_args[@]}")
}

# audit_ranks FOLDER [OPTION...]: audit this job's ranks with the training's srun options, and return the status of the
# audit. Snapshots go to FOLDER.
audit_ranks() {
    local folder=$1/attempt-${SLURM_RESTART_COUNT:-0}/snapshot
    # Rank 0 exits with the code of the findings, which must not end the other ranks.
    set_launch --kill-on-bad-exit=0
    train_until_signal timeout "$audit_timeout_s" "${launch[@]}" "${hpcpace[@]}" audit --save "$folder" "${@:2}"
}

# audit_first NAME FOLDER: audit before training, as HPCPACE_AUDIT says; only a failure under `strict` ends the job.
audit_first() {
    local name=$1 status=0
    [[ $HPCPACE_AUDIT != off ]] || return 0
    audit_ranks "$2" || status=$?
    ((!ended_by)) || exit "$ended_by"
    if ((is_early)); then
        echo "$name: not trained: the time limit came near before training began; request a longer one (-t)" >&2
        exit 1
    fi
    if ((status == 4)) && [[ $HPCPACE_AUDIT == strict ]]; then
        echo "$name: not trained: the audit has found a failure (F), see above; HPCPACE_AUDIT=warn trains anyway" >&2
        exit 4
    fi
    # 1: a warning, 3: something is unknown, 4: a failure.
    ((status == 0 || status == 1 || status == 3 || status == 4)) ||
        echo "$name: no audit: 'hpcpace audit' ended with status $status" >&2
}

# num_attempts FOLDER: print how many attempts of a run have created their folder.
num_attempts() {
    local attempt number=0
    for attempt in "$1"/attempt-*; do
        [[ ! -e $attempt ]] || number=$((number + 1))
    done
    echo "$number"
}

# has_stopped FOLDER: whether the last attempt of a run stopped early, with a checkpoint. The ranks record that before
# they exit.
has_stopped() {
    grep -q '"outcome": "stopped"' "$1/attempt-$(($(num_attempts "$1") - 1))/result.json" 2>/dev/null
}

# is_failed_start STATUS SECONDS: whether ranks that ended so, and created no folder, may have failed in MPI startup.
is_failed_start() {
    # hpcpace exits with 0 to 4, or with 143 if srun ended ranks before they had refused as well; 126 and 127 mean that
    # the command cannot run; MPI aborts with others. Ranks that a signal ended after the startup timeout have hung.
    (($1 > 4 && $1 < 126 || $1 > 128 && $2 >= ${HPCPACE_WORLD_START_TIMEOUT_S%.*}))
}

# traced_training NAME MESH WORKLOAD [OPTION...]: train, report, and exit with the status of the training, or with 128
# plus the number of the signal that ended the job.
traced_training() {
    local name=$1 mesh=$2 workload=$3 status=0
    local run_dir=${HPCPACE_RUN_DIR:-runs/${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}-$name}
    # A folder may begin with a dash; it must not be taken for an option.
    [[ $run_dir != -* ]] || run_dir=./$run_dir
    # A requeued job continues in its folder with another attempt; other jobs must not use it.
    [[ ! -e $run_dir || ${SLURM_RESTART_COUNT:-0} -gt 0 ]] ||
        refuse "$run_dir exists already: name another folder with HPCPACE_RUN_DIR"

    local train=("${hpcpace[@]}" train "$workload" --run-dir "$run_dir")
    train+=(--mesh "${HPCPACE_TRAIN_MESH:-$mesh}" --batch-size "${HPCPACE_TRAIN_BATCH_SIZE:-$((samples_per_task * num_tasks))}")
    [[ -n ${SLURM_JOB_ID:-} ]] || train+=(--ranks "$num_tasks")

    # Otherwise the last lines of a killed rank stay in Python's buffer.
    export PYTHONUNBUFFERED=1
    # shellcheck disable=SC2064 # the name is known here only
    trap "note_end $name TERM 15 'cancelled, out of time, or a node has failed'" TERM
    # shellcheck disable=SC2064
    trap "note_end $name INT 2 interrupted" INT
    # shellcheck disable=SC2064
    trap "note_early $name" USR1
    audit_first "$name" "$run_dir-audit"
    set_launch --label --kill-on-bad-exit=1
    export HPCPACE_WORLD_START_TIMEOUT_S=${HPCPACE_WORLD_START_TIMEOUT_S:-120}
    local started_s=$SECONDS num_before
    num_before=$(num_attempts "$run_dir")
    train_until_signal "${launch[@]}" "${train[@]}" "${@:4}" || status=$?
    # Ranks that fail in MPI startup have lost nothing. Slurm's pmi2 takes the first 1,024 bytes that it reads for a whole
    # line, but MPICH may send a longer line: then ranks hang or abort.
    if ((!ended_by && !is_early)) && is_failed_start "$status" $((SECONDS - started_s)) &&
        (($(num_attempts "$run_dir") == num_before)); then
        echo "$name: the ranks did not get through the start of MPI; starting them again" >&2
        status=0
        train_until_signal "${launch[@]}" "${train[@]}" "${@:4}" || status=$?
    fi
    # Status 1 is a training that stopped with a checkpoint. When its first rank exited, srun may have ended others that
    # were about to exit.
    if ((status == 143 && $(num_attempts "$run_dir") > num_before)) && has_stopped "$run_dir"; then status=1; fi
    local reported=0
    # Slurm repeats SIGTERM, and srun may have ended before this shell received the signal.
    (trap '' TERM && exec "${hpcpace[@]}" report "$run_dir") || reported=$?
    # Status 1 is a report that found something, 3 one that is not sure.
    ((reported <= 1 || reported == 3)) || echo "$name: no report, 'hpcpace report' ended with status $reported" >&2
    if ((is_early && !ended_by && status == 1)); then
        trap '' TERM
        requeue "$name"
    fi
    exit $((ended_by ? ended_by : status))
}
