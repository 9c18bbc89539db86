#!/usr/bin/env bash
# Starts one parameter server; every option goes to it (`scripts/launch_ps.sh --help` lists them).
# Needs Python 3.11 or newer; makes .venv in the checkout when there is none. Installs no TensorFlow.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment core
export WEIGHMASTER_STARTED_AS="$0" # for the advice in its messages
exec "$PYTHON" -m ps "$@"
