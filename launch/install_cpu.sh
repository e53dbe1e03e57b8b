#!/usr/bin/env bash
# Make .venv with everything a CPU run needs; a second call sees that it is there. `install_cpu.sh dev docs`: tests, linters and the site too.
# `install_cpu.sh vision`: what vLLM needs for models that read images.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
setup_environment cpu "$@"
echo "ready: $PYTHON"
