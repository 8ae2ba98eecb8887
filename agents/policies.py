"""`Policy`: what ranks moves of a plan. The agent's search, training and checkpoints know policies by this alone.

Other packages offer theirs by name, as entry points of the group ``rlplace.policies`` (docs/agent/policies.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.envs.base import context_vector
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.guide.features import FEATURES
from rlplace.envs.guide.guide import Guide
from rlplace.envs.observation import GraphArrays
from rlplace.errors import InputError, show, unknown_name
from rlplace.plugins import POLICIES, find, names, wrong

PLACEMENT, REFINEMENT = "rlplace/Placement-v0", "rlplace/Refinement-v0"
KNOWN = {PLACEMENT: CONSTRUCTION_FEATURES, REFINEMENT: FEATURES}
"""Environments in which policies are trained, with the columns of their candidates."""

BUILT_IN = ("perceptron", "graph")
"""Names of the policies that are shipped: `PlacerNetwork` ranks moves, `GraphNetwork` builds plans."""


class Looked(NamedTuple):
    """A plan that was simulated and analysed, with moves that were drawn from it.

    Attributes:
        guide: Its instance, the analysed timeline (`Guide.view`), and the moves: `Guide.move(k)` says which groups go where.
        plan: int32 [G], device of each group.
    """

    guide: Guide
    plan: NDArray[np.int32]


class Policy(nn.Module):
    """Base of policies: a torch module that is made by ``cls(features=names, **settings)``.

    A subclass defines `look`, from which everything else follows; `decide` or `scores` may be defined beside it where that is
    quicker.

    Attributes:
        features: Names of the columns of a candidate that it reads: some of the environment's, in any order.
    """

    features: tuple[str, ...]
    environment: ClassVar[str] = REFINEMENT
    """Id of the environment in which it is trained; one of `PLACEMENT` builds plans, one of `REFINEMENT` ranks moves."""

    def know(self, graphs: Sequence[GraphArrays]) -> None:
        """Told in `PLACEMENT` which graphs the numbers ``graph`` of observations stand for, before it is asked."""

    def settings(self) -> dict[str, Any]:
        """Plain data: the arguments beside `features` that make such a policy."""
        return {}

    def look(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What PPO trains: logits [B, K] of all actions and values [B, 1] of states.

        Args:
            observation: A batch of what the environment observes; ``candidates`` float32 [B, K * F] has the columns of
                `features` alone, in their order.
        """
        raise NotImplementedError(f"{type(self).__name__} must define look(observation)")

    def decide(self, observation: Mapping[str, Tensor]) -> Tensor:
        """What building asks: logits [B, D] of observations of the one problem that it knows, without room for more devices."""
        return self.look(observation)[0]

    def scores(self, state: Looked | None, moves: Tensor) -> Tensor:
        """What the search asks, once for many moves: their logits [K].

        Args:
            state: The plan; None in pre-training, whose labels keep the moves alone (moves then have more axes before K).
            moves: float32 [K, F], the columns of `features`.
        """
        if state is None:
            raise InputError(f"{type(self).__name__} cannot be pre-trained on labels, which hold no plans; use --fit-steps 0")
        guide, count = state.guide, len(moves)
        load_s = float(guide.view.load.max()) / guide.instance.ideal_s
        observation = {
            "device_of_group": torch.from_numpy(state.plan),
            "candidates": moves.reshape(-1),
            "candidate_group": torch.from_numpy(guide.groups[guide.ptr[:count]]),
            "context": torch.from_numpy(context_vector(guide.instance, [1.0, 0.0, 0.0, load_s])),
        }
        return self.look({name: value[None] for name, value in observation.items()})[0][0]

    def standardise(self, mean: Tensor, scale: Tensor) -> None:
        """Told once, before pre-training: mean and scale of its features, float32 [F] each."""

    def save(self, folder: str | Path, *, training: Mapping[str, Any] | None = None, card: str = "") -> None:
        """Writes a checkpoint, which ``rlplace place --agent FOLDER`` takes; see `rlplace.agents.checkpoint`."""
        from rlplace.agents.checkpoint import save_checkpoint

        save_checkpoint(folder, self, training=training or {}, card=card or f"# {Path(folder).name}\n")

    @classmethod
    def load(cls, folder: str | Path) -> Policy:
        """Reads a checkpoint of this class.

        Raises:
            InputError: It is one of another class, or damaged.
        """
        from rlplace.agents.checkpoint import load_checkpoint

        policy = load_checkpoint(folder).network
        if not isinstance(policy, cls):
            raise InputError(f"{folder}: holds a {type(policy).__name__}, not a {cls.__name__}")
        return policy


def columns_of(features: Sequence[str], known: Sequence[str]) -> NDArray[np.int64] | None:
    """Where a policy's features stand in a table of `known` ones; None where they are the whole table.

    Raises:
        InputError: A feature is unknown.
    """
    if tuple(features) == tuple(known):
        return None
    for name in features:
        if name not in known:
            raise unknown_name("feature", name, tuple(known))
    return np.array([tuple(known).index(name) for name in features])


def read_by(policy: Policy, table: NDArray[Any]) -> Tensor:
    """Returns float32 [..., F], the columns of a table of moves [..., `FEATURES`] that a policy reads."""
    columns = columns_of(policy.features, FEATURES)
    return torch.from_numpy(np.asarray(table if columns is None else table[..., columns], dtype=np.float32))


def narrowed(observation: Mapping[str, Tensor], features: Sequence[str], known: Sequence[str]) -> Mapping[str, Tensor]:
    """Returns an observation whose candidates have `known` columns, with `features` of them alone."""
    columns = columns_of(features, known)
    if columns is None:
        return observation
    table = observation["candidates"].reshape(*observation["candidate_group"].shape, -1)[..., torch.from_numpy(columns)]
    return {**observation, "candidates": table.flatten(1)}


def policy_class(name: str) -> type[Policy]:
    """Returns the class of policies of this name.

    Raises:
        InputError: No built-in policy and no installed package has the name, or what has it is no policy.
    """
    from rlplace.agents.graph_network import GraphNetwork
    from rlplace.agents.network import PlacerNetwork

    if name in BUILT_IN:
        return (PlacerNetwork, GraphNetwork)[BUILT_IN.index(name)]
    extension = find(POLICIES, name, BUILT_IN)
    if extension is None:
        raise unknown_name("policy", name, (*BUILT_IN, *names(POLICIES, BUILT_IN)))
    found = extension.load()
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise wrong(extension, f"is {found!r:.80}, not a class of rlplace.agents.policies.Policy")
    if found.environment not in KNOWN:
        raise wrong(extension, f"names the environment {show(found.environment)}, not one of {', '.join(KNOWN)}")
    return found


def policy_name(policy: Policy) -> str:
    """Returns the name by which a checkpoint finds the class of a policy again.

    Raises:
        InputError: No name leads to it.
    """
    for name in (*BUILT_IN, *names(POLICIES, BUILT_IN)):
        try:
            if policy_class(name) is type(policy):
                return name
        except InputError:  # of a package that cannot be imported
            continue
    raise InputError(
        f"{type(policy).__module__}.{type(policy).__qualname__} is known by no name; offer it as an entry point of the group "
        f"{POLICIES} and install its package (docs/agent/policies.md)"
    )
