#!/usr/bin/env bash
# Compile locks/cpu.txt and locks/gpu.txt from pyproject.toml, called by `make lock`.
# Where packages come from is pip's own setting and never enters the files.
set -euo pipefail

readonly tools=build/lock-venv uv_version=0.13.9
python=${PYTHON:-python3.11}

if ! "$tools/bin/uv" --version 2>/dev/null | grep -q "^uv $uv_version"; then
  "$python" -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check "uv==$uv_version"
fi

# pip's value of a setting; its environment wins over its files.
pip_setting() {
  "$tools/bin/pip" config list | sed -n "s/^\(:env:\|global\)\.$1='\(.*\)'$/\1 \2/p" |
    sort | head -n 1 | cut -d ' ' -f 2-
}

sources=() builds=()
index=$(pip_setting index-url)
[ -z "$index" ] || sources+=(--index-url "$index")
for place in $(pip_setting find-links); do builds+=(--find-links "$place"); done
for place in $(pip_setting extra-index-url); do
  case $place in http*) builds+=(--extra-index-url "$place") ;; esac
done

compile() {
  local extra=$1; shift
  "$tools/bin/uv" pip compile pyproject.toml --quiet --extra "$extra" --extra dev \
    --override locks/overrides.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --index-strategy unsafe-best-match --no-emit-index-url --no-emit-find-links --no-header \
    ${UPGRADE:+--upgrade} "$@" -o "locks/$extra.txt"
}

compile cpu "${sources[@]}" "${builds[@]}"
# The same versions where both can have them; and no CPU build of torch from pip's extra places.
[ -e locks/gpu.txt ] || grep -v '^torch==' locks/cpu.txt >locks/gpu.txt
compile gpu "${sources[@]}"
# `==2.13.0` would also accept a CPU build, 2.13.0+cpu; `===` takes the plain version alone.
sed -i 's/^torch==\([0-9]\)/torch===\1/' locks/gpu.txt
