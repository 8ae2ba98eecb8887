"""Plans in bfloat16 for devices without units for it: said in the answer, with what float16 would take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from rlplace.cluster import Cluster
from rlplace.model.graph.opgraph import OpGraph
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import Evaluator
from rlplace.strategy.search.op_level import OpLevel
from rlplace.strategy.search.tries import Question
from rlplace.text import ms

BF16, FP16 = "bfloat16", "float16"


def without_bf16(graph: OpGraph, cluster: Cluster, devices: Iterable[int]) -> list[str]:
    """Kinds of these devices that have units for float16 and none for bfloat16, where ops of the graph compute in that."""
    if BF16 not in graph.op_dtype:
        return []
    used = {cluster.devices[device].kind for device in devices}
    found = (kind.name for kind in cluster.kinds if FP16 in kind.peak_flops and BF16 not in kind.peak_flops)
    return [name for name in dict.fromkeys(found) if name in used]


def bf16_note(graph: OpGraph, kinds: Iterable[str], step_s: float | None = None, fp16_s: float | None = None) -> str:
    """What such a plan means.

    Args:
        graph: The model.
        kinds: Of `without_bf16`.
        step_s: What a step takes; None where it is not compared.
        fp16_s: What the same plan takes in float16.
    """
    names = ", ".join(kinds)
    option = "--autocast fp16" if graph.capture.get("autocast") == BF16 else "--dtype fp16"
    said = f"{names}: no bfloat16 units, so products in bf16 run at the float32 rate; "
    if step_s is None or fp16_s is None:
        return f"{said}{option} plans in the type that it has units for"
    return f"{said}in fp16 the same strategy takes {ms(fp16_s)} ms, {step_s / fp16_s:.2f} times as fast; {option} plans for it"


def in_fp16(graph: OpGraph) -> OpGraph:
    """The same step with float16 in place of bfloat16, which is as large."""
    return dataclasses.replace(graph, op_dtype=tuple(FP16 if name == BF16 else name for name in graph.op_dtype))


def fp16_step_s(question: Question, draft: Draft, graphs: tuple[OpGraph, OpGraph | None], **pricing: object) -> float:
    """Seconds of a draft's step in float16, by the same executor as that of the answer.

    Args:
        question: What was asked.
        draft: The answer.
        graphs: The captures of the model, as `PricedBlocks` takes them.
        **pricing: Further arguments of `PricedBlocks`.
    """
    first, other = graphs
    blocks = PricedBlocks(
        in_fp16(first),
        question.cluster,
        None if other is None else in_fp16(other),
        **pricing,  # type: ignore[arg-type]
    )
    asked = dataclasses.replace(question, scores=Evaluator(blocks, question.cluster))
    return OpLevel(asked).evaluate(draft).step_time_s
