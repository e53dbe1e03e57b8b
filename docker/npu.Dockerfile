# Ascend: two environments on the CANN base image, trainers (Python 3.10, torch 2.7.1) and engines (vllm-ascend 0.23), as docs/ascend.md
# says and with its versions. Not run on an NPU yet. The driver is the host's:
#
#   docker build -f docker/npu.Dockerfile -t pa_npu:npu .
#   docker run --rm --ipc host --device /dev/davinci0 --device /dev/davinci1 --device /dev/davinci_manager --device /dev/devmm_svm \
#       --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi \
#       -v /usr/local/dcmi:/usr/local/dcmi -v /etc/ascend_install.info:/etc/ascend_install.info pa_npu:npu
#
# The image of your device: <CANN>-<910b|a3>-<system>-<python> at quay.io/ascend/cann.
ARG CANN_IMAGE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11
# hadolint ignore=DL3006
FROM ${CANN_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# python3.10 is the system's; the image's own Python 3.11 is for the engines
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ gcc git python3.10 python3.10-dev python3.10-venv \
    && rm -rf /var/lib/apt/lists/*

ARG PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG ASCEND_INDEX=https://mirrors.huaweicloud.com/ascend/repos/pypi

# one user owns what a run writes; 1000 is also the group of Ascend's devices, and a number is what runAsNonRoot can check
RUN getent group 1000 >/dev/null || groupadd --gid 1000 pa_npu; \
    getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --no-create-home --home-dir /home/pa_npu pa_npu; \
    install -d -o 1000 -g 1000 /home/pa_npu /workspace /workspace/pa_npu
USER 1000:1000
ENV HOME=/home/pa_npu

WORKDIR /workspace
RUN python3.11 -m venv /workspace/engine \
    && engine/bin/pip install --no-cache-dir --extra-index-url "$PYTORCH_INDEX" vllm==0.23.0 \
    && engine/bin/pip install --no-cache-dir --extra-index-url "$PYTORCH_INDEX" --extra-index-url "$ASCEND_INDEX" \
        --extra-index-url "$ASCEND_INDEX/variant" vllm-ascend==0.23.0

RUN git clone --depth 1 --branch core_v0.12.1 https://github.com/NVIDIA/Megatron-LM.git \
    && git clone --depth 1 --branch 26.1.0_core_r0.12.1 https://gitcode.com/Ascend/MindSpeed.git

WORKDIR /workspace/pa_npu
COPY --chown=1000:1000 . .
RUN python3.10 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --extra-index-url "$PYTORCH_INDEX" --editable '.[npu,ray]' \
    && .venv/bin/pip install --no-cache-dir --editable /workspace/MindSpeed

# the operators of ops/ascendc; an image without a compiler for them still works, with torch in their place
RUN . /usr/local/Ascend/ascend-toolkit/set_env.sh \
    && { .venv/bin/python -m ops.ascendc.build || echo "operators not built; torch does their work"; }

ENV PATH=/workspace/pa_npu/.venv/bin:$PATH \
    PYTHONPATH=/workspace/Megatron-LM \
    PA_NPU_ENGINE_PYTHON=/workspace/engine/bin/python
CMD ["bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && pa-npu doctor"]
