"""Unusual structures of modules, inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trials.parts import Feed, Lm, Made, perceptron, repeated, text


class _Dictionary(nn.Module):
    """Parts by name, called in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"head": nn.Linear(16, 1), "body": nn.Linear(16, 16), "stem": nn.Linear(8, 16)})
        self.scales = nn.ParameterDict({"stem": nn.Parameter(torch.ones(16)), "body": nn.Parameter(torch.tensor(0.5))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("stem", "body"):
            x = torch.relu(self.parts[name](x)) * self.scales[name]
        return self.parts["head"](x).square().mean()


def module_dict_and_scalars(batch: int = 8) -> Made:
    return _Dictionary(), {"x": torch.randn(batch, 8)}


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3))
        self.mix = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row, mix in zip(self.rows, self.mix, strict=True):
            x = x + mix.sigmoid() * row[0](x).tanh() + row[1](x).relu()
        return x.square().mean()


def nested_lists(batch: int = 8) -> Made:
    return _Nested(), {"x": torch.randn(batch, 8)}


class _Plainly(nn.Module):
    """Modules in a plain list, registered one by one under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(3)]
        for number, layer in enumerate(self.layers):
            self.add_module(f"layer_{number}", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def plain_list_of_modules(batch: int = 8) -> Made:
    return _Plainly(), {"x": torch.randn(batch, 8)}


class _Loose(nn.Module):
    """Parameters of the model itself, used between its blocks; a constant made on the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.scale = nn.Parameter(torch.zeros(1, 16)), nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks, self.head, self.ramp = nn.ModuleList(Feed(width=16) for _ in range(3)), nn.Linear(16, 2), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ramp is None:
            self.ramp = torch.linspace(0, 1, x.shape[-1])
        x = x + self.start + self.ramp
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x).square().mean()


def loose_parameters(batch: int = 8) -> Made:
    return _Loose(), {"x": torch.randn(batch, 16)}


def lower_half_frozen(batch: int = 8) -> Made:
    model = repeated(Feed, 4)
    model.token.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    return model, text(batch)


def lazy_modules(batch: int = 8) -> tuple[nn.Module, Any, Any]:
    return (
        nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(1)),
        (torch.randn(batch, 8),),
        lambda out: out.square().mean(),
    )


def inputs_before_weights(batch: int = 8) -> tuple[nn.Module, Any, Any]:
    x = torch.randn(batch, 8)
    return perceptron(8, 16, 16, 2), {"input": x}, lambda out: out.square().mean()


@dataclass
class _Out:
    logits: torch.Tensor
    loss: torch.Tensor


class _Pair(NamedTuple):
    loss: torch.Tensor
    hidden: torch.Tensor


class _Returns(nn.Module):
    """Returns its loss beside its logits in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.stem = form, nn.Linear(8, 16)
        self.blocks, self.head = nn.ModuleList(Feed(width=16) for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits, y)
        forms = {
            "tuple": lambda: (loss, logits, None),
            "dataclass": lambda: _Out(logits, loss),
            "named": lambda: _Pair(loss, x),
            "dictionary": lambda: {
                "metrics": {"accuracy": (logits.argmax(-1) == y).float().mean()},
                "loss": loss,
                "logits": [logits, x],
            },
        }
        return forms[self.form]()


def _returns(form: str, batch: int) -> Made:
    return _Returns(form), {"x": torch.randn(batch, 8), "y": torch.randint(0, 4, (batch,))}


def tuple_output(batch: int = 8) -> Made:
    return _returns("tuple", batch)


def dataclass_output(batch: int = 8) -> Made:
    return _returns("dataclass", batch)


def named_tuple_output(batch: int = 8) -> Made:
    return _returns("named", batch)


def nested_output(batch: int = 8) -> Made:
    return _returns("dictionary", batch)


class _Options(nn.Module):
    """Numbers, nothing, a flag and nested tensors as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 16), nn.Linear(4, 16)
        self.blocks, self.head = nn.ModuleList(Feed(width=16) for _ in range(2)), nn.Linear(16, 1)

    def forward(
        self, parts: dict[str, torch.Tensor], power: int, rate: float, mask: torch.Tensor | None = None, square: bool = True
    ) -> torch.Tensor:
        x = self.left(parts["left"]) + rate * self.right(parts["right"])
        for block in self.blocks:
            x = block(x)
        y = self.head(x)[:, 0] if mask is None else self.head(x)[:, 0] * mask
        return (y**power).mean() if square else y.mean()


def numbers_and_nothing_as_inputs(batch: int = 8) -> Made:
    parts = {"left": torch.randn(batch, 6), "right": torch.randn(batch, 4)}
    return _Options(), {"parts": parts, "power": 2, "rate": 0.5, "mask": None, "square": True}


class _Positional(Lm):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, *, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        logits = self.logits(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * scale, logits


def positional_inputs(batch: int = 8) -> Made:
    return _Positional([Feed(), Feed()]), tuple(text(batch).values())


class _Shared(nn.Module):
    """A constant input for all samples, as long as the batch is: a table of eight rows."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        read = (x @ self.key(table).T).softmax(-1) @ self.value(table)
        return self.head(read).square().mean()


def table_as_long_as_the_batch(batch: int = 8) -> Made:
    return _Shared(), {"x": torch.randn(batch, 8), "table": torch.randn(8, 4)}


class _Branches(nn.Module):
    """Branches side by side, and a switch by a number of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.head, self.calls = nn.ModuleList(perceptron(8, 24, 8) for _ in range(4)), nn.Linear(32, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([branch(x) for branch in self.branches], -1)).square().mean()


def branches(batch: int = 8) -> Made:
    return _Branches(), {"x": torch.randn(batch, 8)}


class _Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.double()).float().tanh()).square().mean()


def unlike_dtypes(batch: int = 8) -> Made:
    return _Double(), {"x": torch.randn(batch, 8)}


def forward_replaced_from_outside(batch: int = 8) -> Made:
    """Returns a patch of a method of one object, which a copy of the object would share."""
    model = _Nested()
    layer = model.rows[1][0]
    layer.forward = lambda x: F.linear(x, 2 * layer.weight, layer.bias)  # type: ignore[method-assign]
    return model, {"x": torch.randn(batch, 8)}
