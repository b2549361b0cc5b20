# shellcheck shell=bash
# Sourced by the scripts beside it: checks that fail early, and one way to run the command.

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# The comment at the top of the script is its help.
usage() {
    awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"
}

# want_number NAME LOWEST: the variable NAME must hold a whole number, not below LOWEST.
want_number() {
    local value="${!1}"
    [[ "$value" =~ ^[0-9]+$ ]] || die "$1=$value: expected a whole number"
    ((value >= $2)) || die "$1=$value: expected at least $2"
}

# want_gpus COUNT: this machine must have so many; skipped with DRY_RUN=1.
want_gpus() {
    [ "${DRY_RUN:-0}" = 1 ] && return
    command -v nvidia-smi >/dev/null || die "nvidia-smi not found: this script needs $1 Hopper GPU(s)"
    local found
    found="$(nvidia-smi --list-gpus | wc -l)"
    ((found >= $1)) || die "needs $1 GPU(s), this machine has $found"
}

want_command() {
    [ "${DRY_RUN:-0}" = 1 ] && return
    command -v "$1" >/dev/null || die "$1 not found: $2"
}

# Takes this process's place, so that signals reach the server; DRY_RUN=1 only prints.
run() {
    printf '+ %s\n' "$*" >&2
    [ "${DRY_RUN:-0}" = 1 ] || exec "$@"
}
