#!/usr/bin/env bash
# Make .venv from a compiled lock file: `scripts/setup.sh cpu|gpu`, called by `make setup`.
# Everything that can be missing is looked for before anything is downloaded. It may be killed at
# any time, run again, and run twice at once. The stamp file says that it is done.
set -euo pipefail

readonly flavour=$1 lock=locks/$1.txt stamp=.venv/.setup-$1 log=.venv/setup.log
readonly site=.venv/lib/python3.11/site-packages
python=${PYTHON:-python3.11}
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

check_tools() {
  local missing=0 debian="apt-get install"
  want() { say "$@"; missing=1; }
  [ "$(uname -s)" = Linux ] || want "this is $(uname -s); the pinned packages are built for Linux"
  command -v flock >/dev/null || want "flock is missing; type: $debian util-linux"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    want "$python is not a Python 3.11; type: $debian python3.11 python3.11-venv python3.11-dev" \
      "(or make setup PYTHON=/path/to/python3.11)"
  else
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
      want "$python has no venv; type: $debian python3.11-venv"
    "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' \
      2>/dev/null || want "$python has no C headers (Python.h); type: $debian python3.11-dev"
  fi
  has_compiler || want "no C++ compiler (g++); type: $debian g++"
  has_room || want "$(free_mb) MB are free here, $needed_mb MB are needed; free some space"
  [ $missing = 0 ] || exit 1
}

has_compiler() {
  local name
  for name in ${CXX:-} g++ c++ clang++; do command -v "$name" >/dev/null && return; done
  return 1
}

free_mb() { df -Pm . | awk 'NR == 2 { print $4 }'; }
has_room() {
  local there_mb=0
  [ ! -d .venv ] || there_mb=$(du -sm .venv | cut -f1)
  needed_mb=$(( ($([ "$flavour" = gpu ] && echo 20000 || echo 8000)) - there_mb ))
  [ "$(free_mb)" -ge "$needed_mb" ]
}

check_other_flavour() {
  local other
  for other in .venv/.setup-*; do
    [ ! -e "$other" ] || [ "$other" = "$stamp" ] ||
      fail "this .venv holds the ${other#.venv/.setup-} build of vLLM and can't hold both;" \
        "type: rm -r .venv, then run it again"
  done
}

is_done() {
  local source
  [ -e "$stamp" ] || return 1
  for source in "$lock" pyproject.toml scripts/setup.sh; do
    [ ! "$source" -nt "$stamp" ] || return 1
  done
}

make_venv() {
  if .venv/bin/python -m pip --version >/dev/null 2>&1; then
    [ -d "$site" ] || fail ".venv is not of Python 3.11; type: rm -r .venv, then run it again"
  else
    "$python" -m venv .venv
  fi
}

# Of all packages only this one often lies elsewhere than the others: ask before the long download.
check_torch() {
  local pin found
  pin=$(sed -n 's/^torch==*\([^ ;]*\).*/\1/p' "$lock")
  [ ! -e "$site/torch-$pin.dist-info/INSTALLER" ] || return 0
  found=$(.venv/bin/pip index versions torch 2>"$log" | sed -n 's/^Available versions: //p') || true
  grep -qFx "$pin" <<<"${found//, /$'\n'}" && return
  [ -n "$found" ] || fail "pip finds no torch at all: $(grep -v '^WARNING: pip index' "$log" |
    tail -n 1 || true) Check the network and pip's settings (pip config list)"
  [ "$flavour" = cpu ] || fail "pip finds no torch $pin, only: ${found:0:60}..."
  say "pip finds no torch $pin (the CPU build of PyTorch), only: ${found:0:60}..."
  fail "add PyTorch's own CPU index to pip's settings, then run it again; type:" \
    ".venv/bin/pip config --user set global.extra-index-url ADDRESS" \
    "(ADDRESS: what pytorch.org, Get Started, shows for Pip and CPU)"
}

# pip takes a package whose installation was killed for installed: INSTALLER is written last.
drop_half_installed() {
  local info
  for info in "$site"/*.dist-info; do
    [ -e "$info/INSTALLER" ] || rm -rf "$info"
  done
  rm -rf "$site"/~*
}

install_packages() {
  local total
  total=$(grep -c '^[A-Za-z0-9]' "$lock")
  say "installing $total packages into .venv, 3 to 10 minutes the first time (details: $log)"
  if ! .venv/bin/pip install --no-deps -r "$lock" 2>&1 | tee "$log" | show_progress "$total"; then
    tail -n 15 "$log" >&2
    fail "pip could not install $lock (see above); run it again, it goes on from here"
  fi
  # compat: a plain path entry. The default finder loses against any folder named hvd_ray in the
  # current one, such as the checkout itself seen from its parent.
  .venv/bin/pip install --quiet --no-deps --no-build-isolation \
    --config-settings editable_mode=compat --editable . ||
    fail "pip could not install hvd_ray itself (see above)"
}

show_progress() {
  local line num=0 total=$1
  while IFS= read -r line; do
    case $line in
      Collecting*|Requirement\ already*) num=$((num + 1)); tick "$num of $total: ${line:0:50}" ;;
      *Building\ wheel*started) tick "compiling ${line#*Building wheel for }" ;;
      Installing\ collected*) tick "all $total are here, unpacking them (about a minute)" ;;
    esac
  done
  [ ! -t 2 ] || printf '\r\033[K' >&2
}

tick() {
  if [ -t 2 ]; then printf '\r\033[Ksetup: %s' "$1" >&2
  elif [[ ${num:-0} -eq 0 || $((num % 50)) -eq 0 || $1 != *:* ]]; then say "$1"; fi
}

check_tools
mkdir -p .venv
exec 9>.venv/.setup.lock
flock -n 9 || { say "another make is filling .venv; waiting for it"; flock 9; }
if ! is_done; then
  check_other_flavour
  make_venv
  check_torch
  drop_half_installed
  install_packages
  touch "$stamp"
  say "done; .venv/bin/hvd doctor tells whether everything works"
fi
