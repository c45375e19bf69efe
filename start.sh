#!/usr/bin/env bash
# Serves GLM-5.3-Flash on two Sparks. ./start.sh --help
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"
exec python3 "$root/launcher/bootstrap.py" "$(basename "$0")" tp2 "$@"
