"""Pre-training: what the loss asks for, what a step reads, and that a fit can stop and go on anywhere."""

import copy
import os

import numpy as np
import pytest
import torch

from rlplace.agents import move_ranking as pretrain
from rlplace.agents.checkpoint import load_state, save_state
from rlplace.agents.move_ranking import PricedMoves, captured_gain, collect_moves, ranking_loss, set_standard
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.planner import load_agent
from rlplace.agents.pretraining import PRETRAINING, fit
from rlplace.agents.problems.cases import ProblemCase
from rlplace.envs.base import REFINEMENT
from rlplace.envs.guide.features import FEATURES, NUM_FEATURES
from rlplace.problem.generate import random_problem


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    for number in range(10):
        case = ProblemCase("x", "x", random_problem(number, num_groups=10 + number, num_devices=2 + number % 3))
        collect_moves(case, states=10, moves=20, seed=number).save(folder / f"{number}.safetensors")
    return sorted(folder.iterdir())


def labels_of(features, change):
    features, change = np.asarray(features, dtype=np.float16), np.asarray(change, dtype=np.float32)
    return PricedMoves(features=features, change=change)


def test_the_loss_is_zero_at_the_target_and_nowhere_else():
    change = torch.tensor([[-0.006, 0.0, 0.002, -0.004], [-0.001, 0.002, torch.nan, torch.nan]])
    target = -change / pretrain._SHARPNESS
    at_target = torch.where(torch.isnan(target), 7.0, target)  # what is scored where there is no move does not count
    assert ranking_loss(at_target + 3.0, change).item() == pytest.approx(0.0, abs=1e-5)
    for row, column in ((0, 0), (0, 3), (1, 0)):
        off = at_target.clone()
        off[row, column] -= 1.0
        assert ranking_loss(off, change).item() > 1e-3


def test_the_loss_by_hand():
    """One state, two moves, of which one gains 0.6 %; a scorer that cannot tell them apart."""
    share = 1.0 / (1.0 + np.exp(-2.0))  # gains of 0.006 and 0 over a sharpness of 0.003
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    loss = ranking_loss(torch.zeros(1, 2), torch.tensor([[-0.006, 0.0]]))
    assert loss.item() == pytest.approx(np.log(2.0) - entropy, rel=1e-5)


def test_states_without_a_gain_weigh_nothing():
    change = torch.tensor([[-0.02, 0.01], [0.5, 0.01]])
    one, two = torch.tensor([[1.0, 0.0], [4.0, -4.0]]), torch.tensor([[1.0, 0.0], [-9.0, 9.0]])
    assert ranking_loss(one, change) == ranking_loss(two, change) > 0
    logits = torch.zeros(2, 2, requires_grad=True)
    ranking_loss(logits, change[1:].expand(2, 2)).backward()
    assert ranking_loss(torch.zeros(1, 2), change[1:]).item() == 0.0 and not logits.grad.any()


def test_captured_gain_by_hand(tmp_path):
    """A network that scores by one feature: its first choices gain 3, 0 and 0 %, its best of four 3, 4 and 0 %."""
    network = PlacerNetwork(hidden=4, second=4, features=FEATURES)
    with torch.no_grad():
        network.linear.weight.zero_()
        network.linear.weight[0, 3] = 1.0
    gains = np.full((3, 20), -0.01)
    gains[0, :2] = 0.03, 0.02
    gains[1, [0, 3, 17]] = 0.0, 0.04, 0.05
    features = np.zeros((3, 20, NUM_FEATURES))
    features[:, :, 3] = -np.arange(20) / 8.0
    change = -gains
    change[0, 10:] = np.nan  # nothing there, however well it scores
    features[0, 15, 3] = 8.0
    labels_of(features, change).save(tmp_path / "a")
    share = captured_gain(network, [tmp_path / "a"])
    assert share == pytest.approx({1: 0.03 / 0.08, 4: 0.07 / 0.08, 16: 0.07 / 0.08}, rel=1e-5)
    network.linear.weight.data[0, 3] = -1.0
    assert captured_gain(network, [tmp_path / "a"]) == pytest.approx({1: 0.0, 4: 0.05 / 0.08, 16: 0.08 / 0.08}, rel=1e-5)


def test_features_are_standardised(files):
    network = PlacerNetwork(hidden=8, second=4, features=FEATURES)
    set_standard(network, files)
    rows = np.concatenate([PricedMoves.load(path).features[~np.isnan(PricedMoves.load(path).change)] for path in files]).astype(
        np.float32
    )
    table = (rows - network.mean.numpy()) / network.scale.numpy()
    assert (np.abs(table.mean(0)) < 1.0).all() and (table.std(0) < 2.5).all() and (table.std(0) > 0.5).sum() > 20


def test_a_fit_goes_on_exactly(files, tmp_path):
    def begin():
        torch.manual_seed(3)
        network = PlacerNetwork(hidden=16, second=8, features=FEATURES)
        set_standard(network, files)
        return network, torch.optim.Adam(network.parameters())

    whole, optimizer = begin()
    for first in (0, 7, 14):
        fit(whole, optimizer, files, PRETRAINING[REFINEMENT], first=first, last=min(first + 7, 20), steps=20, seed=5)
    cut, optimizer = begin()
    fit(cut, optimizer, files, PRETRAINING[REFINEMENT], first=0, last=10, steps=20, seed=5)
    save_state(tmp_path / "state.safetensors", cut, optimizer.state_dict(), (10, 0, 0))
    torch.manual_seed(99)
    again = PlacerNetwork(hidden=16, second=8, features=FEATURES)
    optimizer = torch.optim.Adam(again.parameters())
    moments, progress = load_state(tmp_path / "state.safetensors", again, optimizer)
    assert progress == [10, 0, 0]
    optimizer.load_state_dict(moments)
    fit(again, optimizer, files, PRETRAINING[REFINEMENT], first=10, last=20, steps=20, seed=5)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert not torch.equal(whole.residual.weight, cut.residual.weight)


def test_a_fit_learns_to_rank(files):
    torch.manual_seed(0)
    network = PlacerNetwork(hidden=32, second=16, features=FEATURES)
    set_standard(network, files)
    before = captured_gain(network, files)
    fit(network, torch.optim.Adam(network.parameters()), files, PRETRAINING[REFINEMENT], first=0, last=120, steps=120, seed=0)
    after = captured_gain(network, files)
    assert after[1] > before[1] + 0.1 and after[4] > before[4]


def test_a_file_that_is_written_anew_is_read_anew(files, tmp_path):
    (tmp_path / "a").write_bytes(files[0].read_bytes())
    one = pretrain._priced(tmp_path / "a")
    assert pretrain._priced(tmp_path / "a") is one
    (tmp_path / "a").write_bytes(files[5].read_bytes())
    os.utime(tmp_path / "a", ns=(1, 1))
    assert not np.array_equal(pretrain._priced(tmp_path / "a").features, one.features)


@pytest.mark.slow
def test_the_shipped_agent_knows_which_moves_gain(tmp_path):
    """Its first choice has half of the best gain on random steps; with random weights next to nothing."""
    paths = []
    for number, shape in enumerate(("wavefront", "branchy", "layered", "wavefront", "branchy", "layered")):
        problem = random_problem(900 + number, num_groups=40, num_devices=4, shape=shape, memory_factor=1.6)
        labels = collect_moves(ProblemCase("x", "x", problem), states=24, moves=64, seed=number)
        paths.append(tmp_path / f"{number}.safetensors")
        labels.save(paths[-1])
    shipped = load_agent("default").checkpoint.network
    known = captured_gain(shipped, paths)
    others = []
    for seed in range(3):
        other, stream = copy.deepcopy(shipped), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in other.parameters():
                weight.copy_(torch.randn(weight.shape, generator=stream) * 0.3)
        others.append(captured_gain(other, paths))
    assert known[1] > 0.5 and known[16] > 0.85
    assert all(known[rank] > max(other[rank] for other in others) + gap for rank, gap in ((1, 0.2), (4, 0.2)))
