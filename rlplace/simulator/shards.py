"""Sharded plans: from ops cut into parts to a plain problem in which every part is an op.

* An op with P parts becomes P ops, on the devices that `rlplace.simulator.shard_layout` says. Each takes
  ``fixed + (time - fixed) / P`` (`Sharding.fixed_s`; without it time / P) and 1 / P of the temporary memory. Its backward op is
  cut like it. An op without shards is one op on the device of its group.
* A dimension that does not run along an output leaves partial sums: the parts that hold the same piece of it are followed by an
  all-reduce (a collective), and the sum is what the readers read. Statistics of norms and softmaxes are summed likewise.
* What a reader needs and its device does not have travels as ordinary transfers, cut into cells, from a device that has it.
* A parameter, buffer or input lies on the devices of the first op of its group that reads it, in the pieces that this op's
  parts need; its update runs on each of them. Other readers fetch what they lack and send its gradient back.
* Gradients of a weight piece that several devices hold are all-reduced in the buckets of `rlplace.simulator.replicas`, a
  sequence of buckets for each set of devices; backward ops are slowed by the share that overlaps, as there.

An op of no time that makes nothing (a view) is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, UPDATE, Problem
from rlplace.problem.build import tensor_rows
from rlplace.problem.collectives import COMPUTE_SLOWDOWN
from rlplace.problem.sharding import Held, Names, gradient_sums
from rlplace.schedule import LIST
from rlplace.simulator.lowering import lower
from rlplace.simulator.replicas import bucket_slices
from rlplace.simulator.shard_build import Builder
from rlplace.simulator.shard_layout import Boxes, Piece, Split, ordered, pieces, volume


def lower_shards(problem: Problem, plan: PlacementPlan) -> tuple[Problem, NDArray[np.int32]]:
    """The plain problem of a checked plan with shards, and the device of every group of it.

    Raises:
        InputError: The plan asks for something else that has to be lowered, too.
    """
    for what, given in (
        ("replicas", plan.replicas is not None),
        ("recompute", bool(plan.recompute)),
        ("optimizer_sharding", plan.optimizer_sharding),
        ("priority", plan.priority is not None),
        ("order", plan.order is not None),
        (f"schedule {plan.schedule!r}", plan.schedule != LIST),
        ("stage_of_group", plan.stage_of_group is not None),
        ("several micro-batches", plan.microbatches > 1),
    ):
        if given:
            raise InputError(f"plan: shards and {what} exclude each other; leave one of them out")
    return _Lowering(problem, plan).run()


@dataclasses.dataclass
class _Share:
    """Gradients of one group that one set of devices sums.

    Attributes:
        group: Group of the problem.
        complete: Bottom level of the last op that adds to them.
        size_bytes: What each device holds.
        made: Device to the ops that make them.
        used: Device to the update ops.
        counted: Held items that are in `size_bytes`.
    """

    group: int
    complete: float = inf
    size_bytes: int = 0
    made: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    used: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    counted: set[int] = dataclasses.field(default_factory=set)


class _Lowering:
    def __init__(self, problem: Problem, plan: PlacementPlan) -> None:
        assert problem.sharding is not None
        self.problem, self.plan, self.sharding = problem, plan, problem.sharding
        self.build = Builder(problem)
        self.consumers = [row[3] for row in tensor_rows(problem)]
        self.home_device = plan.device_of_group[problem.op_group].tolist()
        self.held_of_update = {item.update: index for index, item in enumerate(self.sharding.held) if item.update >= 0}
        self.split = self._splits()
        self.home = [self._home_boxes(item) for item in self.sharding.held]
        self.parts: dict[int, dict[int, int]] = {}  # op -> device -> new op
        self.after: dict[int, dict[int, int]] = {}  # the same, after the statistics are summed
        self.shares: dict[tuple[tuple[int, ...], int], _Share] = {}
        self.known: dict[tuple[object, ...], list[Piece]] = {}
        self.along_outputs: dict[int, frozenset[str]] = {}
        self.makes: dict[int, list[int]] = {}
        for tensor, maker in enumerate(problem.tensor_producer.tolist()):
            self.makes.setdefault(maker, []).append(tensor)

    def run(self) -> tuple[Problem, NDArray[np.int32]]:
        self._make_ops()
        for tensor in range(self.problem.num_tensors):
            if self.problem.tensor_producer[tensor] >= 0:
                self._tensor(tensor)
            else:
                self._owned(tensor)
        for index, item in enumerate(self.sharding.held):
            self._fetch(index, item)
        self._residents()
        self._buckets()
        return self.build.finish()

    # Ops

    def _splits(self) -> list[Split]:
        """The split of every op but updates; ops that are not cut are split into one part."""
        problem, sharding = self.problem, self.sharding
        shards = self.plan.shards or {}
        splits: list[Split] = [Split((), self.home_device[op]) for op in range(problem.num_ops)]
        read: dict[int, list[int]] = {}
        for tensor, access in sharding.access.items():
            maker = int(problem.tensor_producer[tensor])
            if maker >= 0 and maker in access:
                for op in access:
                    if op != maker:
                        read.setdefault(op, []).append(tensor)
        for op in problem.topological_order.tolist():
            parts = shards.get(problem.op_names[op])
            if not parts:
                continue
            inputs = []
            for tensor in read.get(op, ()):
                axes, access = sharding.axes[tensor], sharding.access[tensor]
                maker = int(problem.tensor_producer[tensor])
                inputs.append((access[op], axes, splits[maker].boxes(access[maker], axes), float(problem.tensor_bytes[tensor])))
            splits[op] = ordered(list(sharding.dims[op]), parts, self.home_device[op], inputs)
        for op, forward in sharding.follows.items():
            splits[op] = splits[forward] if splits[forward].count > 1 else splits[op]
        return splits

    def _make_ops(self) -> None:
        problem, build = self.problem, self.build
        makes = np.zeros(problem.num_ops, dtype=bool)
        read = np.diff(problem.consumer_ptr) > 0
        makes[problem.tensor_producer[(problem.tensor_producer >= 0) & read]] = True
        free = ~makes & (np.nanmax(problem.time_s, axis=1) == 0.0) & (problem.temporary_bytes == 0)
        for op in np.flatnonzero(~free).tolist():
            if op in self.held_of_update:
                boxes = self.home[self.held_of_update[op]]
                whole = prod(self.sharding.held[self.held_of_update[op]].axes)
                self.parts[op] = {
                    device: build.part(op, device, volume(box) / whole, len(boxes) > 1) for device, box in boxes.items()
                }
            else:
                split = self.split[op]
                self.parts[op] = {device: build.part(op, device, 1 / split.count, split.count > 1) for device in split.devices}
            self.after[op] = self._sum_statistics(op)

    def _sum_statistics(self, op: int) -> dict[int, int]:
        split, current = self.split[op], self.parts[op]
        for names, size_bytes in self.sharding.statistics.get(self.sharding.follows.get(op, op), ()):
            sizes = self.sharding.dims.get(self.sharding.follows.get(op, op), {})
            groups = split.sums(names, [sizes[name] for name in names])
            share = prod(parts for name, parts in split.parts if name in names)
            current = self._all_reduce(op, "statistics", groups, current, size_bytes / share)
        return current

    def _all_reduce(
        self, op: int, what: str, groups: Sequence[tuple[int, ...]], made: Mapping[int, int], size_bytes: float
    ) -> dict[int, int]:
        """Sums what each group of devices has; the ops after which each device has its sum."""
        found = dict(made)
        for group in groups:
            if len(group) > 1:
                phase = int(self.problem.op_phase[op])
                inputs = {device: {made[device]} for device in group}
                name = f"{self.problem.op_names[op]}.{what}"
                found |= self.build.all_reduce(name, int(self.problem.op_group[op]), phase, inputs, size_bytes)[0]
        return found

    # Tensors

    def _tensor(self, tensor: int) -> None:
        problem = self.problem
        maker, size_bytes = int(problem.tensor_producer[tensor]), int(problem.tensor_bytes[tensor])
        if maker not in self.parts:
            return
        readers = [op for op in self.consumers[tensor] if op in self.parts]
        updates = [op for op in readers if op in self.held_of_update and problem.op_phase[maker] != UPDATE]
        for op in updates:
            self._gradient(maker, op)
        readers = [op for op in readers if op not in updates]
        if not readers and updates:
            return
        if size_bytes == 0:
            for op in readers:
                self._wait(maker, op)
            return
        axes, present, needed = self._layout(tensor, maker, readers)
        names = self.sharding.access.get(tensor, {}).get(maker)
        made = self.after[maker]
        whole = prod(axes)
        groups = [] if names is None else self.split[maker].sums(names, axes, self._among(maker))
        if groups:
            for device, box in present.items():
                self.build.more_temporary(self.parts[maker][device], size_bytes * volume(box) // whole)
            made = self._all_reduce(
                maker, f"sum{tensor}", groups, made, size_bytes * volume(next(iter(present.values()))) / whole
            )
        for piece in self._pieces(axes, present, needed, size_bytes):
            consumers = {self.parts[readers[reader]][device] for reader, device in piece.readers}
            self.build.tensor(made[piece.holder], size_bytes * piece.volume // whole, consumers)

    def _layout(self, tensor: int, maker: int, readers: Sequence[int]) -> tuple[tuple[int, ...], Boxes, list[Boxes]]:
        """Axes, boxes of the producer, boxes of each reader; a tensor of unknown layout is cut as its producer is."""
        sharding, split = self.sharding, self.split[maker]
        access = sharding.access.get(tensor, {})
        if split.count == 1 or maker in access:
            axes = sharding.axes.get(tensor, ())
            blank: Names = ("",) * len(axes)
            present = split.boxes(access.get(maker, blank), axes)
            return axes, present, [self._boxes(op, access.get(op, blank), axes) for op in readers]
        axes = (split.count,)
        present = {device: ((index, index + 1),) for index, device in enumerate(split.devices)}
        origin = sharding.follows.get(maker, maker)
        alike = [sharding.follows.get(op, op) == origin for op in readers]
        return axes, present, [present if own else self._boxes(op, ("",), axes) for op, own in zip(readers, alike, strict=True)]

    def _boxes(self, op: int, names: Names, axes: Sequence[int]) -> Boxes:
        if op in self.held_of_update:
            return {device: tuple((0, size) for size in axes) for device in self.parts[op]}
        return self.split[op].boxes(names, axes)

    def _pieces(self, axes: Sequence[int], present: Boxes, needed: Sequence[Boxes], size_bytes: int) -> list[Piece]:
        key = (tuple(axes), tuple(present.items()), tuple(tuple(boxes.items()) for boxes in needed), size_bytes)
        if key not in self.known:
            links = self.problem.links

            def seconds(source: int, target: int) -> float:
                return links.transfer_s(source, target, size_bytes)

            self.known[key] = pieces(axes, present, needed, seconds)
        return self.known[key]

    def _among(self, op: int) -> frozenset[str] | None:
        """What a backward op sums over; None for forward ops: everything that is not in the output."""
        forward = self.sharding.follows.get(op)
        if forward is None:
            return None
        if forward not in self.along_outputs:
            self.along_outputs[forward] = gradient_sums(self.sharding, forward, self.makes)
        return self.along_outputs[forward]

    def _wait(self, maker: int, reader: int) -> None:
        """An ordering edge: from the part on the same device, else from the first part."""
        made = self.after[maker]
        first = next(iter(made.values()))
        for device, op in self.parts[reader].items():
            self.build.tensor(made.get(device, first), 0, {op})

    # What groups hold

    def _home_boxes(self, item: Held) -> Boxes:
        """Which piece of a held item lies where: what the first op of its group that reads it needs, else the first op."""
        readers = sorted(item.access, key=lambda op: (self.problem.op_group[op] != item.group, op))
        if not readers:
            return {int(self.plan.device_of_group[item.group]): tuple((0, size) for size in item.axes)}
        return self.split[readers[0]].boxes(item.access[readers[0]], item.axes)

    def _residents(self) -> None:
        """Shares the resident bytes of groups out to the devices of their parts."""
        problem, build = self.problem, self.build
        rest = np.stack([problem.resident_bytes, problem.weight_bytes, problem.gradient_bytes, problem.optimizer_bytes])
        known = problem.weight_bytes >= 0
        for item, boxes in zip(self.sharding.held, self.home, strict=True):
            parts = np.array([item.weight_bytes, item.gradient_bytes, item.optimizer_bytes], dtype=np.int64)
            rest[:, item.group] -= np.array([parts.sum(), *parts])
            for device, box in boxes.items():
                build.hold(item.group, device, -(-parts * volume(box) // prod(item.axes)))
        for group in range(problem.num_groups):
            parts = rest[1:, group] if known[group] else np.array([rest[0, group], 0, 0])
            build.hold(group, int(self.plan.device_of_group[group]), np.maximum(parts, 0))

    def _owned(self, tensor: int) -> None:
        """A tensor of a group that no held item stands for goes whole to all its readers."""
        owner, size_bytes = int(self.problem.tensor_owner[tensor]), int(self.problem.tensor_bytes[tensor])
        readers = [op for op in self.consumers[tensor] if op in self.parts]
        forward = {self.sharding.follows.get(op, op) for op in readers if op not in self.held_of_update}
        for item in self.sharding.held:
            if item.group == owner and item.weight_bytes == size_bytes and forward <= set(item.access):
                return
        source = self.build.group(owner, int(self.plan.device_of_group[owner]))
        self.build.tensor(-1, size_bytes, {part for op in readers for part in self.parts[op].values()}, owner=source)

    def _fetch(self, index: int, item: Held) -> None:
        """Sends pieces of a held item to readers on whose devices they do not lie."""
        home = self.home[index]
        readers: list[int] = []
        needed: list[Boxes] = []
        for op, names in item.access.items():
            boxes = self.split[op].boxes(names, item.axes)
            if any(home.get(device) != box for device, box in boxes.items()):
                for part in (op, *(back for back, forward in self.sharding.follows.items() if forward == op)):
                    if part in self.parts:
                        readers.append(part)
                        needed.append(boxes)
        whole = prod(item.axes)
        for piece in self._pieces(item.axes, home, needed, item.weight_bytes) if readers else ():
            away = {self.parts[readers[reader]][device] for reader, device in piece.readers if device != piece.holder}
            if away:
                source = self.build.group(item.group, piece.holder)
                self.build.tensor(-1, item.weight_bytes * piece.volume // whole, away, owner=source)

    def _gradient(self, maker: int, update: int) -> None:
        """From the parts of a backward op to the updates of the pieces that they make gradients of."""
        index = self.held_of_update[update]
        item, home = self.sharding.held[index], self.home[index]
        made, whole = self.after[maker], prod(item.axes)
        names = item.access.get(self.sharding.follows.get(maker, maker), ("",) * len(item.axes))
        boxes = self.split[maker].boxes(names, item.axes)
        groups = self.split[maker].sums(names, item.axes, self._among(maker))
        if boxes == home:
            for group in groups or [(device,) for device in boxes]:
                self._share(group, item, index, maker, update, item.gradient_bytes * volume(boxes[group[0]]) // whole)
            return
        made = self._all_reduce(
            maker, f"gradient.{index}", groups, made, item.gradient_bytes * volume(next(iter(boxes.values()))) / whole
        )
        for piece in self._pieces(item.axes, boxes, [home], item.gradient_bytes):
            for away in (False, True):
                readers = {self.parts[update][device] for _, device in piece.readers if (device != piece.holder) == away}
                if readers:
                    self.build.tensor(made[piece.holder], item.gradient_bytes * piece.volume // whole if away else 0, readers)

    def _share(self, group: tuple[int, ...], item: Held, index: int, maker: int, update: int, size_bytes: int) -> None:
        if len(group) == 1:
            self.build.tensor(self.after[maker][group[0]], 0, {self.parts[update][group[0]]})
            return
        share = self.shares.setdefault((group, item.group), _Share(item.group))
        share.complete = min(share.complete, float(lower(self.problem).priority[maker]))
        for device in group:
            share.made.setdefault(device, set()).add(self.after[maker][device])
            share.used.setdefault(device, set()).add(self.parts[update][device])
        if index not in share.counted:
            share.counted.add(index)
            share.size_bytes += size_bytes

    def _buckets(self) -> None:
        """All-reduces of weight gradients, and what they slow down."""
        seconds: dict[int, list[float]] = {}
        for group in dict.fromkeys(devices for devices, _ in self.shares):
            own = sorted((s for (g, _), s in self.shares.items() if g == group), key=lambda s: (-s.complete, s.group))
            for part in bucket_slices([share.size_bytes for share in own]):
                filled = own[part]
                inputs = {device: set().union(*(s.made[device] for s in filled)) for device in group}
                name = f"all_reduce.{'-'.join(map(str, group))}.{len(seconds.get(group[0], ()))}"
                size = sum(s.size_bytes for s in filled)
                done, took = self.build.all_reduce(name, filled[0].group, UPDATE, inputs, size)
                for device in group:
                    seconds.setdefault(device, []).append(took)
                    self.build.tensor(done[device], 0, set().union(*(s.used[device] for s in filled)))
        for device, taken in seconds.items():
            self.build.slow(device, (BACKWARD, BACKWARD_WEIGHT), sum(taken[:-1]), COMPUTE_SLOWDOWN)
