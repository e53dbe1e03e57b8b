"""Rollout engines, from the coordinator's side and inside their own processes.

    protocol        what an engine is to everyone else, and the data that crosses it
    registry        the kinds of engines by rollout.backend: vllm/, transformers/, or one of your
                    own
    pool            gives every group an engine, and another one where that is gone
    group_session   sends a group's requests, joins their parts, and tells an engine that is slow
                    from one that hangs
    membership      which engines belong to the run, and which of them serve
    client          asks an engine by HTTP, whatever its kind; codec: requests and checked responses
    http_server     what their servers must do; weight_calls: what their workers must

Empty of imports: the process of a vLLM engine imports this package where only torch and vllm are
installed.
"""
