#!/usr/bin/env bash
# Trains on this machine: one parameter server, N workers and an evaluator, as processes of their own.
# Needs Python 3.11 or newer; makes .venv in the checkout when there is none.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
Usage: scripts/train.sh [OPTIONS]

Trains on this machine: one parameter server, N workers and an evaluator.

  --workers N                   workers                              [3]
  --steps N                     rounds                               [300]
  --run-dir DIR                 logs, tokens, summary, final values  [runs/<time>]

Options of the workers and the evaluator (scripts/launch_worker.sh --help explains them):
  --model NAME|FILE.py:FUNC     mlp, cifar10_cnn, or yours           [mlp]
  --dataset NAME|npz:FILE|FILE.py:FUNC
                                digits, mnist, fashion_mnist, cifar10, arrays, or yours  [digits]
  --data-dir DIR                where the data set's files are
  --batch-size N                examples of one gradient             [32]
  --trusted-examples N          examples kept out of training        [100]
  --evaluate-every STEPS        steps between two evaluations        [20]
  --legacy-keras                use the tf-keras package

Every other option goes to the parameter server (scripts/launch_ps.sh --help lists them):
  scripts/train.sh --steps 1000 --optimizer sgd --learning-rate 0.1 --momentum 0.9
TEXT
}

# ---- options ----------------------------------------------------------------------------------------------

workers=3
steps=300
run_dir=""
model=mlp
dataset=digits
worker_options=()
evaluator_options=()
ps_options=()

while [ $# -gt 0 ]; do
    option="$1"
    shift
    case "$option" in
        -h | --help)
            usage
            exit 0
            ;;
        --legacy-keras)
            worker_options+=("$option")
            continue
            ;;
        --host | --host=* | --port | --port=* | --port-file | --port-file=* | --token-file | --token-file=* | \
            --insecure | --summary | --summary=* | --export | --export=*)
            fail "${option%%=*} is what this script sets by itself; start the processes one by one with \
scripts/launch_ps.sh and scripts/launch_worker.sh to choose it"
            ;;
        --workers | --steps | --run-dir | --model | --dataset | --data-dir | --batch-size | \
            --trusted-examples | --evaluate-every)
            [ $# -gt 0 ] || fail "$option needs a value"
            value="$1"
            shift
            ;;
        --workers=* | --steps=* | --run-dir=* | --model=* | --dataset=* | --data-dir=* | --batch-size=* | \
            --trusted-examples=* | --evaluate-every=*)
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
        --run-dir) run_dir="$value" ;;
        --evaluate-every) evaluator_options+=("$option" "$value") ;;
        --model) model="$value" ;;
        --dataset) dataset="$value" ;;
        *) worker_options+=("$option" "$value") ;;
    esac
done
if ! [[ "$workers" =~ ^[1-9][0-9]{0,3}$ ]]; then
    fail "--workers must be a number from 1, not '$workers'"
fi
worker_options+=(--model "$model" --dataset "$dataset" --threads 1)
if ((BASH_VERSINFO[0] < 4)); then fail "bash 4 or newer is needed, and this is $BASH_VERSION"; fi

prepare_environment worker

# ---- the run's directory and its tokens -------------------------------------------------------------------

umask 077
if [ -z "$run_dir" ]; then
    run_dir="runs/$(date +%Y%m%d-%H%M%S)"
    # Making it is the test: two that start in the same second must not share one.
    mkdir -p runs 2>/dev/null || true
    mkdir "$run_dir" 2>/dev/null || run_dir="$run_dir-$$"
fi
if ! { mkdir -p "$run_dir" && chmod 700 "$run_dir"; }; then
    fail "the run directory $run_dir cannot be made"
fi
rm -f "$run_dir"/{port,tokens,summary.json} "$run_dir"/*.token

# ---- processes --------------------------------------------------------------------------------------------

declare -A running=() # process id -> name
ps_pid=""

# Each in a process group of its own: Ctrl-C reaches this script alone, and it ends them all.
start() {
    local name="$1" log="$2"
    shift 2
    set -m
    if [ -n "$log" ]; then
        "$@" </dev/null >"$log" 2>&1 &
    else
        "$@" </dev/null &
    fi
    running[$!]="$name"
    set +m
}

alive() { kill -0 "$1" 2>/dev/null; }

# Waits at most $1 seconds until none of the processes that follow is alive.
wait_at_most() {
    local end=$((SECONDS + $1)) pid
    shift
    for pid in "$@"; do
        while alive "$pid" && ((SECONDS < end)); do sleep 0.1; done
    done
}

stop_all() {
    local pid
    trap '' INT TERM HUP
    for pid in "${!running[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    wait_at_most 4 "${!running[@]}"
    for pid in "${!running[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    running=()
}

trap 'stop_all; say "Stopped. Logs: $run_dir"; exit 130' INT
trap 'stop_all; say "Stopped. Logs: $run_dir"; exit 143' TERM HUP
trap 'status=$?; stop_all; exit "$status"' EXIT

# Makes a token for one identity: a line for its own file, and the same for the server's.
token() {
    local name="$1"
    shift
    "$PYTHON" -m ps token --name "$name" "$@" --file "$run_dir/$name.token" >/dev/null ||
        fail "the token of $name could not be made" "$?"
    cat "$run_dir/$name.token" >>"$run_dir/tokens"
}

for ((rank = 0; rank < workers; rank++)); do token "worker-$rank" --role worker --rank "$rank"; done
token evaluator --role evaluator

say "Training $model on $dataset: $workers workers, $steps steps. Logs and results: $run_dir"
start "the parameter server" "" "$PYTHON" -m ps --host 127.0.0.1 --port 0 --port-file "$run_dir/port" \
    --workers "$workers" --evaluators 1 --steps "$steps" --run-dir "$run_dir" --token-file "$run_dir/tokens" \
    --summary "$run_dir/summary.json" --export "$run_dir/model.safetensors" ${ps_options[@]+"${ps_options[@]}"}
ps_pid=$!

while ! [ -s "$run_dir/port" ] && alive "$ps_pid"; do sleep 0.1; done

if alive "$ps_pid"; then
    address="127.0.0.1:$(cat "$run_dir/port")"
    for ((rank = 0; rank < workers; rank++)); do
        start "worker-$rank" "$run_dir/worker-$rank.log" "$PYTHON" -m worker --ps "$address" --role worker \
            --rank "$rank" --name "worker-$rank" --token-file "$run_dir/worker-$rank.token" "${worker_options[@]}"
    done
    start evaluator "$run_dir/evaluator.log" "$PYTHON" -m worker --ps "$address" --role evaluator \
        --name evaluator --token-file "$run_dir/evaluator.token" "${worker_options[@]}" \
        ${evaluator_options[@]+"${evaluator_options[@]}"}
fi

# ---- until the server ends, or a worker fails -------------------------------------------------------------

status=0
failed=""
while [ -n "${running[$ps_pid]:-}" ] && [ -z "$failed" ]; do
    for pid in "${!running[@]}"; do
        if alive "$pid"; then continue; fi
        name="${running[$pid]}"
        unset "running[$pid]"
        code=0
        wait "$pid" || code=$?
        kill -TERM -- "-$pid" 2>/dev/null || true # what it may have started itself
        if [ "$pid" = "$ps_pid" ]; then
            status=$code
            break
        elif [ "$code" -ne 0 ]; then
            # It may have been told that the run is over, by a server that is about to end and to say why.
            wait_at_most 2 "$ps_pid"
            if alive "$ps_pid"; then
                failed="$name"
                status=$code
                break
            fi
        fi
    done
    sleep 0.2
done

if [ -n "$failed" ]; then
    stop_all
    say ""
    say "$failed failed with exit code $status. The end of $run_dir/$failed.log:"
    tail -n 15 "$run_dir/$failed.log" | sed 's/^/    /' >&2
    exit "$status"
fi

# Workers that were told of the end are gone in a moment.
wait_at_most 3 "${!running[@]}"
stop_all

# ---- what was learned -------------------------------------------------------------------------------------

if [ "$status" -ne 0 ]; then
    say "The parameter server ended with exit code $status. Logs: $run_dir"
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
PYTHON
cat <<TEXT

Where to look:
  $run_dir/model.safetensors   the final values, by name
  $run_dir/summary.json        what became of the run, worker by worker
  $run_dir/*.log               what each worker said
What to try next:
  scripts/train.sh --workers 4 --model cifar10_cnn --dataset cifar10 --data-dir DIR
  scripts/train.sh --optimizer sgd --learning-rate 0.1 --momentum 0.9
  scripts/launch_ps.sh --help and scripts/launch_worker.sh --help, for more than one machine
TEXT
