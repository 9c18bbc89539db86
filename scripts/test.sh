#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [--long] [pytest's options and files]
#   --long   also the tests that take minutes, and many more random cases
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

selection=(-m "not long")
arguments=()
for argument in "$@"; do
    if [ "$argument" = --long ]; then
        selection=(--hypothesis-profile=long)
    else
        arguments+=("$argument")
    fi
done
# All of them share the CPUs: most wait for processes that start. A few run one by one, as pytest is used to.
if [ "${#arguments[@]}" -eq 0 ]; then selection+=(--numprocesses=auto --maxprocesses=4 --dist=worksteal); fi
prepare_environment dev
cd "$ROOT"
# pytest ends with 5 when no test ran: an error like any other.
exec "$PYTHON" -m pytest "${selection[@]}" ${arguments[@]+"${arguments[@]}"}
