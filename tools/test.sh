#!/bin/sh
# Makes .venv if needed, builds the kernels of all architectures (cached), then lint, types, the whole test suite
# and the kernel contract with its planted controls.
# Arguments go to pytest, and then nothing else runs: sh tools/test.sh tests/host -k ledger
extras=test,build
. "$(dirname "$0")/venv.sh"
if [ $# -gt 0 ]; then exec $python -m pytest "$@"; fi
unset FLASHNEXT_ARCHS
$python build_kernels.py &&
$python -m ruff check . &&
$python -m mypy &&
$python -m pytest -q -n 2 --dist worksteal &&
exec $python -m flashnext_drv check --device sim
