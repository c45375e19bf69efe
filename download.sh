#!/usr/bin/env bash
# Gets the weights onto this machine and verifies them. ./download.sh --help
set -euo pipefail
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"
exec python3 "$root/launcher/bootstrap.py" "$(basename "$0")" weights "$@"
