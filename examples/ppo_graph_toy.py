"""PPO with a graph network in one file of plain torch, in the manner of CleanRL, on ``rlplace/Toy-v0``.

    python examples/ppo_graph_toy.py                          ten minutes on two cores
    python examples/ppo_graph_toy.py --total-steps 40000      a look

The network passes messages over the graph of the groups, whose placed neighbours bring the features of their devices, and
scores every device for the group that is placed next. At the end it places problems that it never saw, beside `heft`; both
are compared with the optimum, which is known since all plans were tried.
"""

from __future__ import annotations

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import rlplace
from rlplace.envs import EDGE_FEATURES, NODE_FEATURES, Instance, PlacementEnv
from rlplace.envs.toy import UNSEEN, toy_instances
from rlplace.planners import get_planner

WIDTH, ROUNDS = 48, 2


class GraphPolicy(nn.Module):
    """Logits of devices and the value of a state. B states, G groups, D devices, E edges."""

    def __init__(self, groups: int, devices: int) -> None:
        super().__init__()
        self.groups, self.devices = groups, devices
        self.node = nn.Linear(len(NODE_FEATURES) + 2, WIDTH)
        self.send = nn.ModuleList(nn.Linear(WIDTH + len(EDGE_FEATURES), WIDTH) for _ in range(2 * ROUNDS))
        self.hear = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(ROUNDS))
        columns = len(PlacementEnv.FEATURES)
        self.device = nn.Sequential(nn.Linear(columns + 3 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.logit = nn.Linear(WIDTH, 1)
        self.value = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.prior = nn.Linear(columns, 1, bias=False)  # it begins as a list scheduler: the earliest finish
        nn.init.zeros_(self.prior.weight)
        nn.init.constant_(self.prior.weight[:, PlacementEnv.FEATURES.index("finish_delay")], -8.0)
        nn.init.orthogonal_(self.logit.weight, 0.01)
        nn.init.orthogonal_(self.value[2].weight, 1.0)

    def forward(self, seen: dict[str, Tensor], mask: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        """The distribution over legal devices, and values [B]."""
        batch, groups = len(mask), self.groups
        place = seen["device_of_group"].long()
        group = seen["candidate_group"].amax(1).long().clamp(min=0)
        here = nn.functional.one_hot(group, groups).float()
        nodes = seen["nodes"].reshape(batch, groups, -1)
        state = torch.tanh(self.node(torch.cat([nodes, (place >= 0).float().unsqueeze(2), here.unsqueeze(2)], dim=2)))
        edges = seen["edges"].reshape(batch, -1, 2).long()
        edges = edges[:, : max(1, int((edges[:, :, 0] >= 0).sum(1).max()))]  # the rest is padding
        real = (edges[:, :, 0] >= 0).float().unsqueeze(2)
        source, target = (edges[:, :, end].clamp(min=0).unsqueeze(2).expand(-1, -1, WIDTH) for end in range(2))
        size = seen["edge_features"].reshape(batch, -1, len(EDGE_FEATURES))[:, : edges.shape[1]]
        for number in range(ROUNDS):
            heard = [state]
            for way, (a, b) in enumerate(((source, target), (target, source))):
                told = torch.cat([state.gather(1, a), size], dim=2)
                message = torch.relu(self.send[2 * number + way](told)) * real
                heard.append(torch.zeros_like(state).scatter_add(1, b, message))
            state = state + torch.tanh(self.hear[number](torch.cat(heard, dim=2)))
        whole = state.mean(1)
        own = (state * here.unsqueeze(2)).sum(1)
        on_device = nn.functional.one_hot(place.clamp(min=0), self.devices).float() * (place >= 0).unsqueeze(2)
        resident = on_device.transpose(1, 2) @ state / groups
        table = seen["candidates"].reshape(batch, self.devices, -1)
        context = torch.cat([own, whole], dim=1)
        wide = context.unsqueeze(1).expand(-1, self.devices, -1)
        logits = (self.prior(table) + self.logit(self.device(torch.cat([table, resident, wide], dim=2)))).squeeze(2)
        return torch.distributions.Categorical(logits=logits.masked_fill(~mask, -1e9)), self.value(context).squeeze(1)


def tensors(seen: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Observations as tensors."""
    return {name: torch.from_numpy(value) for name, value in seen.items()}


def train(args: argparse.Namespace, instances: tuple[Instance, ...]) -> GraphPolicy:
    """Proximal policy optimisation (Schulman et al. 2017), as CleanRL's ppo.py has it."""
    sizes = {"max_groups": max(one.problem.num_groups for one in instances), "max_devices": 3}
    envs = gym.make_vec(
        "rlplace/Toy-v0", num_envs=args.num_envs, problems=instances, observation="full", autoreset_mode="SameStep", **sizes
    )
    policy = GraphPolicy(envs.single.max_groups, envs.single.max_devices)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, eps=1e-5)
    rows = args.num_steps * args.num_envs
    updates = max(1, args.total_steps // rows)
    seen, _ = envs.reset(seed=args.seed)
    over, begin, earned = torch.zeros(args.num_envs), time.monotonic(), []
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = (1.0 - update / updates) * args.learning_rate
        kept: dict[str, list[Tensor]] = {name: [] for name in ("mask", "action", "log_p", "value", "reward", "over")}
        looks: list[dict[str, Tensor]] = []
        for _ in range(args.num_steps):
            state, mask = tensors(seen), torch.from_numpy(envs.action_masks())
            with torch.no_grad():
                chances, value = policy(state, mask)
                action = chances.sample()
            looks.append(state)
            seen, reward, terminated, truncated, _ = envs.step(action.numpy())
            ended = terminated | truncated
            earned += reward[ended].tolist()
            won = torch.from_numpy(reward).float().clamp(min=-1.0)  # what does not fit is bad enough at that
            row = (mask, action, chances.log_prob(action), value, won, over)
            for name, item in zip(kept, row, strict=True):
                kept[name].append(item)
            over = torch.from_numpy(ended).float()
        with torch.no_grad():
            next_value = policy(tensors(seen), torch.from_numpy(envs.action_masks()))[1]
        values, advantage, last = kept["value"], [torch.zeros(0)] * args.num_steps, torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            goes_on = 1.0 - (over if t == args.num_steps - 1 else kept["over"][t + 1])
            after = next_value if t == args.num_steps - 1 else values[t + 1]
            delta = kept["reward"][t] + args.gamma * after * goes_on - values[t]
            last = advantage[t] = delta + args.gamma * args.gae_lambda * goes_on * last
        flat = {name: torch.cat(items) for name, items in kept.items()}
        look = {name: torch.cat([state[name] for state in looks]) for name in looks[0]}
        gains = torch.cat(advantage)
        returns = gains + flat["value"]
        for _ in range(args.update_epochs):
            for part in torch.randperm(rows).split(rows // args.num_minibatches):
                chances, value = policy({name: item[part] for name, item in look.items()}, flat["mask"][part])
                ratio = (chances.log_prob(flat["action"][part]) - flat["log_p"][part]).exp()
                gain = (gains[part] - gains[part].mean()) / (gains[part].std() + 1e-8)
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(gain * ratio, gain * clipped).mean()
                value_loss = 0.5 * (value - returns[part]).square().mean()
                loss = policy_loss - args.ent_coef * chances.entropy().mean() + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                optimizer.step()
        if update % 10 == 9 or update == updates - 1:
            pace = (update + 1) * rows / (time.monotonic() - begin)
            print(
                f"{(update + 1) * rows} steps, {pace:.0f} a second, reward of an episode {np.mean(earned[-1000:]):.4f}",
                flush=True,
            )
    envs.close()
    return policy


def place(policy: GraphPolicy, instances: tuple[Instance, ...]) -> list[float]:
    """Step time over the optimum's on each problem, the likeliest device taken; inf where the plan does not fit."""
    env = PlacementEnv(instances, observation="full", max_groups=policy.groups, max_devices=policy.devices)
    over = []
    for number in range(len(instances)):
        seen, _ = env.reset(seed=0, options={"problem": number})
        done = False
        while not done:
            one = {name: value[None] for name, value in tensors(seen).items()}
            with torch.no_grad():
                action = policy(one, torch.from_numpy(env.action_masks())[None])[0].probs.argmax()
            seen, _, done, _, info = env.step(int(action))
        over.append(info["vs_best_baseline"] if info["feasible"] else np.inf)
    return over


def heft(instance: Instance) -> float:
    """The same of the list scheduler."""
    try:
        plan = get_planner("heft")(instance.problem)
    except rlplace.InfeasibleError:
        return np.inf
    return plan.predicted.step_time_s / instance.reference_step_time_s


def main() -> None:
    """Trains, and says what it reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=400_000)
    parser.add_argument("--problems", type=int, default=512, help="to train on")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=1.0)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--clip-coef", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=0.005)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy = train(args, toy_instances(0, args.problems))
    unseen = toy_instances(UNSEEN, 64)
    ours, theirs = np.array(place(policy, unseen)), np.array([heft(instance) for instance in unseen])
    both = np.isfinite(ours) & np.isfinite(theirs)
    for name, over in (("the policy", ours), ("heft", theirs)):
        mean = np.exp(np.log(over[both]).mean())
        print(
            f"{name}: {mean:.3f} of the optimum on {both.sum()} unseen problems; {np.isfinite(over).sum()} of {len(over)} fit"
        )


if __name__ == "__main__":
    main()
