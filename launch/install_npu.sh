#!/usr/bin/env bash
# Make .venv for Ascend NPUs: engines, trainers and coordinator in one environment, in the versions of docs/ascend.md.
# Checks first and says everything that is missing at once; then installs; may be run again, and goes on where it stopped.
#
#   bash launch/install_npu.sh [--check]          --check: only look whether it could; change nothing
#
# PA_NPU_VENV         where the environment goes (.venv)          PA_NPU_PYTHON   the Python that makes it (3.11 or 3.12)
# PA_NPU_ASCEND_ROOT  where Ascend's software is (/usr/local/Ascend)
# PA_NPU_MINDSPEED_COMMIT  another commit of MindSpeed's branch
# PA_NPU_BUILD_IMAGE  set where an image is built: neither driver nor device are there yet
# PIP_INDEX_URL and pip's other settings are used as they are; Ascend's own index is added to them.
set -euo pipefail
# shellcheck source=launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# The one place where these are said; docs/ascend.md and `doctor` are tested against them.
CANN=9.1
TORCH=2.10.0
TORCH_NPU=2.10.0.post4
VLLM=0.23.0
VLLM_ASCEND=0.23.0
TRITON_ASCEND=3.2.2
ARCTIC_INFERENCE=0.1.1
TRANSFORMERS=5.10.4
MEGATRON=core_v0.16.1
MINDSPEED=core_r0.16.0
# of that branch, of 10 July 2026
MINDSPEED_COMMIT=${PA_NPU_MINDSPEED_COMMIT:-e4772499f7eb9fa9a68919dd1eaddef00e915b2d}
MEGATRON_URL=https://github.com/NVIDIA/Megatron-LM.git
MINDSPEED_URL=https://gitcode.com/Ascend/MindSpeed.git
ASCEND_INDEX=${PA_NPU_ASCEND_INDEX:-https://mirrors.huaweicloud.com/ascend/repos/pypi}
TORCH_INDEX=${PA_NPU_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
NEEDED_GIB=25

check_only=''
case ${1:-} in
  '') ;;
  --check) check_only=1 ;;
  *) fail "$1: unknown option; see the head of launch/install_npu.sh" ;;
esac

# Everything that would stop the installation later, one line each.
problems() {
  local release found command
  [ "$(uname -s)" = Linux ] || echo "this is $(uname -s); NPUs work on Linux"
  case $(uname -m) in x86_64 | aarch64) ;; *) echo "there are no wheels of torch_npu for $(uname -m)" ;; esac
  [ -n "${PA_NPU_BUILD_IMAGE:-}" ] || [ -e "$ASCEND/driver/version.info" ] || command -v npu-smi >/dev/null ||
    echo "no driver: neither $ASCEND/driver/version.info nor npu-smi; install driver and firmware, or mount them into the container"
  if ! found=$(cann_script); then
    echo "no CANN: no set_env.sh in $ASCEND/cann or $ASCEND/ascend-toolkit; install the CANN $CANN toolkit and kernels"
  else
    release=$(cann_release "$found")
    case $release in
      '' | "$CANN" | "$CANN".*) ;;
      *) echo "CANN $release in $(dirname "$found"); torch_npu $TORCH_NPU is built for CANN $CANN" ;;
    esac
  fi
  nnal_script >/dev/null || echo "no NNAL: no nnal/atb/set_env.sh in $ASCEND; install Ascend-cann-nnal $CANN, vllm-ascend loads its libatb.so"
  for command in git g++ cmake; do
    command -v $command >/dev/null || echo "no $command; MindSpeed, arctic-inference and the operators are built with it"
  done
  wanted_python >/dev/null || echo "no Python 3.11 or 3.12 with venv; install one, or name it in PA_NPU_PYTHON"
  found=$(df -Pk "$(nearest_folder "$VENV")" | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$found" -ge "${PA_NPU_NEEDED_GIB:-$NEEDED_GIB}" ] || echo "$found GiB free for $VENV; the environment needs $NEEDED_GIB"
}

nearest_folder() {
  local folder=$1
  while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
  printf '%s' "$folder"
}

wanted_python() {
  local candidate
  for candidate in ${PA_NPU_PYTHON:-python3.11 python3.12 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# pip, in the environment. Not uv: these packages disagree about torch, and the order of the steps decides.
pip() { "$PYTHON" -m pip install --extra-index-url "$TORCH_INDEX" --extra-index-url "$ASCEND_INDEX" --extra-index-url "$ASCEND_INDEX/variant" "$@"; }

installed() { "$PYTHON" -c 'import importlib.metadata as m, sys; sys.exit(m.version(sys.argv[1]).partition("+")[0] != sys.argv[2])' "$1" "$2" 2>/dev/null; }

# checkout URL TAG FOLDER [COMMIT]: a tag, or a commit of a branch, whose history is fetched: servers need not give single commits
checkout() {
  local url=$1 tag=$2 folder=$3 commit=${4:-FETCH_HEAD} how=(--depth 1)
  [ "$commit" = FETCH_HEAD ] || how=(--no-tags)
  [ -d "$folder/.git" ] || git clone --quiet --single-branch "${how[@]}" --branch "$tag" "$url" "$folder"
  git -C "$folder" fetch --quiet "${how[@]}" origin "$tag" && git -C "$folder" checkout --quiet "$commit"
}

install_engine() {
  installed vllm $VLLM || pip "vllm==$VLLM"
  # sets torch back to $TORCH, of which pip remarks that vllm wanted another: expected, vllm-ascend is made for this pair
  installed arctic-inference $ARCTIC_INFERENCE || pip --no-binary arctic-inference "arctic-inference==$ARCTIC_INFERENCE"
  installed vllm-ascend $VLLM_ASCEND || pip "vllm-ascend==$VLLM_ASCEND"
  installed torch $TORCH || pip "torch==$TORCH"
  installed torch_npu $TORCH_NPU || pip "torch_npu==$TORCH_NPU"
  installed transformers $TRANSFORMERS || pip "transformers==$TRANSFORMERS"
}

# vllm brings triton, which shares a folder with triton-ascend: whichever comes last has overwritten parts of the other.
install_triton() {
  if "$PYTHON" -c 'import importlib.metadata as m; m.version("triton")' 2>/dev/null || ! installed triton-ascend $TRITON_ASCEND; then
    "$PYTHON" -m pip uninstall --yes triton triton-ascend
    pip --no-deps "triton-ascend==$TRITON_ASCEND"
  fi
}

install_trainers() {
  checkout "$MEGATRON_URL" "$MEGATRON" "$VENV/src/Megatron-LM"
  checkout "$MINDSPEED_URL" "$MINDSPEED" "$VENV/src/MindSpeed" "$MINDSPEED_COMMIT"
  pip --no-deps --editable "$VENV/src/MindSpeed" # its numpy<=1.26.0 does not go with vllm
  # with the torch that is there; megatron-core of the package index is hidden by the checkout, which has megatron.training too
  printf 'torch==%s\ntransformers==%s\n' "$TORCH" "$TRANSFORMERS" >"$VENV/constraints.txt"
  pip --constraint "$VENV/constraints.txt" --editable "$ROOT" scipy
}

build_operators() {
  (cd "$ROOT" && "$PYTHON" -m ops.ascendc.build)
}

# Everything that a shell needs: CANN's and NNAL's variables, the commands, and the checkout in front of the index's megatron-core.
write_environment() {
  cat >"$VENV/npu.sh" <<END
# Written by launch/install_npu.sh, sourced by the launch scripts; in a shell of your own: source $VENV/npu.sh
_pa_npu_options=\$-
set +u # CANN's scripts read unset variables
[ -n "\${ASCEND_HOME_PATH:-}" ] || source $(cann_script)
[ -n "\${ATB_HOME_PATH:-}" ] || source $(nnal_script)
case \$_pa_npu_options in *u*) set -u ;; esac
unset _pa_npu_options
export PATH=$VENV/bin:\$PATH
export PYTHONPATH=$VENV/src/Megatron-LM\${PYTHONPATH:+:\$PYTHONPATH}
END
}

found=$(problems)
if [ -n "$found" ]; then
  printf '%s\n' "$found" | sed 's/^/missing: /' >&2
  fail "$(printf '%s\n' "$found" | wc -l | tr -d ' ') thing(s) missing; nothing was changed"
fi
if [ -n "$check_only" ]; then
  echo "it can be installed: Python $(wanted_python), CANN $(cann_script), NNAL $(nnal_script)"
  exit 0
fi
source_cann
[ -x "$PYTHON" ] || "$(wanted_python)" -m venv "$VENV"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' ||
  fail "$VENV has $("$PYTHON" --version), vllm-ascend needs 3.11 or 3.12; name another place in PA_NPU_VENV"
quietly "engine: vllm $VLLM, vllm-ascend $VLLM_ASCEND, torch $TORCH" install_engine
quietly "triton-ascend $TRITON_ASCEND in triton's place" install_triton
quietly "trainers: Megatron-LM $MEGATRON, MindSpeed $MINDSPEED, pa_npu" install_trainers
quietly "triton-ascend again, where a later step brought triton" install_triton
write_environment
# shellcheck source=/dev/null
source "$VENV/npu.sh"
build_operators >"$VENV/operators.log" 2>&1 && echo "operators built" ||
  echo "operators not built, torch does their work; the reason is in $VENV/operators.log"
if [ -n "${PA_NPU_BUILD_IMAGE:-}" ]; then exit 0; fi # no device here; the image's own command is doctor
cd "$ROOT"
"$PYTHON" -m pa_npu.launcher doctor --device npu
