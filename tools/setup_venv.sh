#!/bin/sh
# Make .venv in this clone with distclip (editable) and all that development needs, or bring it up to date.
#
#   usage: tools/setup_venv.sh [PIP OPTION...]
#
# Needs python3 (3.10 or later) with venv. Versions come from constraints.txt. A stamp in .venv names what it was made
# from, so that a second call takes no time, and a change of pyproject.toml, constraints.txt, the interpreter or the
# clone's path makes it run again.
set -eu

cd "$(dirname -- "$0")/.."
python=${PYTHON:-python3}

"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
    echo "distclip needs Python 3.10 or later with venv (Debian: apt-get install python3 python3-venv)" >&2
    exit 1
}

place="$PWD $("$python" -c 'import sys; print(sys.version)')"
wanted="$place $(cat pyproject.toml constraints.txt | cksum) $*"
stamp=.venv/distclip-stamp
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

# Scripts in a venv hold its path and interpreter: one that was made elsewhere is made anew.
if [ "$(cat .venv/distclip-place 2>/dev/null)" != "$place" ]; then
    echo "Making .venv"
    "$python" -m venv --clear .venv
    printf '%s\n' "$place" >.venv/distclip-place
fi
echo "Installing distclip and its tools into .venv (a minute or two the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@" --editable '.[dev]'
printf '%s\n' "$wanted" >"$stamp"
