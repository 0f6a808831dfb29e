# The life of one job under Slurm. Sourced, under `set -euo pipefail`, by train.sbatch and by the scripts that launch/submit.py
# writes; then `run_job OVERRIDE...` trains, with overrides as in launch/train.py.
#
# A start of the job looks at its nodes (preflight), starts the ranks, and decides how it ends:
#   all steps done         the job ends with 0
#   SIGUSR1                the time limit is near, or a preemption is: the ranks save, the job is queued again
#   SIGTERM                preemption or time limit: the same, as far as the grace time lasts
#   scancel JOB            the ranks save, the job ends
#   a rank fails           queued again while starts bring newer checkpoints, at most MAX_FAILURES times in a row without one
#   a node is lost         Slurm queues the job again by itself, also counted
# Each of these is a line of job.jsonl in the run folder, which `launch/submit.py status=RUN` reads.
#
# The caller may set:
#   RUN_FOLDER       of the run; left out, it is asked of the settings
#   LAUNCHER         torchrun, deepspeed (one a node), or srun (a task a rank)
#   RANKS_PER_NODE   left out, one a GPU
#   RESTART          requeue, chain (the next job waits behind this one; needs SCRIPT, the file to submit), or none
#   MAX_FAILURES, PREFLIGHT_S (0: no preflight), SCRATCH (a folder of the node's own), HEAD_ADDRESS (where the first node is
#   reached, if not by its name), CONTAINER=(options of srun), INSIDE=(a command before each command)

: "${PROJECT:=$PWD}" "${LAUNCHER:=deepspeed}" "${RANKS_PER_NODE:=${SLURM_GPUS_ON_NODE:-1}}" "${RESTART:=requeue}"
: "${MAX_FAILURES:=2}" "${PREFLIGHT_S:=120}" "${SCRATCH:=}" "${RUN_FOLDER:=}" "${SCRIPT:=}"
[ -v CONTAINER ] || CONTAINER=()
[ -v INSIDE ] || INSIDE=()
export PROJECT RANKS_PER_NODE PREFLIGHT_S SCRATCH
export PYTHONPATH="$PROJECT${PYTHONPATH:+:$PYTHONPATH}"

ASKED= NEXT= FAILURES=0
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID} # one task of an array has the array's number as its job's: a command for that would mean them all

# In each task, since only there SLURM_NODEID is its own. torchrun and deepspeed would die of the signal that is meant for
# the ranks, which take it for themselves.
IN_TASK='trap "" USR1
if [ -n "$SCRATCH" ]; then
    mkdir -p "$SCRATCH"
    export TRITON_CACHE_DIR="$SCRATCH/triton" TORCHINDUCTOR_CACHE_DIR="$SCRATCH/inductor" TORCH_EXTENSIONS_DIR="$SCRATCH/extensions"
fi
'

say() { echo "== $(date '+%F %T') job $JOB: $*"; }

note() { # EVENT [NAME VALUE]...: a line of the run's record
    local line
    line="\"event\": \"$1\", \"time\": \"$(date '+%FT%T%z')\", \"job\": \"$JOB\", \"restart\": ${SLURM_RESTART_COUNT:-0}"
    line+=", \"checkpoint\": $(newest_step)"
    shift
    while [ $# -gt 0 ]; do
        line+=", \"$1\": \"${2//[\"\\]/}\""
        shift 2
    done
    printf '{%s}\n' "$line" >> "$RUN_FOLDER/job.jsonl"
}

newest_step() { # of the checkpoints; 0 if there is none
    local path step newest=0
    for path in "$RUN_FOLDER"/checkpoints/step_*; do
        step=${path##*/step_}
        if [[ $step =~ ^[0-9]+$ ]] && ((10#$step > newest)); then newest=$((10#$step)); fi
    done
    echo "$newest"
}

is_cancelled() { # Slurm signals a preempted job while it still runs; one at its time limit says so; the rest is scancel
    ! [[ $(scontrol --oneliner show job "$JOB" || true) =~ JobState=RUNNING|Reason=TimeLimit ]]
}

await() { # COMMAND...: its exit code; signals are heard while it runs
    local pid rc=0
    "$@" &
    pid=$!
    while kill -0 "$pid" 2> /dev/null; do wait "$pid" || true; done
    wait "$pid" || rc=$?
    return $((rc < 0 ? 143 : rc)) # bash has been seen to say -1 where both got SIGTERM
}

on_nodes() { # TASKS_A_NODE LIMIT_S COMMAND...: everywhere, in the container if there is one. LIMIT_S 0: no limit
    local tasks=$1 limit=$2 cpus=$((SLURM_CPUS_ON_NODE / $1)) share
    shift 2
    if ((cpus > 0)); then share=--cpus-per-task=$cpus; else share=--overcommit; fi # fewer CPUs than ranks: refused without
    # What was set up here is for the tasks too, also in a job that was submitted with --export=NONE.
    timeout --kill-after=10 "$limit" srun --ntasks-per-node="$tasks" --ntasks=$((tasks * SLURM_NNODES)) "$share" \
        --export=ALL --kill-on-bad-exit=1 "${CONTAINER[@]}" "${INSIDE[@]}" "$@"
}

find_address() { # the first node of the list, which has rank 0, and a port that nobody listens on
    local nodes port
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${HEAD_ADDRESS:-${nodes%%$'\n'*}}
    # Another port for each job and restart, below those that the system hands out by itself (32768 and up).
    port=$(((SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 10000))
    while timeout 2 bash -c ': < "/dev/tcp/$0/$1"' "$MASTER_ADDR" $((20000 + port)) 2> /dev/null; do
        say "port $((20000 + port)) of $MASTER_ADDR is in use, trying the next"
        port=$(((port + 1) % 10000))
    done
    MASTER_PORT=$((20000 + port))
    export MASTER_ADDR MASTER_PORT
    sed "s/\$/ slots=$RANKS_PER_NODE/" <<< "$nodes" > "$RUN_FOLDER/hostfile"
}

count_start() { # This start counts as one without progress, until it ends as it was asked to or leaves a newer checkpoint.
    local family=$JOB counted=0 before=0
    if [ -n "${CHAINED:-}" ]; then family=$CHAINED; fi
    export CHAINED_BY=$family
    STEP=$(newest_step)
    if [ -f "$RUN_FOLDER/starts" ]; then read -r counted before FAILURES < "$RUN_FOLDER/starts" || true; fi
    if [ "$counted" != "$family" ] || [ "$STEP" -gt "$before" ]; then FAILURES=0; fi
    if [ "$FAILURES" -ge "$MAX_FAILURES" ]; then give_up; fi
    keep_count $((FAILURES + 1))
}

keep_count() { echo "$CHAINED_BY $STEP $1" > "$RUN_FOLDER/starts"; }

give_up() {
    say "$FAILURES start(s) in a row brought no checkpoint newer than step $STEP: giving up. The cause is the first error above," \
        "or a time limit too short for a step; once it is mended, submit again"
    end_chain
    note gave_up
    exit 1
}

begin_chain() { # OVERRIDE...: the next job waits behind this one from the start, so that it is there when this one's node is lost
    if [ "$RESTART" = chain ]; then
        NEXT=$(env -u SLURM_RESTART_COUNT CHAINED="$CHAINED_BY" \
            sbatch --parsable --export=ALL --dependency="afterany:$SLURM_JOB_ID" "$SCRIPT" "$@")
        say "job $NEXT waits behind this one"
    fi
}

end_chain() {
    if [ -n "$NEXT" ] && ! scancel "$NEXT"; then say "job $NEXT could not be taken back: scancel $NEXT"; fi
    NEXT=
}

hear_usr1() { # the batch shell alone gets it: hand it to the ranks
    ASKED=USR1
    say "SIGUSR1: the ranks save and end"
    scancel --signal=USR1 "$JOB" || say "scancel failed: the ranks go on until the time limit"
}

hear_term() { # the ranks have it too. SIGKILL follows: 30 s later as a rule (KillWait), or at the end of the grace time
    ASKED=TERM
    if is_cancelled; then end_chain; fi
}

look_at_nodes() {
    local rc=0
    if [ "$PREFLIGHT_S" = 0 ]; then return; fi
    say "preflight of $SLURM_NNODES node(s), up to $PREFLIGHT_S s"
    await on_nodes "$RANKS_PER_NODE" $((PREFLIGHT_S + 30)) bash -c "$IN_TASK"'exec python -m stack.submit.preflight "$0"' \
        "$RUN_FOLDER" || rc=$?
    if [ $rc != 0 ] && [ -z "$ASKED" ]; then
        say "preflight failed ($rc): no training on these nodes"
        end_chain
        note "preflight failed" code $rc nodes "$SLURM_JOB_NODELIST"
        exit 1
    fi
}

train() {
    case $LAUNCHER in
    torchrun)
        await on_nodes 1 0 bash -c "$IN_TASK"'exec torchrun --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \
            --nproc-per-node="$RANKS_PER_NODE" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
            --shutdown-timeout=600 "$@"' torchrun "$PROJECT/launch/train.py" "$@"
        ;;
    deepspeed)
        await on_nodes 1 0 bash -c "$IN_TASK"'
            # deepspeed takes a missing hostfile for one machine.
            [ -s "$0" ] || { echo "error: $SLURMD_NODENAME does not see $0: the run folder is not shared" >&2; exit 2; }
            # deepspeed gives out the GPUs from 0 on, whatever Slurm gave to this job.
            gpus=$(seq -s, 0 $((RANKS_PER_NODE - 1)))
            [ "${CUDA_VISIBLE_DEVICES:-$gpus}" = "$gpus" ] || {
                echo "error: $SLURMD_NODENAME has GPUs $CUDA_VISIBLE_DEVICES for this job, and deepspeed would take $gpus." \
                    "Fix: cluster.launcher=torchrun (LAUNCHER=torchrun), or whole nodes" >&2
                exit 2
            }
            exec deepspeed --quiet --hostfile="$0" --no_ssh --node_rank="$SLURM_NODEID" \
            --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "$@"' "$RUN_FOLDER/hostfile" "$PROJECT/launch/train.py" "$@"
        ;;
    srun)
        await on_nodes "$RANKS_PER_NODE" 0 bash -c "$IN_TASK"'exec python -u "$@"' srun "$PROJECT/launch/train.py" "$@"
        ;;
    esac
}

go_on() { # CODE: queue the run again; CODE is the job's where that is left to the user or to the next of the chain
    note "goes on" by "$RESTART" asked "$ASKED" code "$1"
    if [ "$RESTART" = requeue ]; then
        if scontrol requeue "$JOB"; then sleep 600; fi # Slurm ends this shell
        say "the job cannot be queued again here. Fix: cluster.restart=chain, or submit it once more: it goes on from step" \
            "$(newest_step)"
        note "not requeued"
        exit 1
    fi
    exit "$1"
}

end_job() { # CODE of the launcher
    local code=$1 stopped="$RUN_FOLDER/stopped.json"
    if [ "$code" = 0 ] && [ ! -e "$stopped" ] && [ -z "$ASKED" ]; then
        end_chain
        rm -f "$RUN_FOLDER/starts"
        note done
        say "done"
        exit 0
    fi
    # srun and the launchers get SIGTERM too, and leave at once; the ranks save meanwhile, and say so.
    if [ "$ASKED" = TERM ] && [ "$code" != 0 ]; then
        for _ in $(seq 600); do
            if [ "$stopped" -nt "$RUN_FOLDER/starts" ]; then break; fi
            sleep 1
        done
    fi
    if [ "$stopped" -nt "$RUN_FOLDER/starts" ] || { [ "$code" = 0 ] && [ -n "$ASKED" ]; }; then
        # Asked by a warning that comes before a step is made, as under a time limit that is too short, it would loop for ever.
        if [ "$(newest_step)" -gt "$STEP" ] || [ "$ASKED" = TERM ]; then keep_count "$FAILURES"; else FAILURES=$((FAILURES + 1)); fi
        if [ "$RESTART" = none ] || is_cancelled; then
            end_chain
            note stopped
            say "stopped at step $(newest_step). The same command goes on from there"
            exit 0
        fi
        if [ "$FAILURES" -ge "$MAX_FAILURES" ]; then give_up; fi
        say "stopped at step $(newest_step), to go on"
        go_on 0
    fi
    if [ "$(newest_step)" -gt "$STEP" ]; then FAILURES=0; else FAILURES=$((FAILURES + 1)); fi
    note failed code "$code"
    say "failed with code $code"
    if is_cancelled; then
        end_chain
        exit "$code"
    fi
    if [ "$RESTART" = none ]; then exit "$code"; fi
    if [ "$FAILURES" -ge "$MAX_FAILURES" ]; then give_up; fi
    go_on "$code"
}

check_words() {
    case $LAUNCHER in
    torchrun | deepspeed | srun) ;;
    *) say "LAUNCHER=$LAUNCHER: expected torchrun, deepspeed or srun" && exit 2 ;;
    esac
    case "$RESTART $SCRIPT" in
    "requeue "* | "none "* | "chain "?*) ;;
    *) say "RESTART=$RESTART: expected requeue, none, or chain with SCRIPT, the file to submit" && exit 2 ;;
    esac
}

run_job() {
    local rc=0
    check_words
    if [ -z "$RUN_FOLDER" ]; then RUN_FOLDER=$("${INSIDE[@]}" python -m stack.submit.folder "$@"); fi
    mkdir -p "$RUN_FOLDER"
    trap hear_usr1 USR1
    trap hear_term TERM
    count_start
    begin_chain "$@"
    find_address
    note start nodes "$SLURM_JOB_NODELIST" launcher "$LAUNCHER" ranks $((RANKS_PER_NODE * SLURM_NNODES)) \
        address "$MASTER_ADDR:$MASTER_PORT" ${NEXT:+next "$NEXT"}
    say "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, rank 0 at $MASTER_ADDR:$MASTER_PORT, run folder $RUN_FOLDER"
    look_at_nodes
    if [ -z "$ASKED" ]; then train "$@" || rc=$?; fi
    end_job "$rc"
}
