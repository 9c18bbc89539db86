# shellcheck shell=bash
# Sourced by the other scripts. Gives ROOT, PYTHON (of the checkout's .venv), say, fail, and:
#   prepare_environment core|worker|dev
# which makes .venv when there is none and installs what is missing; once done, it costs a few milliseconds.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$(basename "$0"): $1"
    exit "${2:-2}"
}

# Runs a command that may take minutes so that a signal ends it, and what it started, at once.
_interruptibly() {
    local status=0 child
    set -m # a process group of its own
    "$@" </dev/null &
    child=$!
    set +m
    trap 'kill -TERM -- "-$child" 2>/dev/null; exit 130' INT
    trap 'kill -TERM -- "-$child" 2>/dev/null; exit 143' TERM HUP
    wait "$child" || status=$?
    trap - INT TERM HUP
    return "$status"
}

_find_python() {
    local candidate
    for candidate in ${WEIGHMASTER_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed, and there is $(python3 --version 2>/dev/null || echo 'no python3'); \
install one, or name it: WEIGHMASTER_PYTHON=/path/to/python3.12 $0"
}

_make_venv() {
    local python="$1"
    if "$PYTHON" -c 'import pip' 2>/dev/null; then return; fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python cannot make virtual environments; \
install its venv package (on Debian and Ubuntu: apt-get install python3-venv) and try again"
    say "Making .venv with $("$python" --version)."
    _interruptibly "$python" -m venv --clear "$VENV" || fail "$python could not make $VENV"
}

_pip() {
    _interruptibly "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install $*; its message is above"
}

# The groups of pyproject.toml that are installed: no option of the server or a worker lacks what it needs.
_extras() {
    case "$1" in
        core) echo "[metrics,tensorboard]" ;;
        worker) echo "[datasets,metrics,tensorboard]" ;;
        dev) echo "[dev]" ;;
    esac
}

_install() {
    local release
    say "Installing what '$1' needs into .venv; this takes a minute or two, once."
    _pip --editable "$ROOT$(_extras "$1")"
    if [ "$1" = core ]; then return; fi
    # A TensorFlow that is there, whichever build it is, is used as it is.
    if ! _interruptibly "$PYTHON" -c 'import tensorflow' 2>/dev/null; then
        _pip --editable "${ROOT}[tensorflow-cpu]"
    fi
    # Its dependency on the full `tensorflow` would put a second one beside the CPU build.
    release="$("$PYTHON" -c 'import importlib.metadata as m
names = m.packages_distributions()["tensorflow"]
print(".".join(m.version(names[0]).split(".")[:2]))')"
    _pip --no-deps "tf-keras==$release.*"
}

# A stamp in .venv says from which pyproject.toml, with which groups, in which folder, something was installed.
_stamp() { printf '%s %s %s\n' "$(cksum <"$ROOT/pyproject.toml")" "$(_extras "$1")" "$ROOT"; }

# Whoever has what `dev` needs has what a worker needs, and so on.
_is_installed() {
    local kind
    [ -x "$PYTHON" ] || return 1
    for kind in dev worker core; do
        if [ "$(cat "$VENV/.installed-$kind" 2>/dev/null)" = "$(_stamp "$kind")" ]; then return 0; fi
        if [ "$kind" = "$1" ]; then return 1; fi
    done
}

prepare_environment() {
    local python
    if _is_installed "$1"; then return; fi
    python="$(_find_python)"
    # Two scripts that start at once take turns. The lock is on the folder: no file to leave behind.
    exec 9<"$ROOT"
    _interruptibly "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    if ! _is_installed "$1"; then
        _make_venv "$python"
        _install "$1"
        _stamp "$1" >"$VENV/.installed-$1"
    fi
    exec 9<&-
}
