#!/usr/bin/env bash
# Set up the environment, then lint, check types and test: whole runs beside all other tests, each half with a core of its own.
# nightly also installs what only its tests need: trackers and, as root on Debian, a browser and bubblewrap.
# Usage: bash tests/run.sh [unit|integration|all|nightly] [pytest arguments ...]      (all is the default)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/env.sh"
what=${1:-all}
shift || true
options=()
case $what in
  unit) paths=(tests/unit) limit_s=2400 && options=(--timeout 300) ;;
  integration) paths=(tests/integration) limit_s=3600 ;;
  all) paths=(tests/integration) limit_s=4800 && unit_options=(--timeout 300) ;;
  # everything, the tests marked nightly too, and 10,000 examples of each property where it is otherwise 100
  nightly) paths=(tests/integration) limit_s=14400 options=(--timeout 3600) && export HYPOTHESIS_PROFILE=nightly ;;
  *) fail "tests/run.sh: $what is not unit, integration, all or nightly" ;;
esac
setup_environment cpu dev docs
cd "$ROOT"
if [[ $what == all || $what == nightly ]] && [ ! -d .venv-npu/torch_npu ]; then
  # beside the environment, not in it: with torch_npu installed, a plain `import torch` wants CANN
  echo "installing torch_npu for tests/npu_sim"
  install_beside .venv-npu "torch_npu==$TORCH_VERSION" || echo "torch_npu cannot be installed here; tests/npu_sim will be skipped"
fi
if [[ $what != unit ]] && [ ! -d .venv-core-0.12/megatron ]; then
  echo "installing megatron-core 0.12.1 for tests/integration/test_older_core.py and tests/npu_sim"
  install_beside .venv-core-0.12 megatron-core==0.12.1 || echo "it cannot be installed here; tests with it will be skipped"
fi
if [[ $what != unit ]] && [ ! -d .venv-tinker/tinker ]; then
  echo "installing tinker's SDK for tests/integration/test_service.py"
  install_beside .venv-tinker -r requirements/tinker.txt || echo "it cannot be installed here; tests with it will be skipped"
fi
if [ "$what" = nightly ] && [ ! -d .venv-cookbook/tinker_cookbook ]; then
  echo "installing tinker's cookbook for tests/integration/test_service_cookbook.py"
  install_beside .venv-cookbook -r requirements/cookbook.txt || echo "it cannot be installed here; its tests will be skipped"
fi
if [ "$what" = nightly ] && [ ! -d .venv-ascend-engine/vllm_ascend ]; then
  echo "installing vllm-ascend for tests/npu_sim/engine"
  install_beside .venv-ascend-engine -r requirements/ascend-engine.txt || echo "it cannot be installed here; its tests will be skipped"
fi
if [ "$what" = nightly ] && [ ! -d .venv-gym/reasoning_gym ]; then
  echo "installing reasoning-gym for tests/unit/data/test_made_rows.py"
  install_beside .venv-gym -r requirements/gym.txt || echo "it cannot be installed here; its tests will be skipped"
fi
if [ "$what" = nightly ] && [ ! -d .venv-trl/trl ]; then
  echo "installing TRL for tests/integration/test_trl_losses.py"
  install_beside .venv-trl -r requirements/peers.txt || echo "it cannot be installed here; its tests will be skipped"
fi
# make_for NAME TESTS: .venv-NAME, an environment of its own, since its packages want other versions than engines do
make_for() {
  if [ -f ".venv-$1/.complete" ]; then return; fi
  echo "installing requirements/$1.txt for $2"
  make_beside ".venv-$1" -r "requirements/$1.txt" && touch ".venv-$1/.complete" || echo "it cannot be installed here; $2 will be skipped"
}
if [ "$what" = nightly ]; then
  make_for trackers tests/integration/test_trackers_offline.py
  make_for agents tests/integration/test_agents_of_frameworks.py
  make_for verifiers tests/integration/test_verifiers.py
  make_for harnesses tests/integration/test_harnesses.py
  make_for openenv tests/integration/test_openenv_server.py
  make_for programs tests/integration/test_agents_of_programs.py
fi
# install_packages PROGRAM TEST PACKAGE ...: Debian packages, for root, where there is no PROGRAM, without which TEST is skipped
install_packages() {
  if command -v "$1" >/dev/null || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return; fi
  echo "installing $1 for $2"
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${@:3}"; } >/dev/null 2>&1 ||
    echo "$1 cannot be installed here; $2 will be skipped"
}
if [ "$what" = nightly ]; then
  install_packages chromium 'the tests of the viewer in a browser' chromium fonts-dejavu-core
  install_packages bwrap "tests/unit/rewards/test_code.py with bubblewrap" bubblewrap
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_DEVICE_BACKEND_AUTOLOAD=0 TOKENIZERS_PARALLELISM=false
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# pytest ends a test that hangs; this ends a pytest that does. SIGINT first, so that it still prints what it has
run_tests() {
  local code=0
  timeout --foreground --signal=INT --kill-after=60 "$limit_s" "$PYTHON" -m pytest --durations=30 "$@" "${arguments[@]}" || code=$?
  # one half may have no test that the arguments select
  [[ $code == 5 && ${#arguments[@]} != 0 ]] || return "$code"
}
arguments=("$@")
if [[ $what == unit || $what == integration ]]; then
  "$PYTHON" -m mypy
  run_tests "${paths[@]}" "${options[@]}"
  exit
fi
# halves that take as long: whole runs have types, simulated devices and plans beside them
others=(--ignore=tests/unit/planning)
for folder in tests/*/; do
  [[ $folder == tests/@(integration|npu_sim|ascendc|cuda|helpers|__pycache__)/ ]] || others+=("$folder")
done
beside=$(mktemp)
set -m # a process group of its own, which can be ended
run_tests "${others[@]}" "${unit_options[@]-${options[@]}}" -p no:cacheprovider >"$beside" 2>&1 &
half=$!
set +m
trap 'kill -- -"$half" 2>/dev/null || true; rm -f "$beside"' EXIT
code=0
"$PYTHON" -m mypy || code=$?
run_tests tests/npu_sim tests/ascendc tests/cuda tests/unit/planning "${paths[@]}" "${options[@]}" || code=$?
wait "$half" || code=$?
cat "$beside"
if [[ $code != 0 ]]; then fail "tests/run.sh: failed; above are all other tests, and before them types and whole runs"; fi
