# Engines and trainers on NVIDIA GPUs, in one environment (docs/cuda.md). Not run on a GPU yet.
#
#   docker build -f docker/cuda.Dockerfile -t pa_npu:cuda .
#   docker run --rm --gpus all --ipc host -v /models:/models -v /data:/data pa_npu:cuda \
#       bash launch/run_grpo_7b.sh --device cuda model.path=/models/Qwen2.5-7B data.train=/data/train.jsonl data.test=/data/test.jsonl
ARG CUDA_IMAGE=nvidia/cuda:12.9.1-devel-ubuntu22.04
# hadolint ignore=DL3006
FROM ${CUDA_IMAGE}

# gcc: Triton compiles its launchers
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ python3.10 python3.10-dev python3.10-venv \
    && rm -rf /var/lib/apt/lists/*

# one user owns what a run writes; a number is what runAsNonRoot can check
RUN getent group 1000 >/dev/null || groupadd --gid 1000 pa_npu; \
    getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --no-create-home --home-dir /home/pa_npu pa_npu; \
    install -d -o 1000 -g 1000 /home/pa_npu /workspace /workspace/pa_npu
USER 1000:1000
ENV HOME=/home/pa_npu

WORKDIR /workspace/pa_npu
COPY --chown=1000:1000 . .
RUN python3.10 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --editable '.[cuda,ray]' \
    && .venv/bin/python -m compileall -q -j 0 pa_npu
ENV PATH=/workspace/pa_npu/.venv/bin:$PATH
CMD ["pa-npu", "doctor"]
