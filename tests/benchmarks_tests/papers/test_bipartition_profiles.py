"""The table of gains on PipeDream's public profiles."""

import pytest

from rlplace.placement.published.bipartition.solve import bi_partition, free_workers, layer_wise, pass_costs, price_cuts
from tests.placement.pipedream import PROFILES, profile_chain, read_profile

# name: layers, backward / forward, layer-wise optimum over bi-partition optimum for 2, 3, 4 and 8 workers
TABLE = {
    "vgg16": (40, 1.88, (1.10, 1.03, 1.28, 1.41)),
    "alexnet": (22, 0.90, (1.01, 1.09, 1.29, 1.29)),
    "gnmt": (45, 1.67, (1.03, 1.15, 1.14, 1.20)),
    "resnet18": (70, 1.42, (1.00, 1.05, 1.07, 1.14)),
}


@pytest.mark.parametrize("name", TABLE)
def test_gains_on_public_profiles(name):
    chain = profile_chain(read_profile(PROFILES / f"{name}.txt"))
    layers, ratio, gains = TABLE[name]
    assert chain.num_layers == layers
    assert chain.backward_s.sum() / chain.forward_s.sum() == pytest.approx(ratio, abs=0.005)
    for workers, gain in zip((2, 3, 4, 8), gains, strict=True):
        ratio = layer_wise(chain, workers).bottleneck_s / bi_partition(chain, workers).bottleneck_s
        assert ratio == pytest.approx(gain, abs=0.005) and ratio >= 1.0


def test_vgg16_on_four_workers_by_gap():
    chain = profile_chain(read_profile(PROFILES / "vgg16.txt"))
    assert (chain.forward_s + chain.backward_s).sum() == pytest.approx(0.6725, abs=5e-5)
    by_gap = {0: 216.45, 1: 178.09, 2: 175.56, 4: 174.71, 8: 169.38}
    for gap, milliseconds in by_gap.items():
        assert 1e3 * bi_partition(chain, 4, gap).bottleneck_s == pytest.approx(milliseconds, abs=0.006)
    assert 1e3 * bi_partition(chain, 4).bottleneck_s == pytest.approx(169.10, abs=0.005)
    for cuts in ((0, 3, 6, 13, 40), (0, 3, 12, 23, 40)):  # the latter are the four stages of PipeDream's own straight VGG16
        straight = price_cuts(cuts, cuts, pass_costs(chain, free_workers(4)))
        assert 1e3 * straight.bottleneck_s == pytest.approx(216.45, abs=0.005)
