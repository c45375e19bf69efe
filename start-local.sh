#!/usr/bin/env bash
# Serves a small GLM-5.3-Flash-shaped EXL3 model on this machine's CPU. ./start-local.sh --help
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"

for python in python3 python3.12 python3.13 python3.11 python3.14; do
  if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
    # -P: a folder named launcher where the user happens to be is not ours.
    PYTHONPATH="$root" exec "$python" -P -m launcher local "$@"
  fi
done

echo "No Python 3.11 to 3.14 with the venv module was found; install one, on Debian or Ubuntu with: sudo apt-get install python3 python3-venv" >&2
exit 3
