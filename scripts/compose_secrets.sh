#!/usr/bin/env bash
# Makes the tokens of the compose cluster in secrets/, or in the directory that is named; needs nothing but bash.
#     scripts/compose_secrets.sh [--tls DIR] [DIRECTORY]
# Tokens that are there stay. With --tls, server.pem, server.key and ca.pem in DIR are copied to tls_cert, tls_key and
# tls_ca, which docker-compose.tls.yml needs, in the place of those that are there.
# The directory is yours alone; the files in it can be read by any user, because containers see them with the mode
# that they have here, and do not run as you.
set -euo pipefail
called_from="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf '%s\n' "compose_secrets.sh: $1" >&2
    exit 2
}

umask 077
tls=""
if [ "${1:-}" = --tls ]; then
    tls="${2:-}"
    if [ -z "$tls" ]; then fail "--tls needs the directory with server.pem, server.key and ca.pem"; fi
    if [ "${tls#/}" = "$tls" ]; then tls="$called_from/$tls"; fi
    for file in server.pem server.key ca.pem; do
        if [ ! -r "$tls/$file" ]; then fail "$tls/$file is missing, or cannot be read"; fi
    done
    shift 2
fi
case "${1:-}" in -*) fail "there is no option '$1'; usage: scripts/compose_secrets.sh [--tls DIR] [DIRECTORY]" ;; esac
directory="${1:-${SECRETS:-secrets}}"
mkdir -p "$directory"
if [ -L "${directory%/}" ] || [ ! -O "$directory" ]; then
    fail "$directory is a link or belongs to somebody else: name another one"
fi
chmod 700 "$directory"
if [ ! -e "$directory/.gitignore" ]; then echo '*' >"$directory/.gitignore"; fi

# Renamed into place, so that nobody ever reads half of one.
readable() {
    chmod 444 "$1.new"
    mv -f "$1.new" "$1"
}

# 256 random bits for all who have this role.
make() {
    local role="$1" file="$directory/$1_token"
    if [ -e "$file" ]; then return; fi
    printf '* %s * %s\n' "$role" "$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n')" >"$file.new"
    readable "$file"
    printf '%s\n' "made $file" >&2
}

for role in worker validator evaluator; do make "$role"; done
cat "$directory"/{worker,validator,evaluator}_token >"$directory/server_tokens.new"
readable "$directory/server_tokens"

if [ -n "$tls" ]; then
    for pair in server.pem:tls_cert server.key:tls_key ca.pem:tls_ca; do
        cat "$tls/${pair%:*}" >"$directory/${pair#*:}.new"
        readable "$directory/${pair#*:}"
        printf '%s\n' "copied $tls/${pair%:*} to $directory/${pair#*:}" >&2
    done
fi
