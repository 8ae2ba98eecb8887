"""The block executor: step time and memory of a strategy, compiled. These are its rules.

`DraftEvaluator` in `evaluate` is the entry. `kernel` and `passkernels` are compiled and agree to 1e-12 with the plain Python
of `reference`. A *place* is a mesh of devices. A *lane* is a slice of every place that runs micro-batches
independently until gradients are exchanged; replicas inside it wait for each other. There are as many lanes as the greatest
common divisor of the places' data degrees; one at sharding levels 2 and 3. s is `COMPUTE_SLOWDOWN`, 1.189.

Time
    A block in a pass has a forward f, a backward with recomputation (full recomputation repeats collectives), and blocking
    collectives t, each the largest over device kinds and replicas of the lane. With communication c that the next block waits
    for and g that may continue, the block takes max(c, f + t + (s - 1) min(f, c + g)).

    Where the groups that share weights and the collectives inside blocks use one channel, each gets half of it: both take
    h = t min(1, (c + g) / (f + t)) longer, and the block max(c + h c / (c + g), f + t + h + (s - 1) min(f, c + g)). A hybrid's
    all-reduce over copies on that channel follows the block's gathers and reductions.

    Groups fill the mesh in row-major order: tensor groups are consecutive devices, weights are shared over shard x context,
    copies are replicate (level 0: replicate x context). An axis takes the time of its slowest group.

One stage: forwards and backwards in sequence, then the update
    Level 0: the last backward has DDP's buckets (1 MiB, then 25 MiB, in backward order; a block's gradients come evenly over
    its time). A bucket's all-reduce starts when it is full and the one before it is done; ops are slower by
    (s - 1) min(all buckets but the last, backward) / backward.
    Level 1: beside each block the first forward gathers the parameters of the block that runs next, and the last backward
    reduce-scatters the gradient of the block that ran before. Level 2: every backward does. Level 3: every forward gathers,
    and beside each block every backward first reduces, then gathers the parameters of the block that runs next. Compute waits
    for a reduction before the next one starts (torch, _fsdp_param_group.py). The first gather of a pass and the last reduction
    are exposed. A hybrid all-reduces its shares over replicate on a stream of its own, within the backward. Levels 0 and 1
    take the slowest lane's time.

Pipelines
    Places run the actions of `rlplace.plan.actions` in order; sends follow rule 2 of `rlplace.simulator.reference`, all
    devices of a place at once. A split backward leaves `weight_s` to its weight action; both halves recompute. The gathers of
    a place run one after the other from the start of the step on (`PipelineRun`); a block's first forward waits for its own,
    and forwards beside those that are left take as long as beside g (`ahead`). After its last backward a place waits for the
    exchange of gradients, block by block over all lanes (torch, perform_reduce_grad). Once all places of a tied weight are
    done they all-reduce its gradient. Unlike pipelines run independently; after the last one each block's gradient is summed
    among its places (`evaluate`), in sequence and exposed.

Update and offload
    The update takes `update_s` over the shares of the weights. Of W devices that share m matrices that it needs whole, each
    gathers one and cuts it again m / W times, both by an all-to-all of the bytes of a matrix. Offload `optimizer` moves
    gradients and weights over PCIe, shared by the devices of a switch, and reads and writes the state once at a device's share
    of host memory. `all` also streams parameters in before they are gathered and gradients out after they are reduced: in a
    single stage at levels 0 and 3 in every pass, in a pipeline once a step.

Memory of a device
    reserved            context and communication buffers
    weights             level 0 all; else the share, and at levels 1 and 2 all of them from the first gather to the end
    gradients           level 0 all; level 1 all while several micro-batches or a pipeline accumulate; else the share; none
                        where they are released, but those of the running block and the share that has just been reduced
    optimizer           all, or the share; none where offloaded
    divided tables      weights, gradients and state of the parts of the busiest device, at every level
    activations         `kept_bytes` of a stage's blocks for every micro-batch in flight, counted by running the actions
    running block       `working_bytes` beside what the blocks up to it have saved, with the gradients of inputs and outputs
    split backwards     the first half frees nothing while it runs; until the second half a micro-batch keeps the gradients
                        from which those of weights are computed and the activations before the last weight
    level 3             parameters of the running and the next block; before a block runs its own twice (`foreach_all_gather`)
    levels 1 to 3       the unsharded gradient of the running block as far as it exists, and the flat copy of the one that is
                        reduced (`foreach_reduce`, in the dtype of the exchange)
    pipelines           input and gradient buffers of every micro-batch of a stage (torch's `PipelineStage`), and gradients
                        of earlier micro-batches that are still being sent
    DDP's gradients are in its buckets (`gradient_as_bucket_view`). Host memory is reported, not limited.

Not modelled
    Contention between level 0's buckets and collectives inside blocks, and between collectives and stage transfers. Routing of
    experts: the busiest device has `CostTable.busiest` times the mean tokens, with mean activations. Ids of divided tables
    that samples share: each is looked up for itself. Replicas of unlike speed at levels 0 and 1 wait for each other only at
    the end. Gradient clipping, the optimizer's temporaries, the allocator's segments.
"""
