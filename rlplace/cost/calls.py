"""The kernels of a graph's ops as flat rows, which curves price.

A matrix product is a row with its m, n and k. The backward of a product is two rows, dX = dY W^T (m, k, n) and dW = X^T dY
(k, n, m), or the one of them that autograd ran; that of a convolution is two rows of equal work. The work of such an op beside
its products (bias sums, casts, accumulation) is an element-wise row. Every other op is one row of equal kernels. Views and ops
that move nothing have no row.

`fused_traffic` has the savings of a compiler: point-wise ops, reductions and norms that follow each other run as one kernel. A
value that passes from such an op to another of the same phase stays in registers: the reader does not load it, and the producer
does not store it when no other op needs it. Ops whose outputs all stay in registers launch no kernel of their own, and
temporaries inside an op vanish. Matrix products, attention and convolutions are library calls and fuse with nothing. It is the
default behaviour of torch.compile's code generator, without its recomputation of cheap values in backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cost.curve import DIMS, DIRECTIONS
from rlplace.cost.scaled import CLASSES
from rlplace.model.capture.optimizers import OPTIMIZERS
from rlplace.model.graph.opgraph import BACKWARD, BACKWARD_WEIGHT, OP_KINDS, UPDATE, OpGraph

PRODUCT_CLASSES = ("gemm", "bmm")

CAUSAL_TILE = 128
"""Positions a side of a tile of scores in fused attention."""

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1}
_SIZES = tuple(name for name in DIMS if name not in ("flops", "bytes"))


@dataclass(frozen=True, eq=False)
class Calls:
    """Rows [C] of equal kernels; several rows may belong to one op.

    Attributes:
        op: int64 [C], the op.
        kind: int64 [C], op class, an index into `OP_KINDS`.
        dtype: int64 [C], index into `dtypes`.
        dtypes: Names of dtypes.
        direction: int64 [C], index into `rlplace.cost.curve.DIRECTIONS`.
        flops: float64 [C], FLOPs of the row.
        size_bytes: float64 [C], bytes that the row reads and writes.
        count: float64 [C], equal kernels that the row is split into, at least 1.
        launches: float64 [C], launch floors that the row pays; below 1 for a share of a fused kernel.
        sizes: float64 [C] by name of `DIMS`, dims of one kernel; 1 where unknown. `align`: the largest of 8, 4, 2 and 1 that
            divides the length of every matrix's rows in memory; 8 where the op is no product.
    """

    op: NDArray[np.int64]
    kind: NDArray[np.int64]
    dtype: NDArray[np.int64]
    dtypes: tuple[str, ...]
    direction: NDArray[np.int64]
    flops: NDArray[np.float64]
    size_bytes: NDArray[np.float64]
    count: NDArray[np.float64]
    launches: NDArray[np.float64]
    sizes: Mapping[str, NDArray[np.float64]]


def op_directions(graph: OpGraph) -> NDArray[np.int64]:
    """Returns int64 [N], index into `DIRECTIONS`."""
    backward = (graph.op_phase == BACKWARD) | (graph.op_phase == BACKWARD_WEIGHT)
    return np.where(graph.op_phase == UPDATE, 2, np.where(backward, 1, 0)).astype(np.int64)


def op_sizes(graph: OpGraph) -> dict[str, NDArray[np.float64]]:
    """Returns float64 [N] by name: dims of every op, those of its forward op where it has none, 0 where unknown."""
    sizes = {name: np.zeros(graph.num_ops) for name in _SIZES}
    for op, dims in graph.op_dims.items():
        for name, size in dims.items():
            if name in sizes:
                sizes[name][op] = size
    has_dims = np.zeros(graph.num_ops, dtype=bool)
    has_dims[list(graph.op_dims)] = True
    borrow = np.flatnonzero(~has_dims & (graph.op_forward >= 0))
    for values in sizes.values():
        values[borrow] = values[graph.op_forward[borrow]]
    return sizes


def op_launches(graph: OpGraph, host: str = "eager") -> NDArray[np.float64]:
    """Returns float64 [N], kernels of every op on an accelerator: 0 for views and fused ops, a share for updates."""
    classes = [CLASSES[name] for name in OP_KINDS]
    kind = op_codes(graph.op_kind)
    backward = op_directions(graph) == 1
    usual = np.where(
        backward, np.array([c.backward_kernels for c in classes])[kind], np.array([c.kernels for c in classes])[kind]
    )
    if graph.op_launches is not None:
        # A recorded op counts as one, also where an accelerator runs several kernels for it; products were counted one by one.
        product = np.isin(kind, [OP_KINDS.index(name) for name in PRODUCT_CLASSES])
        counted = graph.op_launches + np.where(product, 0.0, usual - 1.0)
        usual = np.where(usual < 1.0, usual, np.maximum(counted, 0.0))
    usual = np.where((graph.op_flops == 0) & (graph.op_bytes == 0), 0.0, usual)
    if host == "compiled":
        usual = np.minimum(usual, fused_traffic(graph)[1])
    return usual


def op_codes(op_kind: tuple[str, ...]) -> NDArray[np.int64]:
    """Returns int64 [N], read-only, index into `OP_KINDS`."""
    return _numbered(op_kind, OP_KINDS)


@lru_cache(maxsize=32)
def _numbered(values: tuple[str, ...], names: tuple[str, ...]) -> NDArray[np.int64]:
    """Returns int64 [N], read-only, the index of each value among the names: graphs of other batches and parts share both."""
    number = {name: index for index, name in enumerate(names)}
    found = np.fromiter((number[name] for name in values), dtype=np.int64, count=len(values))
    found.setflags(write=False)
    return found


@lru_cache(maxsize=32)
def _batch_norms(op_target: tuple[str, ...]) -> NDArray[np.bool_]:
    """Marks batch norms, bool [N], read-only."""
    found = np.array(["batch_norm" in target for target in op_target], dtype=bool)
    found.setflags(write=False)
    return found


def causal_share(keys: ArrayLike) -> NDArray[np.float64]:
    """Returns the share of the score matrix that fused causal attention computes; a graph counts the whole matrix.

    Tiles above the diagonal are skipped, those on it are computed whole (FlashAttention-2, section 3.1).

    Args:
        keys: Positions that are attended to [N], as many as queries.
    """
    return 0.5 + 0.5 * np.minimum(CAUSAL_TILE / np.maximum(np.asarray(keys, dtype=np.float64), 1.0), 1.0)


def calls_of(graph: OpGraph, host: str = "eager") -> Calls:
    """Lists the kernels of all ops, vectorised; independent of the device.

    Args:
        graph: N ops.
        host: "compiled" fuses like a compiler.
    """
    kind, direction, launches = op_codes(graph.op_kind), op_directions(graph), op_launches(graph, host)
    dtypes = tuple(sorted(set(graph.op_dtype)))
    dtype = _numbered(graph.op_dtype, dtypes)
    element = np.array([_ELEMENT_BYTES.get(name, 1) for name in dtypes], dtype=np.float64)[dtype]
    sizes = op_sizes(graph)
    flops, size = graph.op_flops.astype(np.float64), graph.op_bytes.astype(np.float64)
    if host == "compiled":
        size = fused_traffic(graph)[0]
    flops = np.where(sizes["causal"] > 0, flops * causal_share(sizes["keys"]), flops)
    size = np.where(direction == 1, _backward_traffic(graph, kind, sizes) * size, size)
    # A batch norm reads its input twice, once for its statistics.
    twice = _batch_norms(graph.op_target) & (direction == 0)
    size = np.where(twice, 1.5 * size, size)
    size = np.where(graph.op_phase == UPDATE, size * update_passes(graph), size)
    works = (graph.op_flops > 0) | (graph.op_bytes > 0)

    m, n, k, batch = (sizes[name] for name in ("m", "n", "k", "batch"))
    depth = np.maximum(batch, 1.0)
    one = 2.0 * depth * m * n * k
    product = works & np.isin(kind, [OP_KINDS.index(name) for name in PRODUCT_CLASSES]) & (one > 0)
    product &= flops >= 0.9 * one
    two = product & (direction == 1) & (flops >= 1.9 * one)
    own = np.zeros(graph.num_ops, dtype=bool)
    own[list(graph.op_dims)] = True
    forwardlike = product & ~two & ((direction == 0) | (own & (graph.op_phase != BACKWARD_WEIGHT)))
    by_input = two | (product & ~two & ~forwardlike & (graph.op_phase == BACKWARD))
    by_weight = two | (product & ~two & ~forwardlike & (graph.op_phase == BACKWARD_WEIGHT))

    rows: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]] = []
    for mask, order in ((forwardlike, (m, n, k)), (by_input, (m, k, n)), (by_weight, (k, n, m))):
        rows.append((np.flatnonzero(mask), *(values[mask] for values in order)))
    product_op = np.concatenate([row[0] for row in rows])
    pm, pn, pk = (np.concatenate([row[index] for row in rows]) for index in (1, 2, 3))
    product_bytes = element[product_op] * depth[product_op] * (pm * pk + pk * pn + pm * pn)

    # The rest of an op beside its products, and ops without products.
    used_flops, used_bytes, used_launches = (
        np.bincount(product_op, weights=weight, minlength=graph.num_ops)
        for weight in (one[product_op], product_bytes, np.ones(len(product_op)))
    )
    rest_launches = np.where(product, np.maximum(launches - used_launches, 0.0), launches)
    view = kind == OP_KINDS.index("view")
    rest = np.flatnonzero(works & ~view & ((rest_launches > 0) | ~product))
    # The backward of a convolution is the gradients of its input and of its weight; a single one is that of its weight.
    conv = (kind == OP_KINDS.index("conv")) & (direction == 1)
    once = flops < 1.5 * flops[np.maximum(graph.op_forward, 0)]
    both = conv & ~once & (graph.op_phase == BACKWARD) & (launches >= 2)
    parts = np.where(both[rest], 2, 1)
    rest, share = np.repeat(rest, parts), np.repeat(1.0 / parts, parts)
    first = np.concatenate([[True], rest[1:] != rest[:-1]]) if len(rest) else np.zeros(0, dtype=bool)
    of_weight = conv[rest] & (
        ~first | (once[rest] & (graph.op_phase[rest] == BACKWARD)) | (graph.op_phase[rest] == BACKWARD_WEIGHT)
    )
    weight_rows = np.concatenate([np.repeat([False, False, True], [len(row[0]) for row in rows]), of_weight])
    plain = ~product[rest]
    elementwise = OP_KINDS.index("elementwise")
    op = np.concatenate([product_op, rest])
    ones = np.ones(len(product_op))
    return Calls(
        op=op,
        kind=np.concatenate([kind[product_op], np.where(plain, kind[rest], elementwise)]),
        dtype=dtype[op],
        dtypes=dtypes,
        direction=np.where(weight_rows, DIRECTIONS.index("backward_weight"), direction[op]),
        flops=np.concatenate(
            [one[product_op], np.where(plain, share * flops[rest], np.maximum(flops - used_flops, 0.0)[rest])]
        ),
        size_bytes=np.concatenate(
            [product_bytes, np.where(plain, share * size[rest], np.maximum(size - used_bytes, 0.0)[rest])]
        ),
        count=np.concatenate([ones, np.maximum(share * rest_launches[rest], 1.0)]),
        launches=np.concatenate([ones, share * rest_launches[rest]]),
        sizes={
            name: np.concatenate(
                [
                    {"m": pm, "n": pn, "k": pk}.get(name, np.maximum(values[product_op], 1.0)),
                    np.where(plain, np.maximum(values[rest], 1.0), 1.0),
                ]
            )
            for name, values in sizes.items()
        }
        | {"align": _alignment(graph, k, n, product | (kind == OP_KINDS.index("conv")))[op]},
    )


def _alignment(
    graph: OpGraph, k: NDArray[np.float64], n: NDArray[np.float64], product: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Returns float64 [N], see `Calls.sizes`: x [m, k], w [n, k] and y [m, n] have rows of k and n, and so have their
    gradients.
    """
    forward = np.where(graph.op_forward >= 0, graph.op_forward, np.arange(graph.num_ops))
    forward = np.where(k[forward] > 0, forward, np.arange(graph.num_ops))
    common = np.gcd(np.gcd(k[forward].astype(np.int64), n[forward].astype(np.int64)), 8)
    return np.where(product & (common > 0), common, 8).astype(np.float64)


def update_passes(graph: OpGraph) -> float:
    """Returns the bytes that an update moves, in multiples of those counted: parameter, gradient and state once each."""
    known = OPTIMIZERS.get(str(graph.capture.get("optimizer")))
    return 1.0 if known is None else known.passes


def _backward_traffic(graph: OpGraph, kind: NDArray[np.int64], sizes: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Returns float64 [N], traffic of the backwards of norms and softmax in multiples of the count: two operands and a result.

    From PyTorch's layer_norm_kernel.cu and SoftMax.cu: both kernels of a norm read both operands. A softmax multiplies its
    operands first, three more passes at an element-wise kernel's rate; a log-softmax whose rows no warp holds reads one again.
    """
    norm, softmax = kind == OP_KINDS.index("norm"), kind == OP_KINDS.index("softmax")
    log = np.array(["log_softmax" in target for target in graph.op_target], dtype=bool)
    wide = np.where(sizes["columns"] > 1024, 4.0 / 3.0, 1.0)
    return np.where(norm, 5.0 / 3.0, np.where(softmax, np.where(log, wide, 1.5), 1.0))


POINTWISE = ("elementwise", "copy", "random")
READS_FUSED = (*POINTWISE, "reduction", "norm", "softmax")
"""Classes that can take a value from the kernel they run in; the point-wise ones, norms and softmax can also pass one on."""
WRITES_FUSED = (*POINTWISE, "norm", "softmax")


def fused_traffic(graph: OpGraph) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns bytes and launches of every op after a compiler has fused all that it can.

    Args:
        graph: N ops.

    Returns:
        float64 [N], bytes read and written; float64 [N], the largest number of kernels that the op launches: 0 where it runs
        inside others' kernels, 1 where it is one, infinity where nothing changes.
    """
    takes, hands = (np.array([kind in names for kind in graph.op_kind], dtype=bool) for names in (READS_FUSED, WRITES_FUSED))
    view = np.array([kind == "view" for kind in graph.op_kind], dtype=bool)
    tensor, consumer, producer = graph.edge_tensor, graph.consumers, graph.tensor_producer
    produced = producer >= 0
    maker = np.maximum(producer, 0)
    size = graph.tensor_bytes.astype(np.float64)
    same_phase = graph.op_phase[consumer] == graph.op_phase[maker[tensor]]
    fused_read = produced[tensor] & hands[maker[tensor]] & takes[consumer] & same_phase
    matters = ~view[consumer]
    count = graph.num_tensors
    readers = np.bincount(tensor[matters], minlength=count)
    fused_readers = np.bincount(tensor[fused_read & matters], minlength=count)
    kept_inside = produced & (readers > 0) & (readers == fused_readers) & (size > 0)

    loads = matters & ~fused_read
    read = np.bincount(consumer[loads], weights=size[tensor[loads]], minlength=graph.num_ops)
    stores = produced & ~kept_inside
    written = np.bincount(producer[stores], weights=size[stores], minlength=graph.num_ops)
    outputs = np.bincount(producer[produced & (size > 0)], minlength=graph.num_ops)
    inside = np.bincount(producer[kept_inside], minlength=graph.num_ops)
    before = graph.op_bytes.astype(np.float64)
    after = np.where(takes, np.minimum(before, read + written), before)
    launches = np.where(takes, np.where((outputs > 0) & (outputs == inside), 0.0, 1.0), np.inf)
    return after, launches
