"""What torch's foreach update holds beside the resident bytes."""

import dataclasses

import numpy as np
import pytest

from rlplace.cli.main import main
from rlplace.cost.memory import foreach_update_bytes
from rlplace.plan import make_plan
from rlplace.problem.generate import random_problem


def adam_problem():
    """Four groups with 10 bytes of weights, 10 of gradients and 20 of Adam's moments each."""
    part = np.full(4, 10, dtype=np.int64)
    return dataclasses.replace(
        random_problem(0, 4, 4), weight_bytes=part, gradient_bytes=part, optimizer_bytes=2 * part, resident_bytes=4 * part
    )


@pytest.mark.parametrize(
    ("optimizer", "fields", "expected"),
    [
        ("adam", {}, [150, 50, 0, 0]),  # one more copy of the weights' size for each group
        ("momentum", {}, [120, 40, 0, 0]),  # holds none
        ("adam", {"replicas": [[0, 1], [2, 3]]}, [150, 50, 150, 50]),
        ("adam", {"replicas": [[0, 1], [2, 3]], "optimizer_sharding": True}, [105, 35, 105, 35]),
    ],
)
def test_by_hand(optimizer, fields, expected):
    problem = adam_problem()
    plan = make_plan(problem, [0, 0, 0, 1], planner="hand", **fields)
    reserved = [d.reserved_bytes if want else 0 for d, want in zip(problem.devices, expected, strict=True)]
    found = foreach_update_bytes(problem, plan, optimizer)
    assert (found - reserved).tolist() == expected


def test_place_says_when_only_the_update_does_not_fit(capsys, tmp_path):
    """134 M parameters in float32: 2.1 GB resident with Adam, 2.7 in a foreach update, on a card of 3 GB with 0.7 reserved."""
    path = tmp_path / "small.toml"
    text = """
        format = "rlplace.cluster"
        version = 1
        [[kind]]
        name = "small"
        like = "t4"
        memory_bytes = 3000000000
        reserved_bytes = 700000000
        [[device]]
        name = "gpu0"
        kind = "small"
        host = 0
    """
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    model = tmp_path / "wide.py"
    model.write_text(
        "import torch\n\ndef build(batch, **options):\n"
        "    net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)])\n"
        "    return net, (torch.zeros(batch, 4096),), lambda y: y.sum()\n"
    )
    code = main(["place", f"{model}:build", "--cluster", str(path), "--planner", "single", "--batch", "2"])
    assert code == 0
    assert "foreach update needs" in capsys.readouterr().err
