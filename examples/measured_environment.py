"""An environment whose reward is the real step time, on the processes of a job.

    torchrun --nproc-per-node 2 examples/measured_environment.py

Every process holds the same environment and takes the same steps, because all are seeded alike and get the same times. So all
ask for the same plans, whose steps they run together. Put any learner that speaks gymnasium in the place of the shipped agent's
network.
"""

import gymnasium
import torch
import torch.distributed as dist

import rlplace
from rlplace.envs import MeasuredBackend
from rlplace.model.zoo import load_model
from rlplace.runtime.job.measure import PlanTimer

MODEL, EPISODES = "zoo:moe_toy,width=64,layers=2,experts=4", 4

torch.set_num_threads(1)
dist.init_process_group("gloo")
device, first = torch.device("cpu"), dist.get_rank() == 0
torch.manual_seed(0)
loaded = load_model(MODEL, batch=8, device="cpu")
graph = rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss)
problem = rlplace.price(graph, f"cpu:{dist.get_world_size()}", groups=12)
timer = PlanTimer(loaded, device, warmup=1)
measured = []


def measure(plan):
    """Seconds of a step of the plan, the same on every process."""
    measured.append(timer(plan, problem).median_s)
    return measured[-1]


env = gymnasium.make("rlplace/Refinement-v0", problems=[problem], backend=MeasuredBackend(measure), moves=24, max_moves=6)
network = rlplace.load_agent().checkpoint.network
draws = torch.Generator().manual_seed(0)  # of this loop alone
for episode in range(EPISODES):
    observation, _ = env.reset(seed=episode)
    over, total = False, 0.0
    while not over:
        mask = torch.from_numpy(env.unwrapped.action_masks())
        with torch.no_grad():
            logits, _ = network.look({name: torch.as_tensor(value)[None] for name, value in observation.items()})
        chances = logits[0].masked_fill(~mask, -torch.inf).softmax(-1)
        action = torch.multinomial(chances, 1, generator=draws)
        observation, reward, over, _, info = env.step(int(action))
        total += reward
    if first:
        print(f"episode {episode}: reward {total:.3f}, best plan {1e3 * info['step_time_s']:.2f} ms", flush=True)
if first:
    print(f"{len(measured)} plans measured, the fastest takes {1e3 * min(measured):.2f} ms")
dist.destroy_process_group()
