"""The wire between trainers and engines: groups with deadlines, messages, and digests of weights.

    transport     one process group per pipeline stage: joining, broadcasts, waits, giving up;
                  collectives: differences of backends
    manifest      the weights that a stage sends: its buckets, and the HF tensors that they are cut
                  from
    receiver      the engine's end: joins the groups, receives the buckets, returns HF tensors
    digest        sums of every bucket, which show a changed or skipped weight

pa_npu.publish decides who sends when. This room runs inside engines, where only torch and the
engine are installed. It imports torch, msgspec (which vLLM needs too) and pa_npu.errors, and
nothing else.
"""
