#!/usr/bin/env bash
# Everything that only a GPU can show, in under 8 minutes: quantized layers, temperature 0, waits for the device, speed.
# It needs no network and no .venv: torch and what the program imports, in the python3 that there is. Results are printed,
# and written to $OUT/device_check.json where OUT is set. Arguments go to device_check.py:
#
#     scripts/device_check.sh                        on a GPU
#     scripts/device_check.sh --device cpu --tiny    whether the script itself works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
export PYTHONUNBUFFERED=1
exec timeout 480 "$python" scripts/device_check.py "$@"
