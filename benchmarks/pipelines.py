"""Schedules, recomputation and the weight-gradient split on a Llama of 16 equal layers: predicted step time and peak memory.

    python benchmarks/pipelines.py [--devices 4] [--microbatches 8]

One stage a device for gpipe, 1f1b and interleaved_zero_bubble; two for the others, in a loop or a v. All schedules
run the same problem, priced with weight gradients apart, on the reference executor.
"""

import argparse

import numpy as np

import rlplace
from benchmarks.chain_order import schedule_order
from benchmarks.recompute import recompute
from rlplace.schedule import FREE_SCHEDULES, SCHEDULES, V
from rlplace.simulator import default_priority
from rlplace.simulator.reference import simulate_reference
from rlplace.zoo import load_model

MODEL = (
    "hf:llama,num_hidden_layers=16,hidden_size=1024,intermediate_size=2816,num_attention_heads=16,"
    "num_key_value_heads=16,vocab_size=8192"
)


def cut(problem, parts):
    """Int [G], contiguous parts of the groups with nearly equal time, in forward order."""
    done = np.cumsum(problem.group_time_s[:, 0])
    return np.minimum(parts * (done - problem.group_time_s[:, 0] / 2) / done[-1], parts - 1).astype(np.int32)


def layer_segments(problem, layers):
    """The groups of so many layers in turn, in order."""
    found = {}
    for group, name in enumerate(problem.group_names):
        number = next((int(part) for part in name.partition("#")[0].split(".") if part.isdigit()), None)
        if number is not None:
            found.setdefault(number // layers, []).append(group)
    return list(found.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    model = load_model(MODEL, batch=2, seq=512, dtype="bf16")
    graph = rlplace.capture(model.module, model.example_inputs)
    devices, count = args.devices, args.microbatches
    problem = rlplace.price(graph, f"a100-80g:{devices}", weight_gradients=True)
    work = problem.time_s[:, 0]
    once = work[problem.op_phase == 3].sum()
    ideal = (work.sum() - once) * count / devices + once / devices
    print(
        f"{problem.num_groups} groups, {count} micro-batches, {devices} devices; no bubble, no transfers: {ideal * 1e3:.2f} ms"
    )
    print(f"{'schedule':23s} {'step ms':>8s} {'over ideal':>10s}  peak GB")
    for name, schedule, parts in (
        ("gpipe", "gpipe", 1),
        ("1f1b", "1f1b", 1),
        ("1f1b, torch's list", "1f1b", 1),
        ("list", "list", 1),
        ("looped_bfs", "looped_bfs", 2),
        ("interleaved_1f1b", "interleaved_1f1b", 2),
        ("interleaved_zero_bubble", "interleaved_zero_bubble", 1),
        ("zbv", "zbv", 2),
        ("dualpipev", "dualpipev", 2),
    ):
        stages = cut(problem, parts * devices)
        order = np.arange(devices)
        device = np.concatenate([order, order[::-1] if SCHEDULES[schedule].layout == V else order][:parts])[stages]
        how = {"schedule": schedule, "stage_of_group": stages}
        if name.endswith("'s list") or schedule not in FREE_SCHEDULES:
            how = {"order": schedule_order(problem, device, schedule, count, stages, default_priority(problem))}
        line = simulate_reference(problem, device, microbatches=count, **how)
        peaks = " ".join(f"{peak / 1e9:.2f}" for peak in line.peak_memory_bytes)
        print(f"{name:23s} {line.step_time_s * 1e3:8.2f} {line.step_time_s / ideal - 1:10.1%}  {peaks}")

    one = rlplace.price(graph, "a100-80g:1")
    base = simulate_reference(one, [0] * one.num_groups)
    held = one.resident_bytes.sum() + one.devices[0].reserved_bytes
    print(f"\n{'layers a segment':17s} {'step ms':>8s} {'activations GB':>15s}")
    print(f"{'none recomputed':17s} {base.step_time_s * 1e3:8.2f} {(base.peak_memory_bytes[0] - held) / 1e9:15.3f}")
    for layers in (1, 2, 4, 8, 16):
        line = simulate_reference(recompute(one, layer_segments(one, layers=layers)), [0] * one.num_groups)
        print(f"{layers:<17d} {line.step_time_s * 1e3:8.2f} {(line.peak_memory_bytes[0] - held) / 1e9:15.3f}")


if __name__ == "__main__":
    main()
