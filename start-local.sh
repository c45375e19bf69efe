#!/usr/bin/env bash
# Serves a small GLM-5.3-Flash-shaped EXL3 model on this machine's CPU. ./start-local.sh --help
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"

# What runs must be stoppable with the Python that is there, whichever it was started with.
case "${1:-}" in
  stop | status | logs | cache) suits='sys.version_info >= (3, 10)' ;;
  *) suits='(3, 11) <= sys.version_info < (3, 15) and __import__("venv") and __import__("ensurepip")' ;;
esac
for python in python3 python3.12 python3.13 python3.11 python3.14 python3.10; do
  if "$python" -c "import sys; sys.exit(not ($suits))" 2>/dev/null; then
    # -I: a folder named launcher where the user happens to be is not ours, and PYTHON* variables do not count.
    exec "$python" -I -c 'import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module("launcher", run_name="__main__")' "$root" local "$@"
  fi
done

echo "No Python 3.11 to 3.14 with the venv module was found; install one, on Debian or Ubuntu with: sudo apt-get install python3 python3-venv" >&2
exit 3
