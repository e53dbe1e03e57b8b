"""Training as a service: a model's forward, backward, step and samples as calls that a client's own loop makes.

    client (SDK of another project)        service process                     trainer ranks, engine
    -------------------------------        ---------------                     ---------------------
    forward_backward, optim_step, ...  ->  refused in a line, or written to
                                           the log, then acknowledged
                                           one turn after another, clients
                                           in turn                         ->  slot loaded, microbatches of
                                                                               this call alone
    retrieve_future                    <-  answer, also written            <-  undivided sums, log-probs
    save_weights_for_sampler           ->  a snapshot with version and
                                           digest
    asample                            ->  the engine loads that snapshot  ->  publish, digests compared

Compatible with the wire of tinker's SDK 0.38, without any affiliation; `wire` is all that knows it.
`losses` are the documented formulas, `datums` packs a call's data with shared prefixes, `slots`
holds each client's weights, moments and gradient and loads them into the backend in turn,
`ranks` deals a call to several trainer ranks, `trainer` is the process of one, `commands` what it is
told, `probe` compares the engine's log-probs with the trainers'. `log` is written before
anything is acknowledged, `registry` what follows from it, `acceptance` checks requests, `intake`
writes them down, `provenance` says whose samples may be trained, `turns` who is next, `sampler`
the engine, `server` the routes, `main` the process.
"""
