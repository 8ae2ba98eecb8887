"""Predicted against measured training step time (and memory on a GPU), after calibration on other models.

Usage: python benchmarks/calibrate.py [--folder calibration] [--device cpu|cuda:0] [--repeats 15] [--time-limit 30]

Every model is measured by ``rlplace measure --ops --step`` in a process of its own; files that are there already are kept, so
the run can be resumed. Then ``rlplace calibrate`` fits the models of the first list, and each model of the second list is
captured, priced with the table that came out and simulated on one device. Nothing of the second list enters the fit.

On the CPU: float32, Adam, one torch thread, about 10 minutes on two idle cores. Measured is the median wall time of the steps
that kept the processor, or the thread's processor time when most did not; the column ``kept`` says how many did.

On a CUDA device: float32 and bfloat16, calibrated on gpt2, bert, resnet and a llama of 1B parameters, predicted for four other
models; memory is ``torch.cuda.max_memory_allocated`` against the simulated peak without the context. This part has not been run
on hardware yet.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

CPU_FIT = {
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
CPU_PREDICT = {
    "gpt2": ("hf:gpt2,n_layer=4,n_embd=512,n_head=8,vocab_size=8000", 4, 128),
    "bart": (
        "hf:bart,d_model=640,encoder_layers=2,decoder_layers=2,encoder_ffn_dim=1920,decoder_ffn_dim=1920,"
        "encoder_attention_heads=10,decoder_attention_heads=10,vocab_size=7000", 3, 80,
    ),
    "resnet": ("hf:resnet", 4, 1),
    "lstm-512": ("zoo:lstm,vocab=4000,width=512,layers=2", 8, 64),
    "swin": ("hf:swin", 1, 1),
}  # fmt: skip

_QWEN = "hf:qwen2,hidden_size=896,intermediate_size=4864,num_hidden_layers=24,num_attention_heads=14,num_key_value_heads=2"
_LLAMA = "hf:llama,hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,num_attention_heads=32,num_key_value_heads=8"
GPU_FIT = {
    "gpt2": ("hf:gpt2", 8, 512),
    "bert": ("hf:bert", 16, 512),
    "resnet": ("hf:resnet", 64, 1),
    "llama-1b": (_LLAMA, 2, 1024),
}
GPU_PREDICT = {
    "gpt2-medium": ("hf:gpt2,n_layer=24,n_embd=1024,n_head=16", 4, 512),
    "distilbert": ("hf:distilbert", 32, 256),
    "regnet": ("hf:regnet", 64, 1),
    "qwen2-0.5b": (_QWEN, 4, 512),
}


def main() -> None:
    """Measures what is missing, calibrates, predicts, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("calibration"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of timing a model")
    parser.add_argument("--dtypes", default=None, help="fp32 on the cpu, fp32,bf16 elsewhere")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.folder.mkdir(parents=True, exist_ok=True)
    cpu = options.device == "cpu"
    fit, predict = (CPU_FIT, CPU_PREDICT) if cpu else (GPU_FIT, GPU_PREDICT)
    dtypes = (options.dtypes or ("fp32" if cpu else "fp32,bf16")).split(",")
    for dtype in dtypes:
        for name, model in {**fit, **predict}.items():
            measure(options, name, model, dtype)
    table = options.folder / "host.cost.json"
    files = [str(file_of(options, name, dtype)) for dtype in dtypes for name in fit]
    run("calibrate", *files, "--out", str(table))
    print()
    for dtype in dtypes:
        report(options, predict, dtype, table)


def file_of(options: argparse.Namespace, name: str, dtype: str) -> Path:
    return options.folder / f"{name}-{dtype}.measure.json"


def measure(options: argparse.Namespace, name: str, model: tuple[str, int, int], dtype: str) -> None:
    spec, batch, seq = model
    out = file_of(options, name, dtype)
    if out.exists():
        return
    sizes = ["--batch", str(batch), "--seq", str(seq), "--dtype", dtype]
    limits = ["--repeats", str(options.repeats), "--time-limit", str(options.time_limit)]
    threads = ["--threads", "1"] if options.device == "cpu" else []
    run(
        "measure", spec, "--ops", "--step", "--device", options.device, "--out", str(out), *sizes, *limits, *threads, quiet=True
    )


def run(*arguments: str, quiet: bool = False) -> None:
    command = [sys.executable, "-m", "rlplace.cli.main", *arguments]
    print("rlplace", *arguments, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if quiet else None)


def report(options: argparse.Namespace, models: dict[str, tuple[str, int, int]], dtype: str, table: Path) -> None:
    import rlplace
    from rlplace.cli.common import print_table
    from rlplace.cost.measurement import Measurement
    from rlplace.zoo import load_model

    cluster = rlplace.Cluster.detect()
    header = [
        f"model ({dtype})",
        "measured ms",
        "p10..p90",
        "kept",
        "predicted ms",
        "error %",
        "seen %",
        "peak MB",
        "predicted MB",
    ]
    rows = []
    for name, (spec, batch, seq) in models.items():
        measurement = Measurement.load(file_of(options, name, dtype))
        assert measurement.step is not None
        model = load_model(spec, batch=batch, seq=seq, dtype=dtype)
        graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss, name=model.name)
        problem = rlplace.price(graph, cluster, level="op", costs=str(table))
        line = rlplace.simulate(problem, [0] * problem.num_groups)
        basis = problem.source["op_times"][cluster.kinds[0].name]
        step, seconds, predicted = measurement.step, measurement.step.quiet_s, line.step_time_s
        rows.append(
            [
                name,
                f"{1e3 * seconds:.1f}",
                f"{1e3 * step.p10_s:.1f}..{1e3 * step.p90_s:.1f}",
                f"{step.undisturbed}/{step.repeats}",
                f"{1e3 * predicted:.1f}",
                f"{100 * (predicted / seconds - 1):+.1f}",
                f"{100 * basis.get('measured', 0.0):.0f}",
                "-" if step.peak_memory_bytes is None else f"{step.peak_memory_bytes / 1e6:.0f}",
                f"{(line.peak_memory_bytes[0] - problem.devices[0].reserved_bytes) / 1e6:.0f}",
            ]
        )
    print_table(header, rows)


if __name__ == "__main__":
    main()
