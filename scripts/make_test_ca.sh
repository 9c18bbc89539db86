#!/usr/bin/env bash
# Makes an authority for trying TLS out, a certificate of it for the server and one for clients.
# Needs openssl 1.1.1 or newer. The authority's key lies unencrypted beside them: not for a run that matters.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/make_test_ca.sh DIR [NAME...]

Makes, in DIR, files in PEM that are good for 30 days:
  ca.pem       the authority            --tls-ca of workers, and of a server that asks them for certificates
  server.pem   for the names given      --tls-cert of the server, with server.key as --tls-key
  client.pem   for any worker           --tls-cert of a worker, with client.key as --tls-key
A NAME is a host name or an IP address by which workers call the server; without one: localhost 127.0.0.1 ::1.
Where DIR has an authority already, the two certificates are made anew, of that one.
USAGE
}

fail() {
    printf 'make_test_ca.sh: %s\n' "$1" >&2
    exit 2
}

DAYS=30

# issue NAME EXTENSIONS: makes NAME.key and NAME.pem.
issue() {
    local name="$1" extensions="$2"
    run openssl ecparam -name prime256v1 -genkey -noout -out "$name.key"
    run openssl req -new -key "$name.key" -subj "/CN=weighmaster test $name" -out "$name.csr"
    printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "$extensions" >"$name.ext"
    run openssl x509 -req -in "$name.csr" -CA ca.pem -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
        -days "$DAYS" -sha256 -extfile "$name.ext" -out "$name.pem"
}

make_authority() {
    local subject
    subject="/CN=weighmaster test authority $(openssl rand -hex 4)" # two of one name would be taken for each other
    run openssl ecparam -name prime256v1 -genkey -noout -out ca.key
    run openssl req -new -key ca.key -subj "$subject" -out ca.csr
    printf '%s\n' "basicConstraints=critical,CA:TRUE,pathlen:0" "keyUsage=critical,keyCertSign,cRLSign" \
        "subjectKeyIdentifier=hash" >ca.ext
    run openssl x509 -req -in ca.csr -signkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
        -days "$DAYS" -sha256 -extfile ca.ext -out ca.pem
}

# openssl tells of each step on standard error; that is shown only where one fails.
run() {
    local told
    told="$("$@" 2>&1)" || fail "openssl failed: $told"
}

# alternatives NAME...: the names as a certificate lists them.
alternatives() {
    local name list=""
    for name in "$@"; do
        case "$name" in
            *[!A-Za-z0-9_.:*-]* | "" | -*) fail "'$name' is no host name and no IP address" ;;
            *:*) list+=",IP:$name" ;;
            *[!0-9.]*) list+=",DNS:$name" ;;
            *) list+=",IP:$name" ;;
        esac
    done
    printf '%s' "${list#,}"
}

case "${1:-}" in
    -h | --help)
        usage
        exit 0
        ;;
    "" | -*) fail "name a directory for the files; --help says more" ;;
esac
command -v openssl >/dev/null || fail "openssl is needed, and is not installed"
directory="$1"
shift
[ "$#" -gt 0 ] || set -- localhost 127.0.0.1 ::1
names="$(alternatives "$@")"

umask 077
mkdir -p "$directory"
cd "$directory"
trap 'rm -f {ca,server,client}.{csr,ext}' EXIT
[ -e ca.pem ] && [ -e ca.key ] || make_authority
issue server "extendedKeyUsage=serverAuth
subjectAltName=$names"
issue client "extendedKeyUsage=clientAuth"
printf 'In %s: ca.pem, server.pem and client.pem with their keys, good for %d days; the server is %s.\n' \
    "$directory" "$DAYS" "$*"
