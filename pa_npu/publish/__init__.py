"""Weights from trainers to engines: one protocol between three parties, on one page.

    coordinator (coordinator_side)      trainer rank (trainer_side, publisher)      engine worker (weight_transfer.receiver)
    ------------------------------      --------------------------------------      ----------------------------------------
    once                          <---  MANIFEST: StageManifest, of each stage

    at every border, version v:
                                  <---  READY: TrainersReady, from rank 0
    nothing is in flight (I1)
    MEMBERS: PublishMembers       --->
    join, where members changed   ----------------------------------------------->  joins one group per stage
    load version v                ----------------------------------------------->  receives, stage after stage
                                        stage leaders broadcast header, buckets ->  hands HF tensors to the engine's loader
                                  <---  SENT: SentWeights, digests of the buckets
                                  <-----------------------------------------------  version, digests of the buckets
    equal, bucket by bucket (I5)        what is sent follows what is trained (I5)
    forget prefixes, sample a probe
    VERDICT: PublishVerdict       --->  compares the probe's log-probs with its own (I5)

    A rank that fails puts BROKEN; the coordinator declares the groups abandoned, finds out which engines are left, says so
    in the verdict, and both begin the next attempt at MEMBERS, in groups of the next epoch.

    inside an iteration, for an engine that was started again: LATE_REQUEST ... LATE_BROKEN (late_engines draws it).

Where things are: messages and their keys in `messages`; what the coordinator makes of digests in `arrival`; when training stands
still for a late engine in `version_gate`; sizes and seconds in `sizing`. The wire itself - groups, buckets, digests, and the
engine's end, which runs inside engines - is the room below, pa_npu.weight_transfer.
"""
