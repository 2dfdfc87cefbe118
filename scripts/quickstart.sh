#!/usr/bin/env bash
# From a fresh clone to generated text: makes .venv, gets SmolLM2-135M-Instruct, runs generate.py.
#
#     scripts/quickstart.sh                                  answer a question
#     scripts/quickstart.sh --prompt "Once upon a time"      continue a text
#     scripts/quickstart.sh --interactive --chat             talk
#
# All arguments go to generate.py (--help lists them).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

lock
setup_venv requirements.txt scripts/requirements.txt
fetch_smollm2
unlock

prompt=(--chat --prompt "What is gravity?" --temperature 0)
model=(--checkpoint_path "$smollm2")
for argument in "$@"; do
    case $argument in
        --prompt | --prompt=* | --prompt_file | --prompt_file=* | --interactive | -h | --help) prompt=() ;;
        --random_weights | --random_weights=*) prompt=() model=() ;;
    esac
done
exec "$python" "$root/generate.py" ${model[@]+"${model[@]}"} ${prompt[@]+"${prompt[@]}"} "$@"
