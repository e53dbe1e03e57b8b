"""Rollout engines, from the coordinator's side and inside their own processes.

    protocol        the interface of an engine, and the data that crosses it
    registry        the kinds of engines by rollout.backend: vllm/, transformers/, or one of your
                    own
    pool            gives every group an engine, and another one if that is gone
    group_session   sends a group's requests, joins the parts of moved responses, and distinguishes
                    a slow engine from one that hangs
    membership      which engines belong to the run, and which of them serve
    client          the HTTP client of an engine of any kind; codec: requests and checked responses
    http_server     duties of an engine's server; weight_calls: those of its workers

This file imports nothing: the process of a vLLM engine imports this package where only torch and
vllm are installed.
"""
