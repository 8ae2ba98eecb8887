"""Activation checkpointing: equal gradients, random ops and buffers as without, and the memory that the plan claims."""

import contextlib
import copy

import equal
import numpy as np
import pytest
import torch
from plans import plan_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import rlplace
from rlplace.plan.plan import make_plan
from rlplace.plan.recompute import recompute
from rlplace.plan.segments import layer_segments
from rlplace.problem import FORWARD
from rlplace.runtime.distributed.graph.assign import assign, planned_groups, planned_placements
from rlplace.runtime.distributed.graph.cut import cut_graph
from rlplace.runtime.distributed.graph.forward_graph import flat_inputs, forward_graph
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.graph.segment import Recomputed, convex_pieces, recompute_sets, segment_module


class _Storages(TorchDispatchMode):
    """Notes every storage that ops make."""

    def __init__(self):
        super().__init__()
        self.size = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.size[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def live_bytes(self):
        return sum(size for storage, size in self.size.items() if not storage.expired())


class Cutting:
    """A model on one device, cut by a plan."""

    def __init__(self, model, inputs, loss, plan):
        self.model, self.inputs, self.sets = model, inputs, plan.recompute
        self.graph = forward_graph(model, (), inputs, loss=loss)
        self.assignment = assign(self.graph, planned_placements(plan), None, planned_groups(plan))

    def step(self, sets, recorder=None):
        """Forward and backward on a copy; the copy, the loss, the live bytes in between and the number of pieces."""
        model = copy.deepcopy(self.model)
        cut = cut_graph(self.graph, self.assignment, "group", sets)
        again = recompute_sets(sets, self.assignment)
        held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **self.graph.constants}
        leaves, values, pieces = flat_inputs((), self.inputs), {}, 0
        with recorder or contextlib.nullcontext(), random_key(0, 3, 1):
            for segment in cut.segments:
                code = segment_module(cut, segment, torch.device("cpu"), again)
                pieces += sum(isinstance(module, Recomputed) for module in code.children())
                inputs = (
                    [held[n] for n in segment.held] + [leaves[i] for i in segment.inputs] + [values[n] for n in segment.reads]
                )
                values.update(zip(segment.makes, code(*inputs), strict=True))
        loss = values[self.graph.loss]
        del values, inputs
        between = 0 if recorder is None else recorder.live_bytes()
        loss.backward()  # outside of the random key, as after the step of another micro-batch
        return model, loss.item(), between, pieces


def both(cutting, sets, gradients=True):
    """The step without and with recomputation, checked to be equal."""
    plain, loss, kept, _ = cutting.step(None, _Storages())
    again, loss_again, kept_again, pieces = cutting.step(sets, _Storages())
    assert loss == loss_again
    if not gradients:  # of single precision
        return kept, kept_again, pieces
    for (name, expected), found in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None:
            assert torch.allclose(found.grad, expected.grad, rtol=1e-12, atol=1e-14), name
    for (name, expected), found in zip(plain.named_buffers(), again.buffers(), strict=True):
        assert torch.equal(found, expected), name  # written once
    return kept, kept_again, pieces


def split(name, sets, **options):
    model, inputs, loss = equal.build(name, **options)
    plan = plan_of(model, inputs, 1, loss=loss, groups=8, recompute=sets)
    return Cutting(model, inputs, loss, plan)


RUNS, SCATTERED = [[1, 2], [3, 4], [5, 6]], [[1, 5], [2, 6]]


# Of the awkward model's sets one holds nothing to run again: its buffers pull most ops into one group.
@pytest.mark.parametrize(("name", "least"), [("gpt2", 3), ("resnet", 3), ("awkward", 2)])
def test_equal_with_less_kept(name, least):
    kept, kept_again, pieces = both(split(name, RUNS), RUNS)
    assert pieces >= least and kept_again < kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sets"), [(n, RUNS) for n in ("t5", "mixtral", "vit")] + [(n, SCATTERED) for n in ("swin", "lstm")]
)
def test_more_models(name, sets):
    kept, kept_again, pieces = both(split(name, sets), sets)
    assert pieces >= 2 and kept_again < kept


def test_dropout_draws_the_same_masks_again():
    sets = [[1, 2, 3], [4, 5]]
    cutting = split("gpt2", sets, dropout=0.4)
    assert cutting.graph.random_ops > 0
    both(cutting, sets)


def kept_of(problem):
    """Bytes that forward ops make and backward ops read."""
    forward = problem.op_phase == FORWARD
    read = np.zeros(problem.num_tensors, dtype=bool)
    read[problem.edge_tensor[~forward[problem.consumers]]] = True
    made = problem.tensor_producer >= 0
    made[made] = forward[problem.tensor_producer[made]]
    return int(problem.tensor_bytes[made & read].sum())


def claimed_and_measured(name, slack=0):
    """Bytes of activations that recomputing every layer frees, by the lowered problem and by live storages."""
    model, inputs, loss = equal.build(name, double=False)
    problem = rlplace.price(rlplace.capture(model, inputs, loss=loss), rlplace.Cluster.preset("cpu:1"), level="op")
    sets = layer_segments(problem)
    plan = make_plan(problem, [0] * problem.num_groups, planner="test", recompute=sets)
    kept, kept_again, _ = both(Cutting(model, inputs, loss, plan), sets, gradients=False)
    return kept_of(problem) - kept_of(recompute(problem, sets)), kept - kept_again


@pytest.mark.parametrize(
    "name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow), pytest.param("swin", marks=pytest.mark.slow)]
)
def test_what_the_plan_claims_is_freed(name):
    claimed, measured = claimed_and_measured(name)
    assert measured == claimed > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("resnet", 0.97), ("inception", 0.97), ("mixtral", 0.99)])
def test_copies_of_running_statistics_are_kept(name, share):
    claimed, measured = claimed_and_measured(name)
    assert share * claimed <= measured <= claimed


def test_pieces_are_convex():
    """a1 -> x -> a2 leaves the set and comes back; b runs beside it."""
    graph = torch.fx.Graph()
    start = graph.placeholder("start")
    a1 = graph.call_function(torch.relu, (start,))
    x = graph.call_function(torch.relu, (a1,))
    b = graph.call_function(torch.relu, (start,))
    a2 = graph.call_function(torch.add, (x, a1))
    a3 = graph.call_function(torch.add, (a2, b))
    nodes = [a1, x, b, a2, a3]
    unit = {node: number for number, node in enumerate(nodes)}
    pieces = convex_pieces(nodes, unit, {a1: 0, a2: 0, a3: 0, b: 1})
    assert [(piece.label, set(piece.nodes)) for piece in pieces] == [(0, {a1}), (None, {x}), (1, {b}), (0, {a2, a3})]
    together = {**unit, a1: 0, x: 0, a2: 0}
    pieces = convex_pieces(nodes, together, {node: 0 for node in (a1, x, a2, a3)})
    assert [(piece.label, set(piece.nodes)) for piece in pieces] == [(None, {b}), (0, {a1, x, a2, a3})]
