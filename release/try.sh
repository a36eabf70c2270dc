#!/bin/bash
# Installs the wheel of dist/ into an empty environment, as a user does, and runs the demo from there; then the source
# distribution. Usage: release/try.sh PYTHON; TORCH_INDEX=URL takes torch from there, EXTRAS=[a,b] adds extras.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d "${TMPDIR:-/tmp}/etha-wheel-XXXXXX")
trap 'rm -rf "$place"' EXIT
cd "$place"  # nothing of the clone is importable from here
unset PYTHONPATH

"$1" -m venv env
install=(env/bin/python -m pip --disable-pip-version-check install --quiet)
"${install[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$root/constraints.txt")"
"${install[@]}" --constraint "$root/constraints.txt" "$(echo "$root"/dist/*.whl)${EXTRAS:-}"
env/bin/python -m pip check
env/bin/python "$root/release/installed.py"

export ETHA_RUNTIME_DIR="$place/run" ETHA_IDLE=1
env/bin/etha --version
env/bin/etha demo --steps 20 --every 20
env/bin/etha stop 2>/dev/null || true

"${install[@]}" --force-reinstall --no-deps "$root"/dist/*.tar.gz
env/bin/python -c 'import etha.native; print(etha.native.load().name, etha.__file__)'
env/bin/etha demo --synthetic 0.02
env/bin/etha stop 2>/dev/null || true
