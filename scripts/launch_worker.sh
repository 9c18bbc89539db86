#!/usr/bin/env bash
# Starts one worker, or an evaluator; every option goes to it (`scripts/launch_worker.sh --help` lists them).
# Needs Python 3.11 or newer; makes .venv in the checkout when there is none. Uses a TensorFlow that is
# there, else installs the CPU build.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment worker
export WEIGHMASTER_STARTED_AS="$0" # for the advice in its messages
exec "$PYTHON" -m worker "$@"
