"""The `OpGraph` record: one captured training step, op by op.

Axes: N ops, P parameters and buffers, T tensors, E tensor-to-consumer pairs.

Ops are listed in execution order: forward, backward, update. A forward op is one node of the captured forward graph; its
backward op (at most one) sums the work that autograd does on its behalf; every trainable parameter has one update op. A
tensor is one storage: views and in-place results share it, so nothing is counted or sent twice.

Attention ops that see earlier positions only, recognised by how their masks are computed.

Exported models carry a mask where the eager model passes `is_causal`, and a GPU's kernels skip the half that is masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rlplace.files import fingerprint, read_record, write_json
from rlplace.problem.check import freeze
from rlplace.records import Bytes, Record

if TYPE_CHECKING:
    from rlplace.model.graph.indices import Traced

Phase = Literal["forward", "backward", "backward_weight", "update"]
PHASES: tuple[str, ...] = get_args(Phase)
FORWARD, BACKWARD, BACKWARD_WEIGHT, UPDATE = range(4)

ACTIVATION, PARAMETER, BUFFER, INPUT, GRADIENT = range(5)
TensorRole = Literal["activation", "parameter", "buffer", "input", "gradient"]
TENSOR_ROLES: tuple[str, ...] = get_args(TensorRole)

OpKind = Literal[
    "gemm", "bmm", "attention", "conv", "recurrent", "scan", "elementwise", "reduction", "norm", "softmax", "embedding",
    "gather", "copy", "view", "random", "optimizer", "module", "other",
]  # fmt: skip
"""Op classes that the cost model tells apart. `view` ops cost nothing; `module` is a whole submodule kept as one op."""
OP_KINDS: tuple[str, ...] = get_args(OpKind)


class Parameter(Record, frozen=True):
    """A parameter or buffer of the model.

    Attributes:
        name: First qualified name in `named_parameters` or `named_buffers` order.
        aliases: Other names of the same storage (tied weights).
        shape: Sizes.
        dtype: For example ``"float32"``.
        size_bytes: Bytes of the weight itself.
        trainable: Whether it receives a gradient and an update.
        gradient_bytes: 0 unless trainable; 0 of a sparse gradient, which counts with the backward that makes it.
        optimizer_bytes: Optimizer state; 0 unless trainable.
        is_buffer: True for buffers.
    """

    written: ClassVar[tuple[str, ...]] = ("is_buffer",)

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: Bytes
    trainable: bool
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    is_buffer: bool = False

    @property
    def sparse(self) -> bool:
        """True where its gradient has the rows that were looked up alone."""
        return self.trainable and not self.gradient_bytes


@dataclass(frozen=True, eq=False)
class OpGraph:
    """One training step as ops, tensors and parameters.

    Attributes:
        name: For display; not part of the fingerprint.
        samples: Samples in the captured batch.
        op_names: N unique names: ``module.path/node`` for a forward op (the part behind the last slash is the node of the
            captured graph), the same with ``.backward`` for its backward op, ``parameter/update`` for an update.
        op_target: N op names as torch knows them, for example ``"aten.linear.default"``.
        op_kind: N entries of `OP_KINDS`.
        op_module: N paths of the innermost module that runs the op ("" for the root).
        op_phase: int8 [N], index into `PHASES`.
        op_forward: int32 [N], the forward op that the op belongs to: itself for a forward op, -1 for an update op.
        op_parameter: int32 [N], the parameter that an update op updates, -1 otherwise.
        op_dtype: N compute dtypes, for example ``"bfloat16"``.
        op_flops: float64 [N], a multiply-add counts two.
        op_bytes: int64 [N], bytes read plus bytes written in device memory; 0 for views.
        op_temporary_bytes: int64 [N], peak of storages that live only inside the op.
        op_colocate: int32 [N], ops with equal values must share a device (aliases of one storage, in-place chains, a backward
            op with its forward op). Tied parameters are not part of it: see `parameters`.
        parameters: P records.
        tensor_role: int8 [T], index into `TENSOR_ROLES`.
        tensor_parameter: int32 [T], for roles parameter, buffer and gradient the index into `parameters`, else -1.
        tensor_producer: int32 [T], the op that first writes the storage; -1 for parameters, buffers and inputs.
        tensor_bytes: int64 [T], bytes of the storage; 0 is a pure ordering edge (an in-place write before a later read).
        consumer_ptr: int64 [T + 1], offsets into `consumers`.
        consumers: int32 [E], distinct within a tensor, in execution order.
        capture: How it was captured: ``method`` ("export", "dispatch" or "module"), ``optimizer``, ``dtype``, versions, notes.
        source: MODEL and options that the graph came from, or None.
        op_dims: Optional sizes of named dimensions by op number, for pricing and for sharding planners; a backward op without
            any has those of its forward op.
        op_launches: Optional int32 [N], kernels that the op launches (0 for views); None where they were not counted.
        traced: How the captured calls access their tensors, for sharding planners; None where that was not recorded. It stays
            in this process: it is not saved in graph files and not part of the fingerprint.
    """

    name: str
    samples: int
    op_names: tuple[str, ...]
    op_target: tuple[str, ...]
    op_kind: tuple[str, ...]
    op_module: tuple[str, ...]
    op_phase: NDArray[np.int8]
    op_forward: NDArray[np.int32]
    op_parameter: NDArray[np.int32]
    op_dtype: tuple[str, ...]
    op_flops: NDArray[np.float64]
    op_bytes: NDArray[np.int64]
    op_temporary_bytes: NDArray[np.int64]
    op_colocate: NDArray[np.int32]
    parameters: tuple[Parameter, ...]
    tensor_role: NDArray[np.int8]
    tensor_parameter: NDArray[np.int32]
    tensor_producer: NDArray[np.int32]
    tensor_bytes: NDArray[np.int64]
    consumer_ptr: NDArray[np.int64]
    consumers: NDArray[np.int32]
    capture: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] | None = None
    op_dims: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    op_launches: NDArray[np.int32] | None = None
    traced: Traced | None = None

    def __post_init__(self) -> None:
        from rlplace.model.graph.io import check_graph

        freeze(self)
        check_graph(self)

    @property
    def num_ops(self) -> int:
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        return len(self.tensor_bytes)

    @property
    def edge_tensor(self) -> NDArray[np.int32]:
        """int32 [E], the tensor of each entry of `consumers`."""
        return np.repeat(np.arange(self.num_tensors, dtype=np.int32), np.diff(self.consumer_ptr))

    def forward_inputs(self) -> list[list[int]]:
        """Returns per op the forward ops whose tensors it reads."""
        inputs: list[list[int]] = [[] for _ in range(self.num_ops)]
        makers = self.tensor_producer[self.edge_tensor]
        forward = (makers >= 0) & (self.op_phase[np.maximum(makers, 0)] == FORWARD)
        for maker, op in zip(makers[forward].tolist(), self.consumers[forward].tolist(), strict=True):
            inputs[op].append(maker)
        return inputs

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON without `name` and `source`."""
        from rlplace.model.graph.io import graph_to_dict

        return fingerprint(graph_to_dict(self))

    def save(self, path: str | Path) -> None:
        """Writes ``*.graph.json``, atomically."""
        from rlplace.model.graph.io import graph_to_dict

        write_json(path, graph_to_dict(self))

    @staticmethod
    def load(path: str | Path) -> OpGraph:
        """Reads and checks a graph file.

        Raises:
            InputError: The file is missing, malformed, newer than this code, or describes an impossible graph.
        """
        from rlplace.model.graph.io import FORMAT, VERSION, graph_from_dict

        return read_record(path, FORMAT, VERSION, graph_from_dict)


_COMPARES = ("aten.le.", "aten.lt.", "aten.ge.", "aten.gt.")
"""Ops that make a triangle from two runs of positions."""

_TRIANGLES = ("aten.tril.", "aten.triu.")

_MASKS = ("copy", "elementwise", "gather", "view", "reduction")
"""Kinds of ops that make masks from positions; weights play no part in it."""


def with_causal_attention(graph: OpGraph) -> OpGraph:
    """Returns the graph with ``causal`` among the dimensions of attention ops whose mask compares positions with each other."""
    makers = graph.forward_inputs()
    # True: a triangle; False: made from positions alone, without one; None: anything else, such as activations.
    triangle: list[bool | None] = [None] * graph.num_ops
    weights = np.flatnonzero(graph.tensor_role == PARAMETER)
    read = set(graph.consumers[np.isin(graph.edge_tensor, weights)].tolist())
    marked: set[int] = set()
    for op, kind in enumerate(graph.op_kind):
        before = [triangle[maker] for maker in makers[op]]
        if kind == "attention" and graph.op_phase[op] == FORWARD and True in before:
            dims = graph.op_dims.get(op, {})
            if dims.get("queries", 0) == dims.get("keys", 1) and dims["queries"] > 1:
                marked.add(op)
        elif kind in _MASKS and op not in read and None not in before:
            target = graph.op_target[op]
            compares = target.startswith(_COMPARES) and len(set(makers[op])) == 2
            triangle[op] = True in before or compares or target.startswith(_TRIANGLES)
    if not marked:
        return graph
    marked_dims = {
        op: {**sizes, "causal": 1} if int(graph.op_forward[op]) in marked and graph.op_kind[op] == "attention" else sizes
        for op, sizes in graph.op_dims.items()
    }
    return dataclasses.replace(graph, op_dims=marked_dims)
