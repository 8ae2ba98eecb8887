"""Capture: method, ops and seconds per model type, and whole-process CPU time and memory of 8B and 70B steps.

python -m benchmarks.capture [SPEC ...]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from benchmarks.harness import arguments

TYPES = (
    "gpt2", "bert", "distilbert", "llama", "mistral", "qwen2", "mixtral", "t5", "bart", "whisper", "vit", "swin", "convnext",
    "resnet", "mamba", "deberta-v2",
)  # fmt: skip
ZOO = ("lstm", "transformer", "inception", "dlrm", "moe_toy", "mlp", "nasnet", "unet")
LLAMA = "hf:llama,vocab_size=128256,num_key_value_heads=8,max_position_embeddings=8192"
LARGE = {
    "llama-8B": f"{LLAMA},hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32",
    "llama-70B": f"{LLAMA},hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,num_attention_heads=64",
    "mixtral-47B": "hf:mixtral",
}


def capture_one(name: str, spec: str, batch: int, seq: int) -> None:
    """Captures in this process and prints one row; seconds are of this process's CPU."""
    import torch

    from rlplace.model.capture.capture import capture
    from rlplace.model.zoo import load_model

    torch.set_num_threads(1)
    start = time.process_time()
    model = load_model(spec, batch=batch, seq=seq)
    loaded = time.process_time()
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    done = time.process_time()
    forward, backward = (graph.op_flops[graph.op_phase == phase].sum() / 1e12 for phase in (0, 1))
    weights = sum(p.size_bytes for p in graph.parameters) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{name:18s} {graph.capture['method']:8s} {graph.num_ops:6d} ops {graph.num_tensors:6d} tensors"
        f"  load {loaded - start:5.1f} s  capture {done - loaded:6.1f} s  process {done:6.1f} s {peak:5.2f} GB"
        f"  weights {weights:7.2f} GB  TFLOP {forward:9.3f} + {backward:9.3f}  notes {len(graph.capture['notes'])}",
        flush=True,
    )


def main() -> None:
    """Captures every model in a process of its own, so that time and peak memory are those of one, imports included."""
    options = arguments(
        __doc__, "specs", batch=(8, "samples"), seq=(512, "positions"), one=("", "used inside: the name of the one to capture")
    )
    if options.one:
        return capture_one(options.one, options.specs[0], options.batch, options.seq)
    every = {**{f"hf:{t}": f"hf:{t}" for t in TYPES}, **{f"zoo:{n}": f"zoo:{n}" for n in ZOO}, **LARGE}
    for name, spec in ({spec: spec for spec in options.specs} or every).items():
        words = [spec, "--one", name, "--batch", str(options.batch), "--seq", str(options.seq)]
        if subprocess.run([sys.executable, "-m", "benchmarks.capture", *words], check=False).returncode:
            print(f"{name:18s} failed", flush=True)


if __name__ == "__main__":
    main()
