"""Swaps the algorithm: one environment, one network, and whatever learns.

Stock MaskablePPO with other hyperparameters, TRPO, which knows no masks, and PPO with SB3's own policy, which knows neither the
network nor the bank of graphs. Each learns for some seconds on small random problems; then the network that TRPO trained places
a problem as an agent. Rewards are what an episode takes off the log of the step time.
"""

from tempfile import TemporaryDirectory

import numpy as np
import torch
from sb3_contrib import TRPO, MaskablePPO
from stable_baselines3 import PPO

import rlplace
from rlplace.agents.checkpoint import save_checkpoint
from rlplace.agents.policy import PlacerPolicy, UnmaskedPlacerPolicy
from rlplace.envs import RefinementEnv, make_instance
from rlplace.problem.generate import random_problem

torch.set_num_threads(1)
problems = [random_problem(seed, num_groups=20, num_devices=4, shape="branchy") for seed in range(4)]
instances = [make_instance(problem) for problem in problems]  # once for all environments


def mean_reward(model, env, episodes=20):
    """Of episodes in which actions are drawn from the policy."""
    total = 0.0
    for seed in range(episodes):
        observation, done = env.reset(seed=seed)[0], False
        while not done:
            masks = {"action_masks": env.action_masks()} if isinstance(model, MaskablePPO) else {}
            action, _ = model.predict(observation, **masks)
            observation, reward, done, _, _ = env.step(int(action))
            total += reward
    return total / episodes


def learn(name, model, env, steps=1024):
    """Trains a model and says what it brings."""
    before = mean_reward(model, env)
    model.learn(steps)
    after = mean_reward(model, env)
    print(f"{name}: reward of an episode {before:.3f} before, {after:.3f} after {model.num_timesteps} decisions")
    return model


env = RefinementEnv(instances, start="greedy", max_moves=12)
network = {"features": RefinementEnv.FEATURES}
learn("MaskablePPO", MaskablePPO(PlacerPolicy, env, n_steps=512, learning_rate=1e-3, policy_kwargs=network, seed=0), env)
trpo = learn("TRPO", TRPO(UnmaskedPlacerPolicy, env, n_steps=512, target_kl=0.02, policy_kwargs=network, seed=0), env)

full = RefinementEnv(instances, start="greedy", max_moves=12, observation="full")
learn("PPO, SB3's policy", PPO("MultiInputPolicy", full, n_steps=512, learning_rate=1e-3, seed=0), full)

with TemporaryDirectory() as folder:
    save_checkpoint(folder, trpo.policy.network, training={}, card="Trained with TRPO.")
    plan = rlplace.load_agent(folder).place(problems[0], calls=256)
best = instances[0].reference_step_time_s
print(f"agent: step of {1e3 * plan.predicted.step_time_s:.2f} ms, best classical plan {1e3 * best:.2f} ms")
assert np.isfinite(plan.predicted.step_time_s)
