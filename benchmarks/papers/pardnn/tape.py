"""Training steps written op by op, as TensorFlow 1 graphs have them: forward kernels, gradients, small nodes, updates.

A forward op says which of its inputs have gradients and what those gradient kernels read besides the incoming gradient;
`Tape.backward` writes them, adds up gradients that meet, and updates every weight. Ops sit in groups of their own; a weight is
a group that owns a tensor which its readers read, and holds the op that updates it. A gradient lives from its kernel to its
update.

Times are a roofline with a fixed cost a kernel; see `Chip`. Beside each kernel stand the small nodes (constants, shapes,
reshapes) that make such graphs large: `small` of them a kernel, in chains of up to three that start at an input of the kernel
or at nothing and end in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlplace.problem import BACKWARD, FORWARD, UPDATE, Device, Links, Problem

SHAPE_BYTES = 16
"""Output of a small node."""

_CHAIN = 3


@dataclass(frozen=True)
class Chip:
    """A device and its links, by default a V100 of a DGX-2 as the paper's model has it.

    Attributes:
        flops_per_s: What matrix products reach.
        bandwidth_bytes_per_s: What kernels that stream memory reach.
        launch_s: Added to the time of every kernel.
        small_s: Time of a small node.
        memory_bytes: Memory of one device.
        link_bytes_per_s, latency_s: Between any two devices.
    """

    flops_per_s: float = 1.2e13
    bandwidth_bytes_per_s: float = 7e11
    launch_s: float = 4e-6
    small_s: float = 3e-7
    memory_bytes: int = 32 << 30
    link_bytes_per_s: float = 4e10
    latency_s: float = 1.5e-5


Grads = Mapping[int, Sequence[int] | None]
"""Input number to the tensors that its gradient kernel reads besides the incoming gradients; None: it is that gradient."""


@dataclass
class _Node:
    outputs: list[int]
    inputs: Sequence[int]
    flops: float
    grads: Grads
    lookup: bool


@dataclass
class Tape:
    """A training step under construction; tensors are numbers.

    Attributes:
        chip: Prices kernels.
        small: Small nodes a kernel; a fraction is spread over kernels.
        state_factor: Resident bytes of a weight relative to the weight itself, 1 for plain SGD, 3 for Adam.
    """

    chip: Chip = field(default_factory=Chip)
    small: float = 0.0
    state_factor: float = 1.0
    _time: list[float] = field(default_factory=list)
    _group: list[int] = field(default_factory=list)
    _phase: list[int] = field(default_factory=list)
    _resident: list[int] = field(default_factory=list)
    _weight: list[int] = field(default_factory=list)
    _maker: list[int] = field(default_factory=list)
    _owner: list[int] = field(default_factory=list)
    _bytes: list[int] = field(default_factory=list)
    _readers: list[list[int]] = field(default_factory=list)
    _nodes: list[_Node] = field(default_factory=list)
    _owed: float = 0.0

    def weight(self, size_bytes: int) -> int:
        """A parameter; its tensor."""
        self._resident.append(round(self.state_factor * size_bytes))
        self._weight.append(size_bytes)
        return self._tensor(size_bytes, owner=len(self._resident) - 1)

    def source(self, size_bytes: int) -> int:
        """A batch of data."""
        return self._kernel([], [size_bytes], 0.0, FORWARD)[0]

    def op(
        self,
        inputs: Sequence[int],
        size_bytes: int | Sequence[int],
        grads: Grads,
        *,
        flops: float = 0.0,
        with_weight: bool = False,
    ) -> list[int]:
        """A forward kernel.

        Args:
            inputs: Tensors it reads.
            size_bytes: Sizes of its outputs.
            grads: Which inputs have gradients. Its own outputs, which are not made yet, are -1 (the first), -2 and so on.
            flops: Work of the kernel, and of each of its gradient kernels.
            with_weight: The kernel sits with its last input, a weight of which it reads a part and whose update takes
                gradients as they are (a lookup).
        """
        sizes = [size_bytes] if isinstance(size_bytes, int) else list(size_bytes)
        owner = self._owner[inputs[-1]] if with_weight else None
        outputs = self._kernel(inputs, sizes, flops, FORWARD, owner)
        named = {i: None if reads is None else [outputs[-t - 1] if t < 0 else t for t in reads] for i, reads in grads.items()}
        self._nodes.append(_Node(outputs, list(inputs), flops, named, with_weight))
        return outputs

    def matmul(self, x: int, weight: int, size_bytes: int, flops: float) -> int:
        """``x @ weight`` or a convolution, with gradients for both."""
        return self.op([x, weight], size_bytes, {0: [weight], 1: [x]}, flops=flops)[0]

    def unary(self, x: int, *, reads_output: bool = True) -> int:
        """An elementwise function whose gradient reads its output or its input."""
        return self.op([x], self._bytes[x], {0: [-1] if reads_output else [x]})[0]

    def multiply(self, a: int, b: int) -> int:
        """Elementwise product, as large as `a`."""
        return self.op([a, b], self._bytes[a], {0: [b], 1: [a]})[0]

    def add(self, a: int, b: int) -> int:
        """Elementwise sum, as large as `a`; the gradient of a smaller `b` is a reduction."""
        return self.op([a, b], self._bytes[a], {0: None, 1: None if self._bytes[a] == self._bytes[b] else []})[0]

    def concat(self, parts: Sequence[int]) -> int:
        """Joins tensors; each gets a slice of the gradient."""
        return self.op(parts, sum(self._bytes[p] for p in parts), {i: [] for i in range(len(parts))})[0]

    def split(self, x: int, parts: int) -> list[int]:
        """Cuts a tensor into equal ones; their gradients are joined."""
        return self.op([x], [self._bytes[x] // parts] * parts, {0: []})

    def reduce(self, x: int, size_bytes: int) -> int:
        """A sum or mean."""
        return self.op([x], size_bytes, {0: []})[0]

    def backward(self, loss: int) -> None:
        """Writes the gradients of all that `loss` depends on, and the updates of the weights."""
        found: dict[int, list[int]] = {loss: [self._kernel([loss], [self._bytes[loss]], 0.0, BACKWARD)[0]]}
        for node in reversed(self._nodes):
            incoming = [self._total(found[t]) for t in node.outputs if t in found]
            if not incoming:
                continue
            if node.lookup:
                moved = 3.0 * sum(self._bytes[t] for t in incoming)
                self._make(incoming, [], self._seconds(0.0, moved), UPDATE, self._owner[node.inputs[-1]])
            for index, reads in node.grads.items():
                wanted = node.inputs[index]
                if reads is None:
                    gradient = incoming[0]
                else:
                    reading = list(dict.fromkeys([*incoming, *reads]))
                    gradient = self._kernel(reading, [self._bytes[wanted]], node.flops, BACKWARD)[0]
                found.setdefault(wanted, []).append(gradient)
            for tensor in node.outputs:
                found.pop(tensor, None)
        for tensor, owner in enumerate(self._owner):
            if owner >= 0 and tensor in found:
                gradient = self._total(found[tensor])
                size = self._bytes[tensor]
                self._make([gradient], [], self._seconds(0.0, (1.0 + 2.0 * self.state_factor) * size), UPDATE, owner)

    def problem(self, name: str, num_devices: int, samples: int) -> Problem:
        """The step as a problem for equal devices, all linked to all."""
        chip, groups = self.chip, len(self._resident)
        weight = np.array(self._weight, dtype=np.int64)
        resident = np.array(self._resident, dtype=np.int64)
        off = 1.0 - np.eye(num_devices)
        kept = [t for t, readers in enumerate(self._readers) if readers]
        readers = [sorted(set(self._readers[t])) for t in kept]
        time_s = np.repeat(np.array(self._time)[:, None], num_devices, axis=1)
        return Problem(
            name=name,
            samples_per_microbatch=samples,
            devices=tuple(Device(f"gpu{i}", chip.memory_bytes) for i in range(num_devices)),
            links=Links(chip.link_bytes_per_s * off, chip.latency_s * off),
            group_names=tuple(f"group{i}" for i in range(groups)),
            resident_bytes=resident,
            weight_bytes=weight,
            gradient_bytes=np.zeros(groups, dtype=np.int64),
            optimizer_bytes=resident - weight,
            group_device=np.full(groups, -1, dtype=np.int32),
            op_names=tuple(f"op{i}" for i in range(len(self._time))),
            op_group=np.array(self._group, dtype=np.int32),
            op_phase=np.array(self._phase, dtype=np.int8),
            time_s=time_s,
            temporary_bytes=np.zeros(len(self._time), dtype=np.int64),
            tensor_producer=np.array([self._maker[t] for t in kept], dtype=np.int32),
            tensor_owner=np.array([self._owner[t] for t in kept], dtype=np.int32),
            tensor_bytes=np.array([self._bytes[t] for t in kept], dtype=np.int64),
            consumer_ptr=np.concatenate([[0], np.cumsum([len(r) for r in readers])]).astype(np.int64),
            consumers=np.array([op for r in readers for op in r], dtype=np.int32),
        )

    def size(self, tensor: int) -> int:
        """Bytes of a tensor."""
        return self._bytes[tensor]

    def _total(self, parts: list[int]) -> int:
        """The sum of gradients that meet, made once."""
        if len(parts) > 1:
            parts[:] = self._kernel(parts, [self._bytes[parts[0]]], 0.0, BACKWARD)
        return parts[0]

    def _kernel(
        self, inputs: Sequence[int], sizes: Sequence[int], flops: float, phase: int, owner: int | None = None
    ) -> list[int]:
        """A kernel and its small nodes."""
        small: list[int] = []
        self._owed += self.small
        while self._owed >= 1.0:
            length = min(_CHAIN, int(self._owed))
            self._owed -= length
            last = [inputs[0]] if inputs and owner is None and len(small) % 2 == 0 and self._owner[inputs[0]] < 0 else []
            for _ in range(length):
                last = self._make(last, [SHAPE_BYTES], self.chip.small_s, phase)
            small += last
        moved = float(sum(sizes)) if owner is not None else float(sum(sizes) + sum(self._bytes[t] for t in inputs))
        return self._make([*inputs, *small], sizes, self._seconds(flops, moved), phase, owner)

    def _seconds(self, flops: float, moved_bytes: float) -> float:
        return self.chip.launch_s + max(flops / self.chip.flops_per_s, moved_bytes / self.chip.bandwidth_bytes_per_s)

    def _make(
        self, inputs: Sequence[int], sizes: Sequence[int], time_s: float, phase: int, group: int | None = None
    ) -> list[int]:
        op = len(self._time)
        if group is None:
            self._resident.append(0)
            self._weight.append(0)
            group = len(self._resident) - 1
        self._time.append(time_s)
        self._group.append(group)
        self._phase.append(phase)
        for tensor in inputs:
            # A weight that only its own group reads needs no tensor.
            if self._owner[tensor] != group:
                self._readers[tensor].append(op)
        return [self._tensor(size, maker=op) for size in sizes]

    def _tensor(self, size_bytes: int, *, maker: int = -1, owner: int = -1) -> int:
        self._maker.append(maker)
        self._owner.append(owner)
        self._bytes.append(int(size_bytes))
        self._readers.append([])
        return len(self._bytes) - 1
