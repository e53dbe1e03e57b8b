"""The wire between trainers and engines: groups with deadlines, what a stage sends, receiving it, and digests that show changes.

    transport     one process group per pipeline stage: joining, broadcasts, waits, giving up;
                  collectives: how backends differ
    manifest      what a stage sends: its buckets, and the HF tensors that they are cut from
    receiver      the engine's end: joins the groups, receives the buckets, hands out HF tensors
    digest        sums of every bucket, in which a changed or skipped weight shows

Who sends what when is pa_npu.publish's. This room runs inside engines, where only torch and the
engine are installed: it imports torch, msgspec, which vLLM needs too, and pa_npu.errors, and
nothing else.
"""
