"""Weights from trainers to engines: one protocol between three parties, on one page.

    coordinator (coordinator_side)      trainer rank (trainer_side, publisher)      engine worker (weight_transfer.receiver)
    ------------------------------      --------------------------------------      ----------------------------------------
    once                          <---  MANIFEST: StageManifest, of each sender

    at every border, version v:
    nothing is in flight (I1)
    MEMBERS: PublishMembers       --->
    load version v                ----------------------------------------------->  gets its model ready, waits for `begun`
                                        trains and steps meanwhile
                                  <---  READY: TrainersReady, from rank 0
    join, where members changed   ----------------------------------------------->  joins one group per sender, and loads then
                                        senders put `begun`, then all broadcast
                                        header and buckets at the same time     ->  takes them in turn, hands HF tensors to the
                                                                                    engine's loader
                                  <---  SENT: SentWeights, digests of the buckets
                                  <---  TRAINED: TrainedContents of every rank that takes part
                                  <-----------------------------------------------  version, digests of the buckets, contents
                                                                                    of tensors and
                                                                                    of its memory;
                                                                                    prefixes are
                                                                                    forgotten
    equal, bucket by bucket, and        what is sent follows what is trained (I5)
    tensor by tensor (I5)
    sample a probe, where due (I5)
    VERDICT: PublishVerdict       --->  compares the probe's log-probs with its own

    publish.senders says who sends: every rank the shards that it holds, of one copy of the weights
    or of all, or one rank of each pipeline stage, which gathers them. No weights move between
    trainers unless one gathers. What a sender does not send, another one does: manifests of a stage
    together cover each tensor once, or engines refuse them (weight_transfer.manifest).

    A probe is due for the first and the last version; between them the first groups are the probe
    (pa_npu.trainer.agreement).

    Round trips that every border waits for: the broadcasts, one answer of each engine, SENT,
    TRAINED and VERDICT. MEMBERS and the request to load are under way while the trainers step. A
    publish that forms groups anew begins at READY, as forming them has a deadline.

    A rank that fails puts GAVE_UP and BROKEN; the coordinator declares the groups abandoned, finds
    out which ranks hang and which engines are left, says so in the verdict, and both begin the next
    attempt at MEMBERS, in groups of the next epoch.

    inside an iteration, for an engine that was started again: LATE_REQUEST ... LATE_BROKEN
    (late_engines draws it).

Where things are: messages and their keys in `messages`; which groups engines join in `engines`;
requests to one engine in `engine_loads`; whether it got what was sent in `weight_checks`; the swap
to a prepared version in `engine_swaps`; an engine inside an iteration in `late_delivery`; which
versions are probed in `probes`. When a version is published is
a policy of the coordinator and of the trainers (`publication` in both). The wire itself - groups,
buckets, digests, and the engine's end, which runs inside engines, and adapters that engines merge -
is the room below, pa_npu.weight_transfer.
"""
