"""The placer network: a heuristic at first, indifferent to numbers, order and devices, and one with its compiled twin."""

import pytest
import torch

from rlplace.agents.network import HEURISTIC, STOP_LOGIT, PlacerNetwork
from rlplace.envs.cluster import ClusterEnv
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.guide.features import FEATURES, NUM_FEATURES
from rlplace.envs.observation import NUM_CONTEXT


def logits_of(network, table, groups, context):
    with torch.no_grad():
        return network(table, groups, context)[0]


@pytest.mark.parametrize("features", [FEATURES, CONSTRUCTION_FEATURES])
def test_an_untrained_network_is_the_heuristic(features):
    network = PlacerNetwork(hidden=16, second=8, features=features)
    table, groups = torch.randn(2, 5, len(features)), torch.tensor([[0, 3, 5, 9, -1]] * 2)
    logits = logits_of(network, table, groups, torch.randn(2, NUM_CONTEXT))
    weights = torch.tensor([HEURISTIC.get(name, 0.0) for name in features])
    assert weights.count_nonzero() >= 1
    assert torch.allclose(logits[:, :4], (table[:, :4] * weights).sum(2), atol=1e-4)
    assert torch.equal(logits[:, 4], torch.full((2,), STOP_LOGIT))


def test_every_heuristic_feature_exists():
    assert set(HEURISTIC) <= {*FEATURES, *CONSTRUCTION_FEATURES, *ClusterEnv.FEATURES}


def test_logits_follow_the_order_of_candidates(make_network):
    network = make_network()
    table, groups, context = torch.randn(1, 6, NUM_FEATURES), torch.tensor([[0, 1, -1, 3, 4, 4]]), torch.randn(1, NUM_CONTEXT)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    one = logits_of(network, table, groups, context)[:, order]
    two = logits_of(network, table[:, order], groups[:, order], context)
    assert torch.allclose(one, two, atol=1e-5)
    assert len(set(one[0].tolist())) == 6


def test_a_score_does_not_depend_on_other_candidates(make_network):
    """Neither on their number nor on what they are; only stop looks at all of them."""
    network = make_network()
    table, groups, context = torch.randn(1, 6, NUM_FEATURES), torch.tensor([[0, 1, 2, 3, 4, -1]]), torch.randn(1, NUM_CONTEXT)
    one = logits_of(network, table, groups, context)
    changed, other = table.clone(), groups.clone()
    changed[0, 3:5], other[0, 3:5] = 5.0, 9
    two = logits_of(network, changed, other, context)
    assert torch.allclose(one[:, :3], two[:, :3], atol=1e-5)
    assert not torch.allclose(one[:, 3:], two[:, 3:])
    few = logits_of(network, table[:, :2], groups[:, :2], context)
    assert torch.allclose(one[:, :2], few, atol=1e-5)
