"""The validation and the test split: fixed cases of model families that training does not see.

All properties of a case follow from its position in its split: recipes, clusters and memory are dealt from the tables
below, in an order shuffled with a fixed seed. Nothing was chosen by looking at what any planner reaches. Memory limits are
multiples of what a contiguous split needs (`limit_memory`), so that every case has a plan that fits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlplace.agents.problems.cases import ProblemCase, is_branchy, load_cases, made_by, save_cases, set_folder
from rlplace.agents.problems.graphs import (
    SEEN_CLUSTERS,
    TEST_CLUSTERS,
    VALIDATION_CLUSTERS,
    Recipe,
    is_unseen,
    is_unseen_cluster,
    priced,
)
from rlplace.agents.problems.training import limit_memory, log_uniform, settle, training_case, vary_hardware
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem

_LLAMA = "hf:llama,hidden_size=1024,intermediate_size=2816,num_attention_heads=16,num_key_value_heads=16"
_MIXTRAL = "hf:mixtral,hidden_size=1024,intermediate_size=2048,num_attention_heads=16,num_key_value_heads=8,num_local_experts=8"

_WHISPER = "hf:whisper,encoder_layers=6,decoder_layers=6,d_model=512"

VALIDATION: dict[str, tuple[Recipe | str, ...]] = {
    "zoo:unet": (
        ("zoo:unet", 16, 64), ("zoo:unet,depth=3,width=64", 8, 64), ("zoo:unet,depth=5,width=16", 32, 64),
    ),
    "hf:clip": (("hf:clip", 8, 64), ("hf:clip", 32, 64)),
    "hf:llama": ((f"{_LLAMA},num_hidden_layers=2", 8, 256), (f"{_LLAMA},num_hidden_layers=6", 2, 512)),
    "synthetic:towers": ("towers",) * 9,
}  # fmt: skip
"""Recipes of captured models, or shapes of synthetic graphs, by family."""

TEST: dict[str, tuple[Recipe | str, ...]] = {
    "zoo:nasnet": (
        ("zoo:nasnet", 64, 64), ("zoo:nasnet,cells=4,nodes=8,seed=1", 32, 64), ("zoo:nasnet,cells=8,nodes=6,seed=2", 128, 64),
        ("zoo:nasnet,cells=6,nodes=7,seed=3,width=128", 32, 64), ("zoo:nasnet,cells=5,nodes=10,seed=4,width=96", 64, 64),
    ),
    "zoo:dlrm": (
        ("zoo:dlrm", 4096, 64), ("zoo:dlrm,tables=8,rows=1000000", 16384, 64), ("zoo:dlrm,tables=60,width=32", 2048, 64),
        ("zoo:dlrm,tables=26,width=128,hidden=1024,layers=4", 8192, 64), ("zoo:dlrm,tables=40,rows=200000,bag=16", 4096, 64),
    ),
    "synthetic:wavefront": ("wavefront",) * 12,
    "hf:mixtral": ((f"{_MIXTRAL},num_hidden_layers=2", 4, 256), (f"{_MIXTRAL},num_hidden_layers=4", 2, 256)),
    "hf:t5": (("hf:t5", 8, 128), ("hf:t5,num_layers=3,num_decoder_layers=3,d_model=1024,d_ff=4096", 4, 256)),
    "hf:whisper": (("hf:whisper", 4, 64), (f"{_WHISPER},encoder_attention_heads=8,decoder_attention_heads=8", 8, 128)),
    "hf:swin": (("hf:swin", 8, 64), ("hf:swin,depths=2/2/2/2,embed_dim=128,num_heads=4/8/16/32", 16, 64)),
    "hf:convnext": (("hf:convnext", 8, 64), ("hf:convnext,depths=2/2/4/2,hidden_sizes=128/256/512/1024", 16, 64)),
}  # fmt: skip
"""The same for the test split; none of its families is in training or validation."""

VALIDATION_COUNTS = {"zoo:unet": 5, "hf:clip": 5, "hf:llama": 5, "synthetic:towers": 9}
TEST_COUNTS = {
    "zoo:nasnet": 15, "zoo:dlrm": 15, "synthetic:wavefront": 12, "hf:mixtral": 6, "hf:t5": 6, "hf:whisper": 6, "hf:swin": 6,
    "hf:convnext": 6,
}  # fmt: skip

GROUPS = {"zoo:nasnet": (64, 200), "zoo:dlrm": (64, 200)}
"""Range of groups of families whose branches would be merged in fewer; that of the others is `OTHER_GROUPS`. Log-uniform."""
OTHER_GROUPS = (24, 200)


Item = TypeVar("Item")

TRAIN_CASES = 64

_MEMORY = (None, 2.0, 1.3, 1.1)
_VARIED = (False, False, True)
_VALIDATION_SYNTHETIC = ((4, 1), (8, 2), (11, 1), (16, 4), (2, 1), (13, 1), (6, 1), (3, 1), (12, 2))
_TEST_SYNTHETIC = ((4, 1), (8, 2), (3, 1), (16, 4), (7, 1), (10, 2), (9, 3), (14, 2), (2, 1), (12, 3), (6, 1), (12, 2))
"""Devices and hosts of synthetic cases; some unseen in training."""


def split_cases(
    name: str, folder: str | Path | None = None, *, progress: Callable[[str], None] | None = None
) -> list[ProblemCase]:
    """Returns the cases of a split.

    Args:
        name: ``test``, the cases that results are reported on and nothing is tuned on; ``validation``, the cases to tune on;
            ``train``, the first `TRAIN_CASES` cases of the training stream with seed 0, which has no end.
        folder: Folder of the set as ``*.problem.json`` files; it is read when these sources made it, else made, which takes
            about a minute, and written. None: the cache folder, see `set_folder`.
        progress: Called with lines about the progress.
    """
    tell = progress or (lambda line: None)
    path = Path(folder) if folder is not None else set_folder(name)
    by = made_by()
    if path is None:
        return _made(name)
    with contextlib.suppress(InputError):  # there is none, or one that cannot be read
        cases, kept_by = load_cases(path)
        if kept_by == by:
            return cases
        tell(f"{path} was made by other sources or versions; making it anew")
    tell(f"making the {name} split (about a minute); it is kept in {path}")
    cases = _made(name)
    save_cases(cases, path, made_by=by)
    return cases


def closing_cases(*, progress: Callable[[str], None] | None = None) -> list[ProblemCase]:
    """Returns the cases of the closing table of `rlplace train`: the validation split.

    Without the transformers extra, its cases that need none, made anew.
    """
    if find_spec("transformers") is not None:
        return split_cases("validation", progress=progress)
    return build(SPLITS["validation"], needs=("zoo:", "synthetic:"))


def _made(name: str) -> list[ProblemCase]:
    return [training_case(0, number) for number in range(TRAIN_CASES)] if name == "train" else build(SPLITS[name])


@dataclass(frozen=True)
class SplitRecipe:
    """The tables from which a split is dealt.

    Attributes:
        name: Name of the split.
        families: Recipes of captured models, or shapes of synthetic graphs, by family.
        counts: Cases of each family.
        unseen: Clusters that training never draws.
        synthetic: Devices and hosts of synthetic cases.
        seed: Seed of the shuffles and draws.
    """

    name: str
    families: Mapping[str, tuple[Recipe | str, ...]]
    counts: Mapping[str, int]
    unseen: tuple[str, ...]
    synthetic: tuple[tuple[int, int], ...]
    seed: int


SPLITS = {
    "validation": SplitRecipe("validation", VALIDATION, VALIDATION_COUNTS, VALIDATION_CLUSTERS, _VALIDATION_SYNTHETIC, 20_000),
    "test": SplitRecipe("test", TEST, TEST_COUNTS, TEST_CLUSTERS, _TEST_SYNTHETIC, 20_001),
}


def build(split: SplitRecipe, *, needs: tuple[str, ...] = ("",)) -> list[ProblemCase]:
    """Returns the cases of a split, made anew; only those of families whose names start with one of `needs`."""
    rng = np.random.default_rng(split.seed)
    total = sum(split.counts.values())
    rng.permutation(total)  # once dealt micro-batches; kept, so that the cases stay those of the published figures
    memory, varied = _deal(rng, _MEMORY, total), _deal(rng, _VARIED, total)
    half = -(-total // 2)  # captured models meet a cluster that training draws and one that it does not in turn
    clusters = list(zip(_deal(rng, SEEN_CLUSTERS, half), _deal(rng, split.unseen, half), strict=True))
    cases: list[ProblemCase] = []
    dealt = [(family, index) for family, count in split.counts.items() for index in range(count)]
    for place, (family, index) in enumerate(dealt):
        if family.startswith(needs):
            recipes = split.families[family]
            recipe = recipes[index % len(recipes)]
            draw = np.random.default_rng([split.seed, place])
            groups = round(log_uniform(draw, *GROUPS.get(family, OTHER_GROUPS)))
            if isinstance(recipe, str):
                case = _synthetic_case(recipe, groups, split.synthetic[index % len(split.synthetic)], draw)
            else:
                case = _captured_case(recipe, groups, clusters[place // 2][place % 2], draw, vary=varied[place])
            factor = memory[place]
            problem = limit_memory(settle(case.problem), factor)
            name = f"{split.name}-{family.partition(':')[2]}-{index:02d}"
            title = f"{name} {problem.name}" + (f", memory x{factor:g}" if factor else "")
            problem = dataclasses.replace(problem, name=title)
            cases.append(dataclasses.replace(case, name=name, family=family, problem=problem, branchy=is_branchy(problem)))
    return cases


def _deal(rng: np.random.Generator, items: tuple[Item, ...], count: int) -> list[Item]:
    """Returns `count` items, each equally often, shuffled."""
    full = [items[i % len(items)] for i in range(count)]
    return [full[i] for i in rng.permutation(count).tolist()]


def _captured_case(recipe: Recipe, groups: int, text: str, rng: np.random.Generator, *, vary: bool) -> ProblemCase:
    from rlplace.cluster.parse import Cluster

    cluster = Cluster.preset(text)
    problem = priced(recipe, cluster, groups, on=text)
    if vary:
        problem = dataclasses.replace(vary_hardware(problem, rng), name=f"{problem.name}, varied")
    return ProblemCase("", "", problem, unseen_cluster=is_unseen_cluster(cluster))


def _synthetic_case(shape: str, groups: int, cluster: tuple[int, int], rng: np.random.Generator) -> ProblemCase:
    devices, hosts = cluster
    problem = random_problem(
        int(rng.integers(2**31)),
        num_groups=groups,
        num_devices=devices,
        shape=shape,
        width=int(rng.integers(2, 9)),
        unlike=bool(rng.random() < 0.35),
        comm_ratio=log_uniform(rng, 0.05, 2.0),
        hosts=hosts,
    )
    return ProblemCase("", "", vary_hardware(problem, rng), unseen_cluster=is_unseen(devices, set(), hosts))
