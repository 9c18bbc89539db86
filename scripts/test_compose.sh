#!/usr/bin/env bash
# Tests the compose cluster against a real Docker engine, with each compose that is there (`docker compose` and
# `docker-compose`, or the one in COMPOSE): builds the images, trains, kills the server and a worker in the midst, and
# calls the server by a name with an underscore and by an IPv6 address. Leaves only the images.
# Usage: scripts/test_compose.sh [PART...], of: trains scales survives by_ipv6 with_tls (all)
# Exit code 0: all passed; 1: something failed; 2: there is no such part; 77: there is no engine, so nothing was
# tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

most_seconds=120       # from `up`, with images built, to the end of training
most_server_bytes=$((350 * 1000 * 1000)) # of the server's image beyond its base
base="${BASE_IMAGE:-python:3.11-slim-bookworm}"
parts=(trains scales survives by_ipv6 with_tls)
for part in "$@"; do
    if [[ " ${parts[*]} " != *" $part "* ]]; then
        printf '%s\n' "test_compose.sh: there is no part '$part'; there are: ${parts[*]}" >&2
        exit 2
    fi
done
if [ "$#" -gt 0 ]; then parts=("$@"); fi

say() { printf '%s\n' "$*" >&2; }
loudly() {
    say ""
    say "################################################################################"
    for line in "$@"; do say "##  $line"; done
    say "################################################################################"
    say ""
}
failures=0
check() {
    local what="$1"
    shift
    if "$@"; then say "  passed: $what"; else
        say "  FAILED: $what"
        failures=$((failures + 1))
    fi
}

if ! docker info >/dev/null 2>&1; then
    loudly "NOT TESTED: no Docker engine answers here, so the compose cluster was not tested."
    exit 77
fi
composes=()
if [ -n "${COMPOSE:-}" ]; then composes=("$COMPOSE"); else
    if docker compose version >/dev/null 2>&1; then composes+=("docker compose"); fi
    if docker-compose version >/dev/null 2>&1; then composes+=("docker-compose"); fi
fi
if [ "${#composes[@]}" = 0 ]; then
    loudly "NOT TESTED: there is neither 'docker compose' nor 'docker-compose'."
    exit 77
fi

work="$(mktemp -d)"
export SECRETS="$work/secrets" STATUS_PORT=0
export COMPOSE_PROJECT_NAME="weighmaster-test-$$"
untested=()
compose=() # the command, set for each round

down() {
    if [ "${#compose[@]}" = 0 ]; then return; fi
    "${compose[@]}" down --volumes --remove-orphans --timeout 10 >/dev/null 2>&1 || true
}

cleanup() {
    local status=$?
    down
    rm -rf "$work"
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The containers of one service, or of all.
containers() {
    local filters=(--filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")
    if [ -n "${1:-}" ]; then filters+=(--filter "label=com.docker.compose.service=$1"); fi
    docker ps --all --quiet "${filters[@]}"
}
logs_of() { containers "$1" | while read -r id; do docker logs "$id" 2>&1; done; }
says() { grep -qE "$2" <<<"$(logs_of "$1")"; } # not by a pipe: grep ends at the first match, and docker would fail
count_of() { grep -cE "$2" <<<"$(logs_of "$1")" || true; }
says_times() { [ "$(count_of "$1" "$2")" -ge "$3" ]; }

not() { ! "$@"; }

# Waits at most $1 seconds until the rest, a command, succeeds.
within() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        if ((SECONDS >= deadline)); then return 1; fi
        sleep 0.5
    done
}

all_ended_well() {
    local id code bad=0
    for id in $(containers); do
        code="$(timeout 300 docker wait "$id" || echo "nothing within 300 s")"
        if [ "$code" != 0 ]; then
            say "    $(docker inspect --format '{{.Name}}' "$id") ended with $code:"
            docker logs --tail 5 "$id" 2>&1 | sed 's/^/      /' >&2
            bad=1
        fi
    done
    return "$bad"
}
# Says whether `docker inspect` tells of every container, by format $1, a line that matches $2, and there is one.
each_is() {
    local all fitting
    all="$(containers | xargs docker inspect --format "$1")"
    fitting="$(grep -cE "^$2\$" <<<"$all" || true)"
    [ "$fitting" -gt 0 ] && [ "$fitting" = "$(wc -l <<<"$all")" ]
}
none_restarted() { each_is '{{.RestartCount}}' 0; }
all_healthy() { each_is '{{.State.Health.Status}}' healthy; }
all_hardened() {
    each_is '{{.HostConfig.ReadonlyRootfs}} {{.Config.User}} {{.HostConfig.CapDrop}}' 'true 10001:10001 \[ALL\]' &&
        each_is '{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}}' '[1-9][0-9]* [1-9][0-9]*'
}
no_token_shown() {
    local shown token
    shown="$(containers | xargs docker inspect) $(docker image inspect weighmaster-server weighmaster-worker)"
    grep -q /run/secrets/server_tokens <<<"$shown" || return 1
    while read -r _ _ _ token; do
        if grep -qF -- "$token" <<<"$shown"; then return 1; fi
    done <"$SECRETS/server_tokens"
}
in_volume() {
    docker run --rm --network none --volume "${COMPOSE_PROJECT_NAME}_data:/data" --entrypoint python3 \
        weighmaster-server -c "$1"
}
result_is_there() {
    in_volume "
import json
from pathlib import Path
from safetensors.numpy import load_file
summary = json.loads(Path('/data/run/summary.json').read_text())
assert summary['status'] == 'done' and summary['steps'] == $1 and len(summary['workers']) == $2, summary
assert summary['test_accuracy_step'] == $1 and summary['test_accuracy'] > 0.9, summary
assert load_file('/data/model.safetensors')
assert list(Path('/data/checkpoints').glob('step-*/manifest.json')) or list(Path('/data/checkpoints').glob('step-*'))"
}
images() {
    say "images"
    local size base_size
    size="$(docker image inspect --format '{{.Size}}' weighmaster-server)"
    base_size="$(docker image inspect --format '{{.Size}}' "$base" 2>/dev/null || echo 0)"
    say "  the server's image has $(((size - base_size) / 1000000)) MB beyond its base"
    check "the server's image is small" [ $((size - base_size)) -le "$most_server_bytes" ]
    check "the server's image has no TensorFlow" docker run --rm --network none --entrypoint python3 weighmaster-server \
        -c 'import importlib.util as u; assert u.find_spec("tensorflow") is None'
}

trains() {
    say "one command trains and ends"
    local began=$SECONDS code=0
    "${compose[@]}" up >"$work/up.log" 2>&1 || code=$?
    local seconds=$((SECONDS - began))
    check "'up' ends with exit code 0 (it was $code)" [ "$code" = 0 ]
    check "within $most_seconds s (it took $seconds)" [ "$seconds" -le "$most_seconds" ]
    check "every container ended with 0" all_ended_well
    check "none was restarted" none_restarted
    check "the summary, the export and checkpoints are in the volume" result_is_there 300 3
    check "read-only, not root, no capabilities, limits" all_hardened
    check "no token in 'docker inspect' or in an image" no_token_shown
    say "the same again has nothing left to do"
    code=0
    "${compose[@]}" up >"$work/up.log" 2>&1 || code=$?
    check "'up' ends with exit code 0 (it was $code)" [ "$code" = 0 ]
    check "every container ended with 0" all_ended_well
    down
}

scales() {
    say "another number of workers needs no more than --scale"
    local count code
    for count in 2 4; do
        code=0
        STEPS=60 "${compose[@]}" up --scale "worker=$count" >"$work/up.log" 2>&1 || code=$?
        check "'up --scale worker=$count' ends with exit code 0 (it was $code)" [ "$code" = 0 ]
        check "every container ended with 0" all_ended_well
        check "none was restarted" none_restarted
        check "the result is of $count workers" result_is_there 60 "$count"
        down
    done
}

survives() {
    say "the server and the workers are killed; the server is called by a name with an underscore"
    local id returned back='rank [01] .* has (returned|joined)'
    # As people are told to: in a file, which every command finds.
    printf '%s\n' WORKERS=2 STEPS=6000 PS=parameter_server:5014 LOG_FORMAT=text >"$work/survives.env"
    local with_file=("${compose[@]}" --env-file "$work/survives.env")
    "${with_file[@]}" up -d --scale worker=2 >"$work/up.log" 2>&1
    check "the run begins" within 90 says ps '^step [1-9]'
    check "all become healthy" within 20 all_healthy
    id="$(containers ps)"
    "${with_file[@]}" kill -s SIGKILL ps >/dev/null 2>&1
    check "the server is gone" [ "$(docker inspect --format '{{.State.Running}}' "$(containers ps)")" = false ]
    "${with_file[@]}" up -d ps >"$work/up.log" 2>&1
    check "its container is not made anew" [ "$(containers ps)" = "$id" ]
    check "it goes on from its checkpoint" within 60 says ps 'going on from step [1-9][0-9]* of 6000'
    check "the workers have come back to it" within 90 says_times worker 'the server has started anew' 2
    returned="$(count_of ps "$back")"
    "${with_file[@]}" kill -s SIGKILL worker >/dev/null 2>&1
    "${with_file[@]}" up -d --scale worker=2 worker >"$work/up.log" 2>&1
    check "killed workers come back" within 120 says_times ps "$back" $((returned + 2))
    check "every container ended with 0" all_ended_well
    check "the result is there" result_is_there 6000 2
    down
}

by_ipv6() {
    say "the server is called by an IPv6 address"
    local subnet address
    subnet="fd77:$(printf '%x' $((RANDOM)))::/64"
    address="${subnet%/64}10"
    cat >"$work/ipv6.yml" <<YAML
services:
  ps:
    networks: {default: {ipv6_address: "$address"}}
networks:
  default:
    enable_ipv6: true
    ipam: {config: [{subnet: "$subnet"}]}
YAML
    export WORKERS=2 STEPS=60 PS="[$address]:5014" LISTEN=::
    local with_ipv6=("${compose[@]}" -f docker-compose.yml -f "$work/ipv6.yml")
    if ! "${with_ipv6[@]}" up -d --scale worker=2 >"$work/up.log" 2>&1; then
        untested+=("IPv6 with '${compose[*]}': $(tail -n 1 "$work/up.log")")
    else
        check "every container ended with 0" all_ended_well
        check "the result is there" result_is_there 60 2
    fi
    "${with_ipv6[@]}" down --volumes --remove-orphans --timeout 10 >/dev/null 2>&1 || true
    unset WORKERS STEPS PS LISTEN
}

with_tls() {
    say "with TLS"
    local tls=("${compose[@]}" -f docker-compose.yml -f docker-compose.tls.yml)
    if ! bash scripts/make_test_ca.sh "$work/ca" ps >"$work/ca.log" 2>&1; then
        untested+=("TLS: $(tail -n 1 "$work/ca.log")")
        return
    fi
    bash scripts/compose_secrets.sh --tls "$work/ca" "$SECRETS" 2>/dev/null
    export WORKERS=2 STEPS=60
    "${tls[@]}" up -d --scale worker=2 >"$work/up.log" 2>&1
    check "every container ended with 0" all_ended_well
    check "the result is there" result_is_there 60 2
    check "the server does not warn of open traffic" not says ps 'neither secret nor tamper-proof'
    unset WORKERS STEPS
    "${tls[@]}" down --volumes --remove-orphans --timeout 10 >/dev/null 2>&1 || true
}

bash scripts/compose_secrets.sh "$SECRETS" 2>/dev/null
for command in "${composes[@]}"; do
    read -ra compose <<<"$command"
    say "== $command ($("${compose[@]}" version --short 2>/dev/null || echo '?'))"
    if ! "${compose[@]}" build >"$work/build.log" 2>&1; then
        say "  FAILED: the images cannot be built:"
        tail -n 15 "$work/build.log" | sed 's/^/    /' >&2
        failures=$((failures + 1))
        continue
    fi
    images
    for part in "${parts[@]}"; do "$part"; done
done

if [ "${#untested[@]}" -gt 0 ]; then loudly "NOT TESTED:" "${untested[@]}"; fi
if [ "$failures" -gt 0 ]; then
    loudly "$failures checks of the compose cluster FAILED."
    exit 1
fi
say "The compose cluster works with: $(printf "'%s' " "${composes[@]}")"
