"""Detectors: samples are items of lists, and what the forward computes depends on values of tensors."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlplace.api import place
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.capture.inputs import are_items, flatten_rows, resize_batch, rows_of
from rlplace.model.graph.rescale import two_captures
from rlplace.plan.strategy import Strategy
from rlplace.runtime.base.steps import synthetic_batch
from rlplace.runtime.strategy.run import prepare
from tests.runtime.job.launch import run


class Detector(nn.Module):
    """Picks a size at random among one, boxes by their score and a share of the background, image by image, as detectors do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.score, self.boxes = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1), nn.Conv2d(4, 4, 1)

    def forward(self, images, targets=None):
        side = (8,)[int(torch.empty(1).uniform_(0, 1).item())]
        features = self.body(torch.stack([F.interpolate(image[None], size=(side, side))[0] for image in images])).relu()
        scores, boxes = self.score(features).flatten(1), self.boxes(features).flatten(2).mT
        if not self.training:
            return [{"boxes": own[one > one.mean()]} for own, one in zip(boxes, scores, strict=True)]
        losses = []
        for own, one, target in zip(boxes, scores, targets, strict=True):
            chosen = torch.where(one.detach() > 0)[0]
            near = own[chosen][:, None] - target["boxes"]
            losses.append(near.abs().mean() if chosen.numel() > 0 else own.sum() * 0)
        return {"score": F.binary_cross_entropy_with_logits(scores, (scores > 0).float()), "box": torch.stack(losses).mean()}


def batch(samples):
    """Images of unlike sizes; three of them with three channels and three boxes could be taken for rows."""
    generator = torch.Generator().manual_seed(samples)
    images = [torch.randn(3, 6 + n % 3, 8, generator=generator) for n in range(samples)]
    boxes = [torch.rand(1 + n % 3, 4, generator=generator) for n in range(samples)]
    return images, [{"boxes": own, "labels": torch.ones(len(own), dtype=torch.long)} for own in boxes]


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_items_are_samples_however_many_channels_images_have(samples):
    images, targets = batch(samples)
    same = [{"boxes": torch.rand(3, 4), "labels": torch.ones(3)} for _ in range(samples)]
    for own in (targets, same):
        assert rows_of((images, own)) == rows_of({"images": images, "targets": own}) == samples
        leaves, each, _ = flatten_rows({"images": images, "targets": own}, samples)
        assert len(leaves) == 2 and each == [True, True]
    assert resize_batch((images, same), samples, 5)[0] == (images * 5)[:5]


def test_features_in_a_list_keep_their_samples_as_rows():
    features = [torch.rand(3, 2), torch.rand(3, 4), torch.rand(3, 5)]
    for inputs in ((features, torch.zeros(3)), ([*features, torch.rand(3, 1)], torch.zeros(3))):
        assert not are_items((*inputs, torch.tensor(2.0)))  # a number beside them has no rows
        assert rows_of(inputs) == 3 and flatten_rows(inputs, 3)[1] == [True] * (len(inputs[0]) + 1)


def test_batches_of_a_step_hold_whole_samples_in_another_order():
    images, targets = batch(3)
    drawn, own = synthetic_batch((images, targets), 6, seed=0, step=1)
    order = [next(n for n, image in enumerate(images) if image is one) for one in drawn]
    assert sorted(order) == [0, 0, 1, 1, 2, 2] and [targets[n] for n in order] == own


def test_captures_at_unlike_batches_have_equal_structure():
    """FLOPs of a convolution of 8 x 8 outputs, 3 to 4 channels by 3 x 3 weights: 2 x 64 x 4 x 27 a sample."""

    def at(samples, method=None):
        return capture(Detector(), batch(samples), method=method)

    first, other = two_captures(at(8), at)
    assert first.capture["method"] == "module" and first.op_names == other.op_names
    assert (first.samples, other.samples, first.num_tensors) == (8, 4, other.num_tensors)
    for graph in (first, other):
        assert graph.op_flops[graph.op_names.index("body/forward")] == graph.samples * (2 * 64 * 4 * 27)


STRATEGY = Strategy.from_dict(
    {"batch": 8, "microbatch": [2], "microbatches": [2]}
    | {"stages": [{"blocks": ["body", "score", "boxes"], "devices": [0, 1], "mesh": {"replicate": 2}, "sharding": 0}]}
)


def trained():
    model = prepare(Detector(), STRATEGY, {"images": batch(2)[0], "targets": batch(2)[1]})
    sum(model(*batch(8)).values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        return gradients, [found["boxes"] for found in model.eval()(batch(8)[0], None)]


def test_replicas_train_a_detector_as_the_mean_over_their_parts():
    plain = Detector()
    images, targets = batch(8)
    for first in range(0, 8, 2):
        (sum(plain(images[first : first + 2], targets[first : first + 2]).values()) / 4).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    boxes = plain.eval()(images)
    for gradients, found in run(2, trained):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name])
        assert len(found) == 8
        for own, one in zip(found, boxes, strict=True):
            torch.testing.assert_close(own, one["boxes"])


def test_a_detector_is_planned_as_replicas_and_not_cut():
    ask = partial(place, Detector(), "a100-40g:2", example_inputs=batch(4), batch=8, calls=20)
    (pipeline,) = ask(space="replicate=2").strategy.pipelines
    assert pipeline.data_degree == 2 and len(pipeline.stages) == 1
    with pytest.raises(InputError, match="looks at values"):
        ask(space="shard=2 sharding=3")
