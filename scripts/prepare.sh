#!/usr/bin/env bash
# Download a model from the Hugging Face hub into checkpoints/ORG/NAME; an interrupted download goes on where it was.
# HF_TOKEN is used where it is set; a gated model needs it.
#
#     scripts/prepare.sh meta-llama/Llama-3.2-1B-Instruct
#     scripts/prepare.sh Qwen/Qwen3-0.6B --revision main
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
    -h | --help) say "usage: scripts/prepare.sh ORG/NAME [--revision REVISION]" && exit 0 ;;
    [!-]*/?*) ;;
    *) die "${1:-nothing} is not ORG/NAME; usage: scripts/prepare.sh ORG/NAME [--revision REVISION]" ;;
esac

lock
setup_venv requirements.txt scripts/requirements.txt
unlock
exec "$python" "$root/scripts/download.py" "$@"
