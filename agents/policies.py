"""`Policy`: scores the actions of an environment. Search, training and checkpoints know policies by this interface alone.

Other packages offer theirs by name, as entry points of the group ``rlplace.policies`` (docs/agent/policies.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.envs.base import CLUSTER, ENVIRONMENTS, PLACEMENT, REFINEMENT, STRATEGY
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.guide.features import FEATURES
from rlplace.envs.guide.guide import Guide
from rlplace.envs.observation import GraphArrays, context_vector
from rlplace.errors import InputError, show, unknown_name
from rlplace.plugins import POLICIES, find, names, wrong

BUILT_IN = ("perceptron", "graph")
"""Names of the shipped policies: `PlacerNetwork` scores candidates one by one, `GraphNetwork` builds plans."""


@cache
def candidate_columns(environment: str) -> tuple[str, ...]:
    """Returns the names of the columns of a candidate in one of `ENVIRONMENTS`."""
    if environment == STRATEGY:
        from rlplace.envs.strategy import StrategyEnv

        return StrategyEnv.FEATURES
    if environment == CLUSTER:
        from rlplace.envs.cluster import ClusterEnv

        return ClusterEnv.FEATURES
    return CONSTRUCTION_FEATURES if environment == PLACEMENT else FEATURES


def default_policy(environment: str) -> str:
    """Returns the name of the shipped policy that is trained in one of `ENVIRONMENTS`."""
    return BUILT_IN[environment == PLACEMENT]


class AnalysedPlan(NamedTuple):
    """A plan that was simulated and analysed, with moves drawn from it.

    Attributes:
        guide: Its instance, the analysed timeline (`Guide.view`), and the moves: `Guide.move(k)` returns groups and devices.
        plan: int32 [G], device of each group.
    """

    guide: Guide
    plan: NDArray[np.int32]


class Policy(nn.Module):
    """Base of policies: a torch module that is made by ``cls(features=names, **settings)``.

    A subclass defines `look`; `decide` and `scores` have defaults built on it, to be replaced where something faster exists.

    Attributes:
        features: Names of the columns of a candidate that it reads: some of the environment's, in any order.
        environment: Id of the environment in which it is trained; one of `PLACEMENT` builds plans, one of `REFINEMENT` ranks
            moves.
    """

    features: tuple[str, ...]
    environment: str = REFINEMENT
    environments: ClassVar[tuple[str, ...]] = ()
    """Further environments in which the class may be trained; `environment` of the instance is then set to that id."""

    def know(self, graphs: Sequence[GraphArrays]) -> None:
        """Receives, in `PLACEMENT`, the graphs that the numbers ``graph`` of the next observations refer to."""

    def settings(self) -> dict[str, Any]:
        """Returns plain data: the arguments beside `features` that make such a policy."""
        return {}

    def look(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns logits [B, K] of all actions and values [B, 1] of states, which PPO trains.

        Args:
            observation: A batch of the environment's observations; ``candidates`` float32 [B, K * F] has the columns of
                `features` alone, in their order.
        """
        raise NotImplementedError(f"{type(self).__name__} must define look(observation)")

    def decide(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Returns logits [B, D] while plans of the one known problem are built; observations have no padding devices."""
        return self.look(observation)[0]

    def scores(self, state: AnalysedPlan | None, moves: Tensor) -> Tensor:
        """Returns the logits [K] of moves; the search calls it once for many moves.

        Args:
            state: The plan; None in pre-training, whose data sets hold the moves alone (moves then have more axes before K).
            moves: float32 [K, F], the columns of `features`.
        """
        if state is None:
            raise InputError(
                f"{type(self).__name__} cannot be pre-trained on priced moves, which come without plans; use --fit-steps 0"
            )
        guide, count = state.guide, len(moves)
        load_s = float(guide.view.load.max()) / guide.instance.ideal_s
        observation = {
            "device_of_group": torch.from_numpy(state.plan),
            "candidates": moves.reshape(-1),
            "candidate_group": torch.from_numpy(guide.moves.groups[guide.moves.ptr[:count]]),
            "context": torch.from_numpy(context_vector(guide.instance, [1.0, 0.0, 0.0, load_s])),
        }
        return self.look({name: value[None] for name, value in observation.items()})[0][0]

    def standardise(self, mean: Tensor, scale: Tensor) -> None:
        """Receives mean and scale of its features, float32 [F] each, once before pre-training."""

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
    """Returns the indices of a policy's features in a table of `known` columns; None where they are the whole table.

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
        InputError: No built-in policy and no installed package has the name, or the class of that name is no policy.
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
    for environment in (found.environment, *found.environments):
        if environment not in ENVIRONMENTS:
            raise wrong(extension, f"names the environment {show(environment)}, not one of {', '.join(ENVIRONMENTS)}")
    return found


def check_environment(name: str, environment: str) -> None:
    """Raises InputError where the policy of this name is not trained in the environment."""
    kind = policy_class(name)
    if environment not in ENVIRONMENTS:
        raise unknown_name("environment", environment, ENVIRONMENTS)
    if environment not in (kind.environment, *kind.environments):
        raise InputError(
            f"policy {name} is trained in {kind.environment}, not in {environment}; leave --policy out for "
            f"{default_policy(environment)}, or name one of your own whose class has environment = '{environment}': an entry "
            f"point of the group {POLICIES} (docs/agent/policies.md)"
        )


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
