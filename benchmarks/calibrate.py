"""Predicted against measured training step time on the CPU, after calibration on other models.

Usage: python benchmarks/calibrate.py [--folder calibration] [--repeats 15] [--time-limit 30]

Every model is measured by ``rlplace measure --ops --step`` in a process of its own; files that are there already are kept, so
the run can be resumed. Then ``rlplace calibrate`` fits the models of the first list, and each model of the second list is
captured, priced with the table that came out and simulated on one device. Nothing of the second list enters the fit.

float32, Adam, one torch thread, about 10 minutes on two idle cores. Measured is the median wall time of the steps that kept the
processor, or the thread's processor time when most did not; the column ``kept`` says how many did. `benchmarks.gpu` is the same
for a CUDA device.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FIT = {
    "bert": ("hf:bert,num_hidden_layers=3,hidden_size=384,num_attention_heads=6,intermediate_size=1536,vocab_size=6000", 4, 96),
    "gpt2-small": ("hf:gpt2,n_layer=3,n_embd=256,n_head=4,vocab_size=12000", 4, 160),
    "vit": ("hf:vit,num_hidden_layers=4", 2, 1),
    "convnext": ("hf:convnext", 1, 1),
    "t5": ("hf:t5,num_layers=2,vocab_size=8000", 4, 64),
    "mlp": ("zoo:mlp", 64, 1),
    "dlrm": ("zoo:dlrm,rows=5000", 256, 1),
    "lstm-384": ("zoo:lstm,vocab=6000,width=384,layers=2", 8, 48),
    "lstm-640": ("zoo:lstm,vocab=2000,width=640,layers=2", 16, 32),
    "unet": ("zoo:unet,image=64", 2, 1),
    "inception": ("zoo:inception,image=96", 4, 1),
    "mobilenet": ("hf:mobilenet_v2", 4, 1),
    "regnet": ("hf:regnet", 2, 1),
}
PREDICT = {
    "gpt2": ("hf:gpt2,n_layer=4,n_embd=512,n_head=8,vocab_size=8000", 4, 128),
    "bart": (
        "hf:bart,d_model=640,encoder_layers=2,decoder_layers=2,encoder_ffn_dim=1920,decoder_ffn_dim=1920,"
        "encoder_attention_heads=10,decoder_attention_heads=10,vocab_size=7000", 3, 80,
    ),
    "resnet": ("hf:resnet", 4, 1),
    "lstm-512": ("zoo:lstm,vocab=4000,width=512,layers=2", 8, 64),
    "swin": ("hf:swin", 1, 1),
}  # fmt: skip


def main() -> None:
    """Measures what is missing, calibrates, predicts, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("calibration"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of timing a model")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, model in {**FIT, **PREDICT}.items():
        measure(options, name, model)
    table = options.folder / "host.cost.json"
    run("calibrate", *[str(file_of(options, name)) for name in FIT], "--out", str(table))
    print()
    report(options, table)


def file_of(options: argparse.Namespace, name: str) -> Path:
    return options.folder / f"{name}.measure.json"


def measure(options: argparse.Namespace, name: str, model: tuple[str, int, int]) -> None:
    spec, batch, seq = model
    out = file_of(options, name)
    if out.exists():
        return
    sizes = ["--batch", str(batch), "--seq", str(seq), "--dtype", "fp32", "--device", "cpu", "--threads", "1"]
    limits = ["--repeats", str(options.repeats), "--time-limit", str(options.time_limit)]
    run("measure", spec, "--ops", "--step", "--out", str(out), *sizes, *limits, quiet=True)


def run(*arguments: str, quiet: bool = False) -> None:
    command = [sys.executable, "-m", "rlplace.cli.main", *arguments]
    print("rlplace", *arguments, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if quiet else None)


def report(options: argparse.Namespace, table: Path) -> None:
    import rlplace
    from rlplace.cli.output import print_table
    from rlplace.cost.timings import Measurement
    from rlplace.model.zoo import load_model

    cluster = rlplace.Cluster.detect()
    rows = []
    for name, (spec, batch, seq) in PREDICT.items():
        step = Measurement.load(file_of(options, name)).step
        assert step is not None
        model = load_model(spec, batch=batch, seq=seq, dtype="fp32")
        graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss, name=model.name)
        problem = rlplace.price(graph, cluster, level="op", costs=str(table))
        predicted_s = rlplace.simulate(problem, [0] * problem.num_groups).step_time_s
        seen = problem.source["op_times"][cluster.kinds[0].name].get("measured", 0.0)
        rows.append(
            [
                name,
                f"{1e3 * step.quiet_s:.1f}",
                f"{1e3 * step.p10_s:.1f}..{1e3 * step.p90_s:.1f}",
                f"{step.undisturbed}/{step.repeats}",
                f"{1e3 * predicted_s:.1f}",
                f"{100 * (predicted_s / step.quiet_s - 1):+.1f}",
                f"{100 * seen:.0f}",
            ]
        )
    print_table(["model", "measured ms", "p10..p90", "kept", "predicted ms", "error %", "seen %"], rows)


if __name__ == "__main__":
    main()
