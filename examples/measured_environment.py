"""An environment whose reward is the real step time, on the processes of a job.

    torchrun --nproc-per-node 2 examples/measured_environment.py

Rank 0 holds the environment and asks for plans; every rank runs their steps. Put any learner that speaks gymnasium in the
place of the shipped agent's network.
"""

import gymnasium
import torch
import torch.distributed as dist

import rlplace
from rlplace.envs import MeasuredBackend
from rlplace.runtime.distributed.job.live import open_service
from rlplace.zoo import load_model

MODEL, EPISODES = "zoo:moe_toy,width=64,layers=2,experts=4", 4

torch.set_num_threads(1)
dist.init_process_group("gloo")
device, rank = torch.device("cpu"), dist.get_rank()
loaded = load_model(MODEL, batch=8, device="cpu")
problem = None
if rank == 0:
    graph = rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss)
    problem = rlplace.price(graph, f"cpu:{dist.get_world_size()}", groups=12)
service = open_service(loaded, problem, device)
if rank != 0:
    service.serve()
else:
    measured = []

    def measure(plan):
        """Seconds of a step of the plan."""
        measured.append(service(plan).median_s)
        return measured[-1]

    env = gymnasium.make("rlplace/Refinement-v0", problems=[problem], backend=MeasuredBackend(measure), moves=24, max_moves=6)
    network = rlplace.load_agent().checkpoint.network
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=episode)
        over, total = False, 0.0
        while not over:
            mask = torch.from_numpy(env.unwrapped.action_masks())
            candidates = torch.from_numpy(observation["candidates"]).reshape(len(mask), -1)
            with torch.no_grad():
                logits, _ = network.scores(candidates)
            action = torch.distributions.Categorical(logits=logits.masked_fill(~mask, -torch.inf)).sample()
            observation, reward, over, _, info = env.step(int(action))
            total += reward
        print(f"episode {episode}: reward {total:.3f}, best plan {1e3 * info['step_time_s']:.2f} ms", flush=True)
    print(f"{len(measured)} plans measured, the fastest takes {1e3 * min(measured):.2f} ms")
    service.release()
dist.barrier()  # nobody leaves while another still listens
dist.destroy_process_group()
