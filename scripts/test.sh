#!/usr/bin/env bash
# Run the tests in .venv, with the quickstart's model in place. Arguments go to pytest:
#
#     scripts/test.sh                    the whole suite
#     scripts/test.sh -k speculative     the tests with that in their name
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

lock
setup_venv requirements.txt requirements-test.txt scripts/requirements.txt
fetch_smollm2
unlock

cd "$root"
exec "$python" -m pytest "$@"
