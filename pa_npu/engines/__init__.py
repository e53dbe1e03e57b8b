"""Rollout engines: the protocol, the pool, who belongs to it, and one folder per kind of engine.

Empty of imports: the engine process imports `pa_npu.engines.vllm.worker` where only torch and vllm are installed.
"""
