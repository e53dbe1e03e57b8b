# Ascend: what launch/install_npu.sh makes, on the CANN base image. Not run on an NPU yet. The driver is the host's:
#
#   docker build -f docker/npu.Dockerfile -t pa_npu:npu .
#   docker run --rm --ipc host --device /dev/davinci0 --device /dev/davinci1 --device /dev/davinci_manager --device /dev/devmm_svm \
#       --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi \
#       -v /usr/local/dcmi:/usr/local/dcmi -v /etc/ascend_install.info:/etc/ascend_install.info pa_npu:npu
#
# The image of your device: <CANN>-<910b|a3>-<system>-<python> at quay.io/ascend/cann.
ARG CANN_IMAGE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12
# hadolint ignore=DL3006
FROM ${CANN_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ gcc git \
    && rm -rf /var/lib/apt/lists/*

# one user owns what a run writes; 1000 is also the group of Ascend's devices, and a number is what runAsNonRoot can check
RUN getent group 1000 >/dev/null || groupadd --gid 1000 pa_npu; \
    getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --no-create-home --home-dir /home/pa_npu pa_npu; \
    install -d -o 1000 -g 1000 /home/pa_npu /workspace /workspace/pa_npu
USER 1000:1000
ENV HOME=/home/pa_npu

WORKDIR /workspace/pa_npu
COPY --chown=1000:1000 . .
# An image is built where there is no device and no driver: doctor's findings there are not an image's. The script's own checks stand.
RUN PA_NPU_BUILD_IMAGE=1 PIP_NO_CACHE_DIR=1 bash launch/install_npu.sh \
    && .venv/bin/python -m pip install --no-cache-dir "ray>=2.50,<3"

ENV PATH=/workspace/pa_npu/.venv/bin:$PATH
CMD ["bash", "-c", "source launch/env.sh && use_environment npu '' '' && pa-npu doctor --device npu"]
