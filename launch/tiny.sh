# Sourced by the scripts of tiny recipes: makes the environment, and has what their models and runs are made with.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
setup_environment cpu
cd "$ROOT"

# make_tiny DIRECTORY WHAT OPTION ...: makes a model and its questions in .cache/DIRECTORY, unless they are there.
make_tiny() {
  local directory=.cache/$1 what=$2
  shift 2
  [ -d "$directory" ] || echo "making $what (once; some minutes)"
  "$PYTHON" tools/make_tiny_model.py --out "$directory" "$@"
}

# run_recipe NAME ARGUMENT ...: runs configs/NAME.yaml in place of this shell.
run_recipe() {
  local recipe=configs/$1.yaml
  shift
  exec "$PYTHON" -m pa_npu.launcher run --config "$recipe" "$@"
}
