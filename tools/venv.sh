# Sourced by try.sh and test.sh: a virtual environment in .venv with this checkout installed in it.
# usage: extras=LIST; . tools/venv.sh      LIST: extras of pyproject.toml, with commas, or empty
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 3
base=${PYTHON:-python3}
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "needs Python 3.11 or newer as '$base'; set PYTHON=/path/to/python3" >&2; exit 3; }
[ -x .venv/bin/python ] || "$base" -m venv .venv || {
    echo "cannot make a virtual environment: install the venv module of $base (Debian: python3-venv)" >&2; exit 3; }
# A compiler builds the simulator; without one the ziglang wheel does.
command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 || extras="${extras:+$extras,}sim"
# Only the images that this machine's GPU runs: all six architectures take minutes (`python build_kernels.py`).
if [ -z "$FLASHNEXT_ARCHS" ]; then
    cc=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
    case $cc in
        90) FLASHNEXT_ARCHS=sm_90a ;;
        80 | 86 | 89 | 120 | 121) FLASHNEXT_ARCHS=sm_$cc ;;
        8?) FLASHNEXT_ARCHS=sm_80 ;;
        *) FLASHNEXT_ARCHS=none ;;
    esac
    export FLASHNEXT_ARCHS
fi
stamp=".venv/installed-${extras:-core}-$FLASHNEXT_ARCHS"
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "installing into .venv (a minute or two)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}" >&2 || exit 3
    touch "$stamp"
fi
python=.venv/bin/python
