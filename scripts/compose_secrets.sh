#!/usr/bin/env bash
# Makes the tokens of the compose cluster in secrets/, or in the directory that is named; needs nothing but bash.
# Tokens that are there stay. The directory is yours alone; the files in it can be read by any user, because
# containers see them with the mode that they have here, and do not run as you.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 077
directory="${1:-${SECRETS:-secrets}}"
mkdir -p "$directory"
if [ -L "${directory%/}" ] || [ ! -O "$directory" ]; then
    printf '%s\n' "compose_secrets.sh: $directory is a link or belongs to somebody else: name another one" >&2
    exit 2
fi
chmod 700 "$directory"
if [ ! -e "$directory/.gitignore" ]; then echo '*' >"$directory/.gitignore"; fi

# 256 random bits for all who have this role.
make() {
    local role="$1" file="$directory/$1_token"
    if [ -e "$file" ]; then return; fi
    printf '* %s * %s\n' "$role" "$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n')" >"$file.new"
    chmod 444 "$file.new"
    mv "$file.new" "$file"
    printf '%s\n' "made $file" >&2
}

for role in worker validator evaluator; do make "$role"; done
cat "$directory"/{worker,validator,evaluator}_token >"$directory/server_tokens.new"
chmod 444 "$directory/server_tokens.new"
mv "$directory/server_tokens.new" "$directory/server_tokens"
