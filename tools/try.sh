#!/bin/sh
# From a fresh checkout to 32 generated tokens: makes .venv, installs, makes a small random model, generates.
# Runs on a GPU when a CUDA driver with one is found, else in the CPU simulator.  Arguments go to `generate`.
extras=
. "$(dirname "$0")/venv.sh"
pack=.venv/try-pack
[ -f "$pack/config.json" ] || $python -m flashnext_drv synth "$pack" --model micro --seed 1 || exit $?
exec $python -m flashnext_drv generate "$pack" --ids "1,2,3,5,8,13,21,34" --max-new 32 --no-stop "$@"
