"""What a training loop hands over."""

import pytest
import torch

from rlplace.errors import InputError
from rlplace.runtime.distributed.execution.batches import check_inputs


def test_inputs_that_require_a_gradient_are_refused():
    check_inputs((((torch.ones(2),), {"scale": 2.0}),))
    with pytest.raises(InputError, match="an input requires a gradient"):
        check_inputs((((), {"input": torch.ones(2, requires_grad=True)}),))
