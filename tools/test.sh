#!/bin/sh
# Makes .venv if needed, then lint, types and the whole test suite.  Arguments go to pytest (then lint and types are
# left out): sh tools/test.sh tests/host -k ledger
. "$(dirname "$0")/venv.sh" "test,build"
if [ $# -gt 0 ]; then exec $python -m pytest "$@"; fi
$python build_kernels.py &&
$python -m ruff check . &&
$python -m mypy flashnext_drv build_kernels.py &&
exec $python -m pytest -q -n 2 --dist loadfile
