"""Predicted against measured training step time on the CPU, after calibration on other models.

    python -m benchmarks.calibrate [--folder calibration] [--repeats 15] [--time-limit 30]

Every model is measured by ``rlplace measure --ops --step`` in a process of its own; files that are there already are kept, so
the run can be resumed. Then ``rlplace calibrate`` fits the models of the first list, and each model of the second list is
captured, priced with the table that came out and simulated on one device. Nothing of the second list enters the fit.

float32, Adam, one torch thread, about 10 minutes on two idle cores. Measured is the median wall time of the steps that kept the
processor, or the thread's processor time when most did not; the column ``kept`` says how many did. `benchmarks.gpu` is the same
for a CUDA device.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rlplace
from benchmarks.harness import arguments, markdown, one_thread
from rlplace.cost.timings import Measurement
from rlplace.model.zoo import load_model

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


def run(*words: str) -> None:
    """Runs the command line in a process of its own."""
    print("rlplace", *words, file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "rlplace.cli.main", *words], check=True, stdout=sys.stderr)


def predict(file: Path, spec: str, batch: int, seq: int, table: Path) -> list[str]:
    """Prices a model with calibrated costs: measured and predicted step, and how much was measured of it."""
    cluster, step = rlplace.Cluster.detect(), Measurement.load(file).step
    assert step is not None
    model = load_model(spec, batch=batch, seq=seq, dtype="fp32")
    graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss, name=model.name)
    problem = rlplace.price(graph, cluster, level="op", costs=str(table))
    predicted_s = rlplace.simulate(problem, [0] * problem.num_groups).step_time_s
    seen = problem.source["op_times"][cluster.kinds[0].name].get("measured", 0.0)
    spread = f"{1e3 * step.p10_s:.1f}..{1e3 * step.p90_s:.1f}"
    error = f"{100 * (predicted_s / step.quiet_s - 1):+.1f}"
    kept = f"{step.undisturbed}/{step.repeats}"
    return [f"{1e3 * step.quiet_s:.1f}", spread, kept, f"{1e3 * predicted_s:.1f}", error, f"{100 * seen:.0f}"]


if __name__ == "__main__":
    options = arguments(
        __doc__,
        folder=(Path("calibration"), "of the measurements"),
        repeats=(15, "of a step"),
        time_limit=(30.0, "seconds of timing a model"),
    )
    one_thread()
    options.folder.mkdir(parents=True, exist_ok=True)
    files = {name: options.folder / f"{name}.measure.json" for name in {**FIT, **PREDICT}}
    for name, (spec, batch, seq) in {**FIT, **PREDICT}.items():
        sizes = ["--batch", str(batch), "--seq", str(seq), "--dtype", "fp32", "--device", "cpu", "--threads", "1"]
        limits = ["--repeats", str(options.repeats), "--time-limit", str(options.time_limit)]
        if not files[name].exists():
            run("measure", spec, "--ops", "--step", "--out", str(files[name]), *sizes, *limits)
    costs = options.folder / "host.cost.json"
    run("calibrate", *[str(files[name]) for name in FIT], "--out", str(costs))
    rows = [[name, *predict(files[name], *model, costs)] for name, model in PREDICT.items()]
    print(markdown(["model", "measured ms", "p10..p90", "kept", "predicted ms", "error %", "seen %"], rows))
