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
prepare_environment dev
cd "$ROOT"
# pytest ends with 5 when no test ran: an error like any other.
exec "$PYTHON" -m pytest "${selection[@]}" ${arguments[@]+"${arguments[@]}"}
