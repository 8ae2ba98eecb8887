"""Models whose ops or sizes depend on values or on the number of samples: what is captured in their place, and what is said."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rlplace
from rlplace.cli.main import main
from rlplace.errors import CaptureError, InputError
from rlplace.model.capture.capture import capture
from rlplace.model.capture.inputs import resize_batch, rows_of
from rlplace.model.graph.rescale import two_captures
from rlplace.plan.plan import PlacementPlan
from rlplace.planned import Planned


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def scores(self, x):
        return self.last(self.first(x).relu())


class Ctc(Base):
    def forward(self, x, x_lengths, y, y_lengths):
        return {"loss": F.ctc_loss(self.scores(x).log_softmax(-1).transpose(0, 1), y, x_lengths, y_lengths)}


@pytest.mark.parametrize("flat", [False, True])
def test_ctc_is_one_op_that_keeps_what_torch_keeps_at_full_lengths(flat):
    y = torch.ones(4, 3, dtype=torch.long)
    inputs = {"x": torch.randn(4, 10, 6), "x_lengths": torch.full((4,), 10), "y": y.flatten() if flat else y}
    inputs["y_lengths"] = torch.full((4,), 3)
    graph = capture(Ctc(), inputs)
    assert graph.capture["method"] == "dispatch" and "guessed: ctc_loss x1" in graph.capture["notes"][-1]
    (op,) = (number for number, name in enumerate(graph.op_names) if name.endswith("ctc_loss") and graph.op_phase[number] == 0)
    made = graph.tensor_bytes[graph.tensor_producer == op]
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(
        torch.randn(10, 4, 5).log_softmax(-1), inputs["y"], inputs["x_lengths"], inputs["y_lengths"], 0, False
    )
    assert alpha.numel() * 4 in made and loss.numel() * 4 in made


class Packed(nn.Module):
    def __init__(self, packed):
        super().__init__()
        self.layer, self.head, self.packed = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3), packed

    def forward(self, x, lengths, y):
        if self.packed:
            states, last = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            states, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
        else:
            states, last = self.layer(x)
        return {"loss": F.cross_entropy(self.head(states[:, 0] + last[0][-1]), y)}


def test_packed_sequences_compute_what_padded_ones_do():
    inputs = {"x": torch.randn(4, 7, 6), "lengths": torch.tensor([7, 2, 5, 3]), "y": torch.zeros(4, dtype=torch.long)}
    packed, padded = (capture(Packed(how), inputs, method="dispatch") for how in (True, False))
    assert packed.capture["method"] == "dispatch" and "guessed: pack_padded_sequence x1" in packed.capture["notes"][-1]

    def recurrent(graph):
        kinds = [graph.op_kind[op] for op in range(graph.num_ops)]
        return sorted(float(graph.op_flops[op]) for op, kind in enumerate(kinds) if "recurrent_layer" in graph.op_target[op])

    assert recurrent(packed) == recurrent(padded) and len(recurrent(packed)) >= 2
    assert capture(Packed(True), inputs).capture["method"] == "dispatch"


class Masked(Base):
    def forward(self, x, y):
        keep = y >= 0
        return {"loss": F.cross_entropy(self.scores(x)[keep], y[keep])}


def test_masks_by_value_count_all_positions():
    inputs = {"x": torch.randn(4, 6), "y": torch.tensor([0, -1, 2, 1])}
    graph = capture(Masked(), inputs)
    assert graph.capture["method"] == "module" and "index x2" in graph.capture["notes"][-1]


class Numpy(Base):
    def forward(self, x):
        return {"loss": self.scores(x).mean() * float(x.numpy().max())}


class Lengths(Base):
    def forward(self, x, lengths):
        return {"loss": self.scores(x).reshape(lengths.tolist()).amax(0).mean()}


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (Numpy(), {"x": torch.randn(4, 6)}, r"Numpy: .*\(.*test_values.py:\d+\); the forward leaves torch there: compute with"),
        (
            Masked(),
            {"x": torch.randn(4, 6), "labels": torch.zeros(4)},
            r"unexpected keyword .*inputs must fit its forward\(x, y\)",
        ),
        (
            Lengths(),
            {"x": torch.randn(4, 6), "lengths": torch.tensor([2, -1])},
            r"reads a value there: take sizes from shapes, or",
        ),
    ],
)
def test_what_cannot_be_captured_says_what_to_change(model, inputs, words):
    with pytest.raises(CaptureError, match=words):
        capture(model, inputs)


def test_a_loss_of_two_arguments_says_where_targets_go():
    with pytest.raises(
        CaptureError, match=r"missing .* 'target'; a loss is called with the output alone: compute it in the forw"
    ):
        capture(nn.Linear(6, 2), torch.randn(4, 6), loss=nn.MSELoss())


class Losses(Base):
    def forward(self, x):
        scores = self.scores(x)
        return {"loss_class": scores.mean(), "loss_box": scores.square().mean()}


class Scores(Base):
    def forward(self, x):
        return {"scores": self.scores(x)}


def test_losses_in_a_dict_are_added_up():
    x = {"x": torch.randn(4, 6)}
    assert "loss" in capture(Losses(), x).op_target
    assert capture(Losses(), x, loss=lambda output: sum(output.values())).samples == 4
    with pytest.raises(InputError, match=r"a dict of scores without one; give labels, or loss=a function of the output"):
        capture(Scores(), x)


class Detector(nn.Module):
    """Takes a list of images and a list of targets, as torchvision's detection models do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)

    def forward(self, images, targets):
        features = self.body(torch.stack(images))
        classes, boxes = self.classes(features).flatten(2).mT, self.boxes(features).flatten(2).mT
        pairs = [(F.cross_entropy(c[: len(t["labels"])], t["labels"]), b[: len(t["boxes"])], t["boxes"])
                 for c, b, t in zip(classes, boxes, targets, strict=True)]  # fmt: skip
        return {"loss_class": sum(loss for loss, _, _ in pairs), "loss_box": sum((a - b).abs().mean() for _, a, b in pairs)}


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.detector = Detector()

    def forward(self, images, boxes, labels):
        targets = [{"boxes": b, "labels": n} for b, n in zip(boxes, labels, strict=True)]
        return {"loss": sum(self.detector(list(images), targets).values())}


def stacked(batch=4):
    return Stacked(), {
        "images": torch.rand(batch, 3, 8, 8),
        "boxes": torch.rand(batch, 2, 4),
        "labels": torch.ones(batch, 2).long(),
    }


def lists(batch):
    targets = [{"boxes": torch.rand(2, 4), "labels": torch.ones(2, dtype=torch.long)} for _ in range(batch)]
    return [torch.rand(3, 8, 8) for _ in range(batch)], targets


def test_lists_with_an_item_a_sample_are_counted_and_cut_by_items():
    images, targets = lists(4)
    assert rows_of((images, targets)) == rows_of({"images": images, "targets": targets}) == 4
    assert rows_of(((images, targets), {})) == 4
    few, fewer = resize_batch((images, targets), 4, 2)
    assert few == images[:2] and fewer == targets[:2]
    assert len(resize_batch({"images": images, "targets": targets}, 4, 6)["targets"]) == 6
    batches = [torch.zeros(8, 3), torch.zeros(8, 2)]  # two inputs of eight samples each
    assert rows_of((batches, torch.zeros(8))) == 8
    assert resize_batch((batches, torch.zeros(8)), 8, 2)[0][1].shape == (2, 2)


def test_a_model_that_loops_over_samples_is_captured_by_modules():
    whole = capture(*stacked(4))
    first, other = two_captures(whole, lambda samples, method=None: capture(*stacked(samples), method=method))
    assert whole.capture["method"] == "export" and {first.capture["method"], other.capture["method"]} == {"module"}
    assert first.op_names == other.op_names and (first.samples, other.samples) == (4, 2)
    assert float(first.op_flops.sum()) == pytest.approx(float(whole.op_flops.sum()), rel=1e-2)


@pytest.mark.slow
def test_lists_of_images_are_planned_as_strategies_and_as_groups():
    def loss(output):
        return sum(output.values())

    plan = rlplace.place(Detector(), "cpu:2", example_inputs=lists(4), batch=12, loss=loss, space="pipeline=1", calls=9)
    assert plan.strategy.batch == 12
    plan = rlplace.place(Detector(), "cpu:2", example_inputs=lists(4), loss=loss, space="placement", calls=9, time_limit_s=None)
    assert plan.strategy is None and plan.predicted.step_time_s > 0


@pytest.mark.slow
def test_a_plan_by_modules_is_captured_so_again(tmp_path):
    path = tmp_path / "p.plan.json"
    assert (
        main(["place", f"{__file__}:stacked", "--cluster", "cpu:2", "--batch", "8", "--calls", "20", "--out", str(path)]) == 0
    )
    plan = PlacementPlan.load(path)
    assert plan.source["capture"]["method"] == "module"
    assert Planned(plan).search_problem.batch == 8


class Sorted(nn.Module):
    """Gives each expert the tokens that chose it, as a list of parts whose sizes are values."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        parts = x[chosen.argsort()].split([int(size) for size in chosen.bincount(minlength=2).tolist()])
        return sum(expert(part).square().sum() for expert, part in zip(self.experts, parts, strict=True))


def test_parts_whose_sizes_are_values_share_all_tokens():
    """Eight tokens: four of 2 x 4 x 4 FLOPs to either expert, eight of 2 x 4 x 2 to the router."""
    graph = capture(Sorted(), (torch.rand(8, 4),))
    flops = {
        name: float(graph.op_flops[graph.op_names.index(f"{name}/forward")]) for name in ("router", "experts.0", "experts.1")
    }
    assert graph.capture["method"] == "module" and flops == {"router": 128.0, "experts.0": 128.0, "experts.1": 128.0}


class Strided(nn.Module):
    """Pads by numbers that it keeps in buffers: of 13 positions, strided by 4, the last part is filled up to 16."""

    def __init__(self, persistent=False):
        super().__init__()
        self.layer = nn.Conv1d(6, 8, 4, stride=4)
        self.register_buffer("stride", torch.tensor(4), persistent=persistent)

    def forward(self, x):
        frames = torch.ceil(x.shape[-1] / self.stride)
        return self.layer(F.pad(x, (0, int(frames * self.stride) - x.shape[-1]))).square().mean()


def test_whole_numbers_in_buffers_are_known_unless_a_checkpoint_may_change_them():
    for method in (None, "dispatch"):
        graph = capture(Strided(), {"x": torch.randn(2, 6, 13)}, method=method)
        (product,) = (op for op, name in enumerate(graph.op_target) if "convolution" in name and not graph.op_phase[op])
        assert graph.op_flops[product] == 2 * (2 * 8 * 4) * (6 * 4)  # 4 frames of 2 samples, 6 channels by 4 positions each
    with pytest.raises(CaptureError, match="reads a value"):
        capture(Strided(persistent=True), {"x": torch.randn(2, 6, 13)}, method="dispatch")
