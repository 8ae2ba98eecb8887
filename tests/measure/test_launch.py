"""Plans run by a command: what it measured, or how it ended."""

import os
import sys
import textwrap

import pytest

from rlplace.cluster.parse import parse
from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.errors import InputError
from rlplace.measure.session import launcher, local_command
from tests.runtime.equality import strategy_plan

CLUSTER = parse("t4:2")
ALONE = {"batch": 1, "microbatch": [1], "microbatches": [1], "stages": [{"blocks": ["a"], "devices": [0]}]}
PLAN = strategy_plan(ALONE)


def command(tmp_path, code):
    script = tmp_path / "job.py"
    script.write_text("import sys, time\nplan, timings = sys.argv[1:]\n" + textwrap.dedent(code))
    return f"{sys.executable} {script} {{plan}} {{timings}}"


def test_what_was_measured(tmp_path):
    room = CLUSTER.devices[0].memory_bytes - CLUSTER.devices[0].reserved_bytes
    peaks = (CLUSTER.devices[0].reserved_bytes + room // 2, None)
    timing = PlanTiming("a", PLAN.fingerprint, PLAN.problem, "strategy", "native", (0.5, 0.4, 0.6), (), 1.0, 0.3, peaks)
    PlanTimings("a", {}, (timing,)).save(tmp_path / "made.json")
    code = f"""
        assert '"rlplace.plan"' in open(plan).read()
        open(timings, "w").write(open({str(tmp_path / "made.json")!r}).read())
    """
    ended = launcher(command(tmp_path, code), CLUSTER)(PLAN)
    assert ended.status == "done" and ended.step_s == (0.5, 0.4, 0.6) and ended.share == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("print('torch.OutOfMemoryError: CUDA out of memory. Tried'); sys.exit(1)", "out_of_memory", "CUDA out of memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out_of_memory", "ended with"),
        ("raise ValueError('what is this')", "crashed", "what is this"),
        ("pass", "crashed", "timings cannot be read"),
        ("time.sleep(600)", "crashed", "more than 2 s"),
    ],
)
def test_how_it_ended(tmp_path, code, status, reason):
    ended = launcher(command(tmp_path, code), CLUSTER, timeout_s=2.0)(PLAN)
    assert ended.status == status and reason in ended.reason and "\n" not in ended.reason and not ended.step_s


def test_commands_that_cannot_work_are_refused():
    with pytest.raises(InputError, match=r"\{timings\}"):
        launcher("run {plan}", CLUSTER)
    with pytest.raises(InputError, match="--launch"):
        launcher("no-such-program {plan} {timings}", CLUSTER)(PLAN)
    with pytest.raises(InputError, match="several hosts"):
        local_command(parse("t4:2x1"))
    assert "--nproc-per-node=2" in local_command(CLUSTER)


@pytest.mark.slow
def test_a_run_out_of_time_leaves_no_process(tmp_path):
    """torchrun puts its processes into sessions of their own, where a signal to its group does not reach them."""
    script, told = tmp_path / "job.py", tmp_path / "pid"
    script.write_text(f"import os, time\nopen({str(told)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=1"
    ended = launcher(f"{torchrun} {script} {{plan}} {{timings}}", CLUSTER, timeout_s=25.0)(PLAN)
    assert ended.status == "crashed" and told.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
