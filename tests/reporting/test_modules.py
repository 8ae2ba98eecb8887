"""The tree of modules and the edges between groups."""

import dataclasses

import numpy as np
import pytest

from rlplace.plan.plan import make_plan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.reporting.modules import MAX_CHILDREN, OWN, group_edges, module_tree


def chain(names, modules=None):
    count = len(names)
    problem = build_problem(
        "model",
        time_s=[[1.0, 1.0]] * count,
        tensors=[TensorSpec(i, 10 + i, [i + 1]) for i in range(count - 1)],
        memory_bytes=[None, None],
    )
    problem = dataclasses.replace(problem, group_names=tuple(names))
    plan = make_plan(problem, [0] * count, planner="hand")
    if modules is not None:
        groups = [{"name": n, "modules": list(m), "ops": [f"{n}/mm", f"{n}/add"]} for n, m in zip(names, modules, strict=True)]
        plan = dataclasses.replace(plan, groups=groups)
    return problem, plan


def paths(tree):
    """The labels from the root to every group."""
    found = []
    for node in tree.node_of_group:
        labels = []
        while node > 0:
            labels.append(tree.label[node])
            node = tree.parent[node]
        found.append("/".join(reversed(labels)))
    return found


def test_tree_by_names():
    names = ["emb.tok", "net.h.0.attn", "net.h.0.mlp", "net.h.1.attn", "net.h.1.mlp", "net.h.1.mlp#2", "head"]
    problem, plan = chain(names)
    tree = module_tree(problem, plan)
    assert paths(tree) == [
        "emb.tok", "net.h/h.0/attn", "net.h/h.0/mlp", "net.h/h.1/attn", "net.h/h.1/mlp/mlp", "net.h/h.1/mlp/mlp#2", "head",
    ]  # fmt: skip
    assert all(parent < node for node, parent in enumerate(tree.parent)) and tree.parent[0] == -1
    assert tree.block_names == ("emb.tok", "net.h.0.attn", "net.h.0.mlp", "net.h.1.attn", "net.h.1.mlp", "several modules")
    assert tree.block[4] == tree.block[5]


def test_modules_of_the_plan_come_first():
    problem, plan = chain(["a", "b", "c"], [["m.x"], ["m.y"], ["m.x", "m.y"]])
    tree = module_tree(problem, plan)
    assert paths(tree) == ["m/x", "m/y", "m/mm + 1"]


def test_many_own_groups_of_a_module_are_kept_together():
    problem, plan = chain([f"net.act#{i}" for i in range(5)] + ["net.act.inner"])
    tree = module_tree(problem, plan)
    assert [tree.label[node] for node in tree.own] == [OWN]
    assert paths(tree)[0] == f"net.act/{OWN}/act#0" and paths(tree)[5] == "net.act/inner"


@pytest.mark.parametrize("groups", [1, MAX_CHILDREN, MAX_CHILDREN + 1, 5000])
def test_no_level_is_too_wide(groups):
    problem = random_problem(0, num_groups=groups, num_devices=2, shape="chain")
    tree = module_tree(problem, make_plan(problem, [0] * groups, planner="hand"))
    children = np.bincount(np.array(tree.parent[1:]), minlength=1)
    assert children.max() <= MAX_CHILDREN
    assert len(set(tree.node_of_group)) == groups
    assert set(range(len(tree.block_names))) == set(tree.block)


def test_edges_add_up_both_directions():
    problem = build_problem(
        "edges",
        time_s=[[1.0]] * 5,
        group=[0, 1, 1, 0, 0],
        phase=[0, 0, 1, 1, 3],
        tensors=[TensorSpec(0, 7, [1, 2]), TensorSpec(2, 5, [3]), TensorSpec(3, 2, [4]), TensorSpec(None, 11, [1], owner=0)],
        memory_bytes=[None],
    )
    edges = group_edges(problem)
    assert (edges.source.tolist(), edges.target.tolist()) == ([0], [1])
    assert edges.forward_bytes.tolist() == [7 + 7 + 11] and edges.backward_bytes.tolist() == [5]
