#!/usr/bin/env bash
# Trains on this machine: a parameter server, N workers, a validator and an evaluator, as processes of their own.
# Needs Python 3.11 or newer; makes .venv in the checkout when there is none.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
Usage: scripts/train.sh [OPTIONS]

Trains on this machine: one parameter server, N workers, a validator and an evaluator, each a process of its
own, on 127.0.0.1. The validator computes gradients on trusted examples, by which the server learns how much
each worker's gradient is worth. The server says where its status page is (--status-port PORT chooses).
Defaults are in brackets; time-outs are seconds.

Options of this script:
  --workers N                   workers, 1 to 1024                         [3]
  --steps N                     rounds                                     [300]
  --mode MODE                   shared: one network; ensemble: every worker trains a network of its own on the
                                same batches, and they vote; no validator, no evaluator  [shared]
  --aggregation RULE            how one gradient is made of all; there is a validator if RULE is cosine_trust,
                                evidence or master                         [master]
  --fault NAME                  let the last worker misbehave on purpose, to see what the rule does: sign_flip,
                                random_labels, scale, ... (scripts/launch_worker.sh --help)
  --run-dir DIR                 logs, tokens, summary and final values     [runs/<date>-<time>]
  --supervise                   start again what dies: killed by a signal, or with exit code 4 (its peer was lost); each
                                process at most 10 times, after a pause of 1 to 10 s if it died within 10 s. The
                                server keeps checkpoints in DIR/checkpoints, or where --checkpoint-dir says, and
                                goes on from the newest, also from those of an earlier run with this --run-dir
  --worker-inject FAULT         break every worker on purpose, or with rank=R one, at an exact point: it gets FAULT as
                                its --inject (docs/FAULTS.md); --inject is the server's. What is started again is
                                not broken again
  -h, --help                    this text

Passed to workers, validator and evaluator (scripts/launch_worker.sh --help explains them):
  --model NAME|FILE.py:FUNC     mlp, cifar10_cnn, or yours                 [mlp]
  --dataset NAME|npz:FILE|FILE.py:FUNC
                                digits, mnist, fashion_mnist, cifar10, arrays, or yours  [digits]
  --data-dir DIR                where the data set's files are             [the data set's own]
  --batch-size N                examples of one worker's gradient          [32]
  --trusted-examples N          training examples kept out of every shard  [100]
  --connect-timeout SECONDS     wait for the server at the start           [60]
  --reconnect-timeout SECONDS   wait for a lost server's return            [120]
  --legacy-keras                use the tf-keras package, which tf.compat.v1.layers needs
Passed to the evaluator alone, in an ensemble to the workers:
  --evaluate-every STEPS        steps between two evaluations, or votes    [20]

Passed to the parameter server: every other option (scripts/launch_ps.sh --help lists them, with units), as in
  scripts/train.sh --steps 1000 --optimizer sgd --learning-rate 0.1 --momentum 0.9 --seed 7
  scripts/train.sh --checkpoint-dir DIR --checkpoint-every 50 --keep 3 --resume
The second goes on from the newest checkpoint in DIR, and begins afresh when there is none.

Refused, because this script sets them: --host, --port, --port-file, --token-file, --insecure, --summary and
--export of the server; --ps, --rank, --name, --role and --dry-run of the workers. A worker computes with one
thread; --threads N is the server's. To choose otherwise, start the processes one by one with
scripts/launch_ps.sh and scripts/launch_worker.sh.

Ctrl-C ends all within 5 seconds; with checkpoints the server may take longer, up to two minutes, to write the last
one, and a second Ctrl-C kills it. The exit code is 0 when all steps are done, 130 after Ctrl-C, 143 after
SIGTERM, and otherwise that of the process that failed; docs/RUNNING.md says what each means.
TEXT
}

# ---- options ----------------------------------------------------------------------------------------------

workers=3
steps=300
mode=shared
aggregation=master
fault=""
run_dir=""
supervise=""
checkpoint_dir="${WEIGHMASTER_CHECKPOINT_DIR:-}"
model=mlp
dataset=digits
client_options=()
worker_options=()
evaluator_options=()
ps_options=()
ps_faults=()
worker_faults=()

while [ $# -gt 0 ]; do
    option="$1"
    shift
    case "$option" in
        -h | --help)
            usage
            exit 0
            ;;
        --legacy-keras)
            client_options+=("$option")
            continue
            ;;
        --supervise)
            supervise=yes
            continue
            ;;
        --host | --host=* | --port | --port=* | --port-file | --port-file=* | --token-file | --token-file=* | \
            --insecure | --summary | --summary=* | --export | --export=* | \
            --ps | --ps=* | --rank | --rank=* | --name | --name=* | --role | --role=* | --dry-run)
            fail "${option%%=*} is what this script sets by itself; start the processes one by one with \
scripts/launch_ps.sh and scripts/launch_worker.sh to choose it"
            ;;
        --workers | --steps | --mode | --aggregation | --fault | --run-dir | --checkpoint-dir | --inject | --worker-inject | \
            --model | --dataset | --data-dir | --batch-size | \
            --trusted-examples | --evaluate-every | --connect-timeout | --reconnect-timeout)
            [ $# -gt 0 ] || fail "$option needs a value"
            value="$1"
            shift
            ;;
        --workers=* | --steps=* | --mode=* | --aggregation=* | --fault=* | --run-dir=* | --checkpoint-dir=* | --inject=* | --worker-inject=* | \
            --model=* | --dataset=* | --data-dir=* | --batch-size=* | \
            --trusted-examples=* | --evaluate-every=* | --connect-timeout=* | --reconnect-timeout=*)
            value="${option#*=}"
            option="${option%%=*}"
            ;;
        *)
            ps_options+=("$option")
            continue
            ;;
    esac
    case "$option" in
        --workers) workers="$value" ;;
        --steps) steps="$value" ;;
        --mode) mode="$value" ;;
        --aggregation) aggregation="$value" ;;
        --fault) fault="$value" ;;
        --run-dir) run_dir="$value" ;;
        --checkpoint-dir) checkpoint_dir="$value" ;;
        --inject) ps_faults+=(--inject "$value") ;;
        --worker-inject) worker_faults+=(--inject "$value") ;;
        --evaluate-every) evaluator_options+=("$option" "$value") ;;
        --model) model="$value" ;;
        --dataset) dataset="$value" ;;
        --batch-size) worker_options+=("$option" "$value") ;;
        *) client_options+=("$option" "$value") ;;
    esac
done
most_workers=1024 # the server takes no more, and each would have its token made before it could say so
if ! [[ "$workers" =~ ^[1-9][0-9]{0,3}$ ]] || ((workers > most_workers)); then
    fail "--workers must be a number from 1 to $most_workers, not '$workers'"
fi
client_options+=(--model "$model" --dataset "$dataset" --threads 1)
validator=""
evaluator=yes
case "$mode:$aggregation" in
    ensemble:*)
        evaluator=""
        worker_options+=(${evaluator_options[@]+"${evaluator_options[@]}"})
        ;;
    *:cosine_trust | *:evidence | *:master)
        validator=yes
        ps_options=(--validators 1 ${ps_options[@]+"${ps_options[@]}"})
        ;;
esac
if [ -n "$evaluator" ]; then ps_options=(--evaluators 1 ${ps_options[@]+"${ps_options[@]}"}); fi
# The status page, for this machine alone; the server says where it is.
if [ -z "${WEIGHMASTER_STATUS_PORT:-}" ]; then ps_options=(--status-port 0 ${ps_options[@]+"${ps_options[@]}"}); fi
if ((BASH_VERSINFO[0] < 4)); then fail "bash 4 or newer is needed, and this is $BASH_VERSION"; fi
# What may be set for a worker of another run must not reach these.
unset TF_CONFIG WEIGHMASTER_RANK WEIGHMASTER_INSECURE WEIGHMASTER_DRY_RUN

prepare_environment worker

# ---- processes, and how they are ended --------------------------------------------------------------------

declare -A running=() # process id -> name
server="the parameter server"
ps_pid=""
starting=""
kept=""

# Each in a process group of its own: Ctrl-C reaches this script alone, and it ends them all. A signal that comes
# while one is being started is kept until it is known who must be ended.
start() {
    local name="$1" log="$2"
    shift 2
    starting=yes
    set -m
    if [ -n "$log" ]; then
        "$@" </dev/null >>"$log" 2>&1 4>&- &
    else
        "$@" </dev/null 4>&- &
    fi
    running[$!]="$name"
    set +m
    starting=""
    if [ -n "$kept" ]; then interrupted "$kept"; fi
}

alive() { kill -0 "$1" 2>/dev/null; }

# Bash remarks on a process that was killed as soon as it has waited for something; it is said better below. A signal
# is handled in the midst of this, too, and speaks by way of the fourth descriptor.
exec 4>&2
pause() { sleep "$1" || true; } 2>/dev/null

# Waits at most $1 tenths of a second until none of the processes that follow is alive, or all are to be killed.
wait_at_most() {
    local tenths=$1 pid
    shift
    for pid in "$@"; do
        while [ -z "$hurry" ] && alive "$pid" && ((tenths-- > 0)); do pause 0.1; done
    done
}

longest_checkpoint=1200 # tenths of a second; as long as systemd's unit waits
hurry=""

# Ends all within 5 seconds, but for a server that writes its last checkpoint. The server goes first, by signal $1: it
# tells the others why, and nobody is lost to anybody. Who is not there to hear it, because TensorFlow is still loading,
# is ended by SIGTERM, or else killed. A further signal kills all at once.
stop_all() {
    local pid
    trap 'hurry=yes' INT TERM HUP
    if [ -n "$ps_pid" ] && alive "$ps_pid"; then
        kill -s "$1" -- "-$ps_pid" 2>/dev/null || true
        wait_at_most 20 "$ps_pid"
        if [ -n "$checkpoint_dir" ] && [ -z "$hurry" ] && alive "$ps_pid"; then
            say "The parameter server is given two minutes for its last checkpoint; Ctrl-C again kills it."
            wait_at_most "$longest_checkpoint" "$ps_pid"
        fi
        wait_at_most 5 "${!running[@]}"
    fi
    for pid in "${!running[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    wait_at_most 18 "${!running[@]}"
    for pid in "${!running[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    running=()
}

# Tells whether the server has listened; a run that never began leaves no trace.
began() { [ -n "$run_dir" ] && [ -s "$run_dir/port" ]; }

forget_run() {
    if [ -z "$run_dir" ]; then return; fi
    rm -f "$run_dir"/{port,status-port,tokens} "$run_dir"/*.token
    if [ -e "$run_dir/summary.json.before" ]; then mv -f "$run_dir"/summary.json{.before,}; fi
    rmdir "$run_dir" 2>/dev/null || true
}

interrupted() {
    if [ -n "$starting" ]; then
        kept="$1"
        return
    fi
    exec 2>&4
    stop_all "$1"
    if began; then say "Stopped. Logs: $run_dir"; else say "Stopped before anything was trained."; fi
    if [ "$1" = INT ]; then exit 130; else exit 143; fi
}

ended() {
    local status=$?
    stop_all TERM
    began || forget_run
    exit "$status"
}

trap 'interrupted INT' INT
trap 'interrupted TERM' TERM HUP
trap ended EXIT

# ---- the run's directory and its tokens -------------------------------------------------------------------

umask 077
if [ -z "$run_dir" ]; then
    run_dir="runs/$(date +%Y%m%d-%H%M%S)"
    # Making it is the test: two that start in the same second must not share one.
    mkdir -p runs 2>/dev/null || true
    mkdir "$run_dir" 2>/dev/null || run_dir="$run_dir-$$"
fi
mkdir -p "$run_dir" || fail "the run directory $run_dir cannot be made"
if [ -L "${run_dir%/}" ] || [ ! -O "$run_dir" ]; then
    fail "the run directory $run_dir is a link or belongs to somebody else; the tokens will lie in it: name another one"
fi
chmod 700 "$run_dir" || fail "the run directory $run_dir cannot be closed to others"
rm -f "$run_dir"/{port,status-port,tokens} "$run_dir"/*.token
# The summary of an earlier run is put back if this one never begins.
if [ -e "$run_dir/summary.json" ]; then mv -f "$run_dir"/summary.json{,.before}; fi

# Makes a token for one identity: a line for its own file, and the same for the server's.
token() {
    local name="$1"
    shift
    # Ctrl-C at the terminal is for this script alone here, too.
    (trap '' INT && exec "$PYTHON" -m ps token --name "$name" "$@" --file "$run_dir/$name.token" >/dev/null) ||
        fail "the token of $name could not be made" "$?"
    cat "$run_dir/$name.token" >>"$run_dir/tokens"
}

for ((rank = 0; rank < workers; rank++)); do token "worker-$rank" --role worker --rank "$rank"; done
if [ -n "$validator" ]; then token validator --role validator; fi
if [ -n "$evaluator" ]; then token evaluator --role evaluator; fi

# ---- the processes start ----------------------------------------------------------------------------------

count() { if [ "$1" = 1 ]; then echo "1 $2"; else echo "$1 $2s"; fi; }

scripts="$(dirname "$0")"
port=0
if [ -n "$supervise" ]; then
    if [ -z "$checkpoint_dir" ]; then checkpoint_dir="$run_dir/checkpoints"; fi
    ps_options+=(--resume)
fi
if [ -n "$checkpoint_dir" ]; then ps_options+=(--checkpoint-dir "$checkpoint_dir"); fi

launch_server() {
    local status_port=()
    # One that is started again has its page where it was.
    if [ -s "$run_dir/status-port" ]; then status_port=(--status-port "$(cat "$run_dir/status-port")"); fi
    export WEIGHMASTER_STARTED_AS="$scripts/launch_ps.sh"
    start "$server" "" "$PYTHON" -m ps --host 127.0.0.1 --port "$port" --port-file "$run_dir/port" \
        --workers "$workers" --mode "$mode" --aggregation "$aggregation" --steps "$steps" --run-dir "$run_dir" \
        --token-file "$run_dir/tokens" --status-port-file "$run_dir/status-port" \
        --summary "$run_dir/summary.json" --export "$run_dir/model.safetensors" \
        ${ps_options[@]+"${ps_options[@]}"} ${status_port[@]+"${status_port[@]}"} ${ps_faults[@]+"${ps_faults[@]}"}
    ps_pid=$!
}

# Starts a worker, the validator or the evaluator, by its name.
launch_client() {
    local name="$1" own
    export WEIGHMASTER_STARTED_AS="$scripts/launch_worker.sh"
    own=(--ps "$address" --name "$name" --token-file "$run_dir/$name.token" "${client_options[@]}")
    case "$name" in
        worker-*)
            own+=(--role worker --rank "${name#worker-}" ${worker_options[@]+"${worker_options[@]}"})
            own+=(${worker_faults[@]+"${worker_faults[@]}"})
            if [ -n "$fault" ] && [ "$name" = "worker-$((workers - 1))" ]; then own+=(--fault "$fault"); fi
            ;;
        evaluator) own+=(--role evaluator ${evaluator_options[@]+"${evaluator_options[@]}"}) ;;
        *) own+=(--role "$name") ;;
    esac
    start "$name" "$run_dir/$name.log" "$PYTHON" -m worker "${own[@]}"
}

# The server first, and nothing is announced before it listens: it has then understood its options.
launch_server
waited=0
while ! began && alive "$ps_pid"; do
    pause 0.1
    if ((++waited == 30)) && alive "$ps_pid"; then
        say "The parameter server is starting; the first time it compiles its kernels."
    fi
done

if began && alive "$ps_pid"; then
    port="$(cat "$run_dir/port")"
    rm -f "$run_dir/summary.json.before"
    address="127.0.0.1:$port"
    say "Training $model on $dataset: $(count "$workers" worker), $(count "$steps" step). Logs and results: $run_dir"
    if [ -n "$fault" ]; then say "worker-$((workers - 1)) misbehaves on purpose: $fault."; fi
    if [ -n "$supervise" ]; then say "What dies is started again; checkpoints: $checkpoint_dir"; fi
    say "All of them load TensorFlow first, which takes some seconds."
    clients=()
    for ((rank = 0; rank < workers; rank++)); do clients+=("worker-$rank"); done
    if [ -n "$validator" ]; then clients+=(validator); fi
    if [ -n "$evaluator" ]; then clients+=(evaluator); fi
    for name in "${clients[@]}"; do
        : >"$run_dir/$name.log"
        launch_client "$name"
    done
fi

# ---- what dies is started again ---------------------------------------------------------------------------

most_restarts=10
longest_pause=10 # seconds
ticks_per_second=5
tick=0
declare -A started_at=() restarts=() pauses=() due=() # by name; started_at and due in ticks

by_signal() { (($1 > 128 && $1 < 193 && $1 != 130 && $1 != 143)); }

# Decides whether process $1, which ended with code $2, is started again, and when; says so.
starts_again() {
    local name="$1" code="$2" how="ended with exit code $2" wait_s=0 later=""
    if [ -z "$supervise" ]; then return 1; fi
    if by_signal "$code"; then
        how="was killed by SIG$(kill -l "$code" 2>/dev/null || echo "NAL $((code - 128))")"
    elif [ "$code" != 4 ]; then
        return 1
    fi
    if [ -t 2 ]; then say ""; fi # below the server's live line
    if ((${restarts[$name]:-0} >= most_restarts)); then
        say "${name/#the/The} $how, and has been started again $most_restarts times: it is given up."
        return 1
    fi
    if ((tick - ${started_at[$name]:-0} < 10 * ticks_per_second)); then
        wait_s=${pauses[$name]:-1}
        later=" in $wait_s s"
    fi
    pauses[$name]=$((wait_s == 0 ? 1 : 2 * wait_s < longest_pause ? 2 * wait_s : longest_pause))
    restarts[$name]=$((${restarts[$name]:-0} + 1))
    due[$name]=$((tick + wait_s * ticks_per_second))
    say "${name/#the/The} $how: started again$later (${restarts[$name]} of $most_restarts)"
}

start_what_is_due() {
    local name
    for name in "${!due[@]}"; do
        if ((tick < due[$name])); then continue; fi
        unset "due[$name]"
        started_at[$name]=$tick
        # A fault that is injected is meant to happen once.
        unset WEIGHMASTER_INJECT
        if [ "$name" = "$server" ]; then
            ps_faults=()
            launch_server
        else
            worker_faults=()
            launch_client "$name"
        fi
    done
}

# ---- until the server ends, or a worker fails -------------------------------------------------------------

status=0
failed=""
over=""
while [ -z "$over$failed" ]; do
    for pid in "${!running[@]}"; do
        if alive "$pid"; then continue; fi
        name="${running[$pid]}"
        unset "running[$pid]"
        code=0
        wait "$pid" 2>/dev/null || code=$?
        kill -TERM -- "-$pid" 2>/dev/null || true # what it may have started itself
        if [ "$pid" = "$ps_pid" ]; then
            if [ "$port" != 0 ] && starts_again "$name" "$code"; then
                ps_pid=""
                continue
            fi
            status=$code
            over=yes
            break
        elif [ "$code" -ne 0 ] && ! starts_again "$name" "$code"; then
            # It may have been told that the run is over, by a server that is about to end and to say why.
            if [ -n "$ps_pid" ]; then wait_at_most 20 "$ps_pid"; fi
            if [ -z "$ps_pid" ] || alive "$ps_pid"; then
                failed="$name"
                status=$code
                break
            fi
        fi
    done
    if [ -z "$over$failed" ]; then start_what_is_due; fi
    pause 0.2
    ((++tick))
done

# TensorFlow's builds for GPUs remark on a missing one, twice, before they can be told to be quiet.
tensorflow_noise='^WARNING: All log messages before absl::InitializeLog|^I0000 .*cudart_stub'

if [ -n "$failed" ]; then
    say ""
    say "$failed failed with exit code $status, which ends the run."
    stop_all TERM
    say "The end of $run_dir/$failed.log:"
    { grep -vE "$tensorflow_noise" "$run_dir/$failed.log" || true; } | tail -n 15 | sed 's/^/    /' >&2
    exit "$status"
fi

# Workers that were told of the end are gone in a moment.
wait_at_most 30 "${!running[@]}"
stop_all TERM

# ---- what was learned -------------------------------------------------------------------------------------

if [ "$status" -ne 0 ]; then
    # One that never listened has said why in a sentence, and there are no logs.
    if began; then say "The parameter server ended with exit code $status. Logs: $run_dir"; fi
    exit "$status"
fi
"$PYTHON" - "$run_dir/summary.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    summary = json.load(file)
parts = [f"{summary['steps']} steps in {summary['seconds']:.1f} s"]
if summary.get("final_loss") is not None:
    parts.append(f"loss {summary['final_loss']:.3f}")
if summary.get("test_accuracy") is not None:
    parts.append(f"test accuracy {summary['test_accuracy']:.3f} (at step {summary['test_accuracy_step']})")
print(f"\nTrained: {', '.join(parts)}.")
workers = summary["workers"]
votes = summary.get("ensemble")
if votes and votes["weighted_vote"] is not None:
    print(f"Share of right answers on the test set at step {votes['step']}:")
    print(f"  weighted vote {votes['weighted_vote']:.3f}   (each answer counts what the master gives it)")
    print(f"  plain vote    {votes['plain_vote']:.3f}   (each counts the same)")
    for worker, share in zip(workers, votes["alone"]):
        alone = "did not vote" if share is None else f"{share:.3f}"
        print(f"  {worker['name']:13} {alone}   (alone)")
if len({worker["weight"] for worker in workers}) > 1:
    print("What each worker's gradient counted, lately:")
    for worker in workers:
        muted = f"   muted in {worker['muted_rounds']} rounds" if worker["muted_rounds"] else ""
        print(f"  {worker['name']:12} {worker['weight']:6.3f} {'#' * round(40 * worker['weight']):40}{muted}".rstrip())
PYTHON
cat <<TEXT

Where to look:
  $run_dir/model.safetensors   the final values, by name
  $run_dir/summary.json        what became of the run, worker by worker
  $run_dir/rounds.jsonl        each round: who took part, and what each counted
  $run_dir/*.log               what each worker said
What to try next:
  scripts/train.sh --fault sign_flip   and see how the last worker is found out (docs/MASTER.md says how)
  scripts/train.sh --workers 4 --model cifar10_cnn --dataset cifar10 --data-dir DIR
  scripts/train.sh --optimizer sgd --learning-rate 0.1 --momentum 0.9
  scripts/launch_ps.sh --help and scripts/launch_worker.sh --help, for more than one machine
TEXT
