"""Speed of the block executor: drafts a second on one core, packing included.

    python -m benchmarks.block_executor [--large]

Random drafts of the tests' generator. *new*: places, micro-batches and schedule are hardly ever those of a draft before, so
that everything is made; *known*: the same drafts again, each after all others; *moves*: drafts that differ from a known one in
cuts or recomputation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from benchmarks.harness import arguments
from rlplace.cluster import Cluster
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.evaluate import DraftEvaluator
from tests.strategy.random_costs import random_costs, random_draft

SMALL = ("a100-80g:8", "h100:2x4,ib=400g", "a100-80g:4+t4:4")
LARGE = "h100:128x8,ib=8x400g"


def large_draft(rng: Generator, devices: int, blocks: int) -> Draft:
    """Returns up to 32 places of hosts that are whole, two stages on each or one."""
    places, tensor = int(rng.choice([1, 2, 4, 8, 16, 32])), int(rng.choice([1, 2, 4, 8]))
    width = devices // places
    shard = min(int(rng.choice([1, 2, 8, width // tensor])), width // tensor)
    level = 0 if shard == 1 else 1 if places > 1 else int(rng.integers(1, 4))
    chunks = int(rng.integers(1, 3)) if places > 1 else 1
    cuts = sorted(rng.choice(np.arange(1, blocks), places * chunks - 1, replace=False).tolist())
    schedule = None if places == 1 else "interleaved_1f1b" if chunks > 1 else str(rng.choice(["1f1b", "gpipe"]))
    return Draft(
        bounds=(0, *cuts, blocks),
        places=tuple(
            Mesh(
                tuple(range(width * i, width * (i + 1))), replicate=width // tensor // shard, shard=shard, tensor=tensor,
                sharding=level, sequence_parallel=tensor > 1,
            )
            for i in range(places)
        ),
        place_of_stage=tuple(range(places)) * chunks,
        recompute=bytes(rng.integers(0, 3, blocks).tolist()),
        offload=bytes(blocks),
        microbatch=(1,),
        microbatches=(places * int(rng.choice([2, 4, 8])),),
        schedule=schedule,
    )  # fmt: skip


def moved(rng: Generator, draft: Draft) -> Draft:
    """Returns another choice for one block, or another cut."""
    if draft.stages > 1 and rng.random() < 0.5:
        inner = rng.choice(np.arange(1, draft.bounds[-1]), draft.stages - 1, replace=False)
        return dataclasses.replace(draft, bounds=(0, *sorted(inner.tolist()), draft.bounds[-1]))
    recompute = bytearray(draft.recompute)
    recompute[int(rng.integers(len(recompute)))] = int(rng.integers(3))
    return dataclasses.replace(draft, recompute=bytes(recompute))


def rate(evaluator: DraftEvaluator, drafts: Sequence[Draft]) -> float:
    """Returns drafts a second of processor time."""
    start = time.process_time()
    for draft in drafts:
        evaluator.score(draft)
    return len(drafts) / (time.process_time() - start)


def main(large: bool) -> None:
    """Prints a row for every cluster."""
    print(f"{'cluster':22} {'blocks':>6} {'new':>7} {'known':>7} {'moves':>7}  a second")
    for name in (LARGE,) if large else SMALL:
        cluster, rng = Cluster.preset(name), np.random.default_rng(0)
        blocks, count = (100, 300) if large else (40, 3000)
        evaluator = DraftEvaluator(random_costs(rng, cluster, blocks, tied=True), cluster)
        drafts = [
            large_draft(rng, cluster.num_devices, blocks) if large else random_draft(rng, cluster, blocks) for _ in range(count)
        ]
        evaluator.score(Draft((0, blocks), (Mesh((0,)),), (0,), bytes(blocks), bytes(blocks), (1,), (1,)))  # compiles
        moves = [moved(rng, draft) for draft in drafts]
        new, known, moves_rate = rate(evaluator, drafts), rate(evaluator, drafts), rate(evaluator, moves)
        print(f"{name:22} {blocks:6} {new:7,.0f} {known:7,.0f} {moves_rate:7,.0f}", flush=True)


if __name__ == "__main__":
    main(arguments(__doc__, large="1,024 devices and 100 blocks instead of 8 and 40").large)
