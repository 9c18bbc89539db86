#!/usr/bin/env bash
# Checks format, lint, types, layering and shell scripts; changes nothing. All are run, then it says which failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment dev
cd "$ROOT"

failed=()
check() {
    local name="$1"
    shift
    say "== $name"
    "$@" || failed+=("$name")
}

# The project's own folders: files that a user keeps beside them are no business of ours.
python_files=(protocol ps worker tests benchmarks)
shell_files=(scripts/*.sh .ci/run)
check format "$PYTHON" -m ruff format --check "${python_files[@]}"
check lint "$PYTHON" -m ruff check "${python_files[@]}"
check types "$PYTHON" -m mypy
check layering "$PYTHON" -m pytest -q tests/unit/test_layering.py
for file in "${shell_files[@]}"; do check "syntax of $file" bash -n "$file"; done
shellcheck="$VENV/bin/shellcheck"
[ -x "$shellcheck" ] || shellcheck="$(command -v shellcheck || true)"
if [ -n "$shellcheck" ]; then
    check shellcheck "$shellcheck" --external-sources --source-path=SCRIPTDIR "${shell_files[@]}"
fi

if [ "${#failed[@]}" -gt 0 ]; then
    fail "failed: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')" 1
fi
say "All checks passed."
