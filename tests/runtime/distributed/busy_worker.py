"""What `test_busy_steps.py` runs on every process."""

import numpy as np
import torch
from equal import build
from plans import plan_of

from rlplace.runtime import step_watch
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.events import Event

EVERY = 4


def watched(folder):
    """Trains under a watch with made-up events: device 1 computes twice as long from step 60 on."""
    model, inputs, loss = build("transformer", True)
    plan = plan_of(model, inputs, 2, loss=loss, deal="chain")
    placed = distribute(model, plan, inputs, loss=loss)
    rank = torch.distributed.get_rank()
    asked = []

    class Job:
        """Keeps what the background process would be asked."""

        most_s = 1e9

        def __init__(self, plan, problem, drift, **how):
            asked.append(how)
            self.process = self
            self.pid = 0

        def poll(self):
            return None

        def end(self):
            pass

    step_watch.ReplanJob = Job
    told = []
    watch = step_watch.StepWatch(plan, None, f"{folder}/run.steps.jsonl", report=told.append, model=placed, busy_every=EVERY)
    recorder, real = watch._probe._recorder, []
    take = recorder.take
    number = 0

    def made_up():
        real.extend(take())
        seconds = (0.1, 0.2 if number < 60 else 0.4)[rank]
        return [Event("forward", 0.0, seconds / 2), Event("wait", 0.0, 9.0), Event("backward", 0.0, seconds / 2)]

    recorder.take = made_up
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal(100))
    losses = []
    for number in range(100):
        if number in (0, 1):  # the real thing, which is timed as it runs
            watch.step_done(0.3)
            for _ in range(EVERY):
                with watch.step():
                    output = placed(**inputs)
                    value = output if loss is not None else output.loss
                    value.backward()
                    losses.append(float(value))
        watch.step_done(float((0.3 if number < 60 else 0.5) * noise[number]))
    kinds = sorted({event.kind for event in real})
    watch.close()
    return {"asked": asked, "kinds": kinds, "told": told, "losses": losses, "drifts": len(watch.drifts)}
