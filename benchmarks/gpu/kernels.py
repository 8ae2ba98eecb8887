"""Times single kernels as a training step meets them: inputs that are not in the cache, the device never waiting for the host.

A case's inputs are made several times over, until together they are larger than the cache, and used in turn. On a CUDA device
the calls are queued behind a sleeping kernel and timed by two events; on a processor by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import Case

CACHE_BYTES, MOST_COPIES = 120e6, 12
TARGET_S, SLEEP_HZ = 4e-3, 2e9

Call = Callable[[], Any]


def dtype_of(case: Case) -> torch.dtype:
    """Returns the operands' dtype."""
    return torch.float32 if case.dtype == "tf32" else getattr(torch, case.dtype)


def time_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Returns seconds of one call: the median and the least of three runs of many."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.dtype == "tf32"
    calls = [_make(case, device)]
    calls[0]()
    one_bytes = _held_bytes(device)
    while len(calls) < MOST_COPIES and len(calls) * one_bytes < CACHE_BYTES and device.type == "cuda":
        calls.append(_make(case, device))
    for call in calls:
        call()
    once = _run(calls, len(calls), device) / len(calls)
    count = int(min(60, max(4, TARGET_S / max(once, 1e-6))))
    runs = [_run(calls, count, device) / count for _ in range(3)]
    return {"seconds": statistics.median(runs), "least_s": min(runs), "calls": count, "copies": len(calls)}


_BASE_BYTES: dict[str, int] = {}


def _held_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 40
    return max(1, torch.cuda.memory_allocated(device) - _BASE_BYTES.get("base", 0))


def clear(device: torch.device) -> None:
    """Forgets tensors of earlier cases; what is still there is not counted as the next case's."""
    if device.type == "cuda":
        if torch.cuda.memory_reserved(device) > 40e9:
            torch.cuda.empty_cache()
        _BASE_BYTES["base"] = torch.cuda.memory_allocated(device)


def _run(calls: list[Call], count: int, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for number in range(count):
            calls[number % len(calls)]()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(SLEEP_HZ * (1e-3 + 150e-6 * count)))
    begin.record()
    for number in range(count):
        calls[number % len(calls)]()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def _make(case: Case, device: torch.device) -> Call:
    """Returns new random inputs, and what calls the kernel on them."""
    dims = case.dims

    def rand(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype_of(case)).requires_grad_(grad)

    if case.op in ("gemm", "bmm"):
        return _product(case, rand)
    if case.op == "conv":
        return _convolution(case, rand)
    if case.op == "attention":
        return _attention(case, rand)
    if case.direction == "update":
        return _update(case, rand)
    if case.op == "embedding":
        table = rand(dims["rows"], dims["columns"], grad=True)
        index = torch.randint(dims["rows"], (dims["rows"],), device=device)
        return _either(case, lambda: F.embedding(index, table), [table])
    shape = (dims["count"],) if "count" in dims else (dims["rows"], dims["columns"])
    value, other = rand(*shape, grad=True), rand(*shape)
    last = (shape[-1],)
    weight, bias = (rand(*last, grad=True), rand(*last, grad=True)) if "norm" in case.op else (None, None)
    empty = torch.empty_like(other)
    bodies: dict[str, tuple[Call, list[torch.Tensor]]] = {
        "layer_norm": (lambda: F.layer_norm(value, last, weight, bias), [value, weight, bias]),
        "rms_norm": (lambda: F.rms_norm(value, last, weight), [value, weight]),
        "softmax": (lambda: F.softmax(value, -1), [value]),
        "log_softmax": (lambda: F.log_softmax(value, -1), [value]),
        "sum": (lambda: value.sum(-1), [value]),
        "add": (lambda: torch.add(value.detach(), other), []),
        "mul": (lambda: torch.mul(value.detach(), other), []),
        "relu": (lambda: torch.relu(value.detach()), []),
        "gelu": (lambda: F.gelu(value), [value]),
        "silu": (lambda: F.silu(value), [value]),
        "dropout": (lambda: F.dropout(value, 0.1), [value]),
        "copy": (lambda: empty.copy_(other), []),
        "cast": (lambda: other.to(torch.bfloat16 if case.dtype == "float32" else torch.float32), []),
    }  # fmt: skip
    body, wanted = bodies[case.op]
    return _either(case, body, wanted)


def _either(case: Case, body: Call, wanted: list[torch.Tensor]) -> Call:
    """Returns the forward without autograd, or the backward alone."""
    if case.direction == "forward":
        return torch.no_grad()(body)
    value = body()
    gradient = torch.randn_like(value)
    return lambda: torch.autograd.grad(value, wanted, gradient, retain_graph=True)


def _product(case: Case, rand: Callable[..., torch.Tensor]) -> Call:
    """Lists the layouts of a linear layer: x wT, its input's gradient g w, its weight's gT x; m, n, k of the kernel."""
    dims = case.dims
    lead = (dims["batch"],) if "batch" in dims else ()
    m, n, k = dims["m"], dims["n"], dims["k"]
    if case.direction == "forward":
        left, right = rand(*lead, m, k), rand(*lead, n, k).transpose(-1, -2)
    elif case.direction == "backward":
        left, right = rand(*lead, m, k), rand(*lead, k, n)
    else:
        left, right = rand(*lead, k, m).transpose(-1, -2), rand(*lead, k, n)
    out = rand(*lead, m, n)
    return lambda: torch.matmul(left, right, out=out)


def _convolution(case: Case, rand: Callable[..., torch.Tensor]) -> Call:
    dims = case.dims
    x = rand(dims["batch"], dims["channels"], dims["image"], dims["image"], grad=True)
    w = rand(dims["filters"], dims["channels"], dims["kernel"], dims["kernel"], grad=True)
    return _either(case, lambda: F.conv2d(x, w, stride=dims["stride"], padding=dims["kernel"] // 2), [x, w])


def _attention(case: Case, rand: Callable[..., torch.Tensor]) -> Call:
    """Returns `causal` 0: all pairs, 1: by the flag, 2: by a mask of the same dtype."""
    dims = case.dims
    shape = (dims["batch"], dims["heads"], dims["seq"], dims["head_dim"])
    q, k, v = (rand(*shape, grad=True) for _ in range(3))
    mask = None
    if dims["causal"] == 2:
        mask = torch.full((dims["seq"], dims["seq"]), float("-inf"), device=q.device, dtype=q.dtype).triu(1)[None, None]
    causal = dims["causal"] == 1
    return _either(case, lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal), [q, k, v])


def _update(case: Case, rand: Callable[..., torch.Tensor]) -> Call:
    each = case.dims["count"] // case.dims["tensors"]
    parameters = [rand(each, grad=True) for _ in range(case.dims["tensors"])]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    name, _, kernel = case.op.partition("_")
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[name](parameters, lr=1e-6, **{kernel: True}).step


SUSTAINED = (
    Case("gemm", "bfloat16", "forward", {"m": 8192, "n": 8192, "k": 8192}),
    Case("gemm", "bfloat16", "forward", {"m": 4096, "n": 4096, "k": 4096}),
    Case("gemm", "bfloat16", "forward", {"m": 2048, "n": 2048, "k": 2048}),
    Case("gemm", "tf32", "forward", {"m": 4096, "n": 4096, "k": 4096}),
    Case("gemm", "float32", "forward", {"m": 4096, "n": 4096, "k": 4096}),
    Case("add", "float32", "forward", {"count": 200_000_000}),
)


def sustained(
    case: Case, device: torch.device, seconds: float, read: Callable[[], dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """Runs a kernel without a pause: seconds of a call in windows of a tenth of the time, clock and power at the end."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.dtype == "tf32"
    calls = [_make(case, device) for _ in range(3)]
    once = time_case(case, device)["seconds"]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.dtype == "tf32"
    count = max(3, int(seconds / 10 / once))
    for window in range(10):
        begin = time.perf_counter()
        for number in range(count):
            calls[number % 3]()
        readings = read() if window == 8 else {}  # while the device still works
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - begin
        yield {"window": window, "seconds": took / count, **readings}
