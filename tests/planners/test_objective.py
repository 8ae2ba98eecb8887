"""One objective: what fits first, then time; of what does not fit, what is short of less memory."""

import itertools
import math

import pytest

from rlplace.compiled import entry
from rlplace.envs.reward import infeasible_reward, log_ratio, score
from rlplace.planners.common.evaluate import Score
from rlplace.planners.common.objective import objective_s

# From best to worst: (step time, overflow).
ORDER = [(1e-9, 0.0), (2.0, 0.0), (1e6, 0.0), (1e6, 1e-9), (1e-9, 0.02), (5.0, 0.5), (1e-9, 40.0), (math.inf, 0.0)]


def test_the_order_of_plans():
    values = [objective_s(*outcome) for outcome in ORDER]
    assert values == sorted(set(values)) == [Score(*outcome).objective_s for outcome in ORDER]
    assert objective_s(math.inf, 3.0) == math.inf and objective_s(2.0, 0.0) == 2.0


def test_compiled_loops_use_the_same_function():
    from rlplace.planners.annealing.kernels import _objective_s

    @entry
    def compiled(step_s, overflow):
        return _objective_s(step_s, overflow)

    assert [compiled(*outcome) for outcome in ORDER] == [objective_s(*outcome) for outcome in ORDER]


@pytest.mark.parametrize("reference_s", [1e-3, 1.0, 50.0])
def test_rewards_are_in_that_order_too(reference_s):
    scores = [score(*outcome, reference_s) for outcome in ORDER]
    assert scores == sorted(scores) and scores[-2] < scores[-1] == 20.0
    for (fits, _), (step_s, overflow) in itertools.product(ORDER[:2], ORDER[3:7]):
        assert log_ratio(fits, reference_s) > infeasible_reward(overflow) == -score(step_s, overflow, reference_s)
    assert log_ratio(reference_s / 2, reference_s) == pytest.approx(math.log(2.0))
