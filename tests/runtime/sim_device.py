"""Several devices on a machine that has none: ``sim:0`` ... ``sim:7``.

A `SimTensor` claims to live on a ``sim`` device and keeps its numbers in a CPU tensor. Ops on tensors of different devices fail
as they do on real ones, autograd and optimizers run as usual, and every copy between devices is logged.

torch's own Python backend hooks know one device only: the autograd engine asks the C++ device guard how many there are. The few
lines of C++ below answer that; they are compiled once with g++ against libc10. `setup` must run before the first backward pass
of the process, because the engine makes its device threads there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

MAX_DEVICES = 8

_GUARD = r"""
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static thread_local DeviceIndex current = 0;
struct SimGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device exchangeDevice(Device d) const override { Device old = getDevice(); setDevice(d); return old; }
  Device getDevice() const override { return Device(DeviceType::PrivateUse1, current); }
  void setDevice(Device d) const override { if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const override { return Stream(Stream::DEFAULT, s.device()); }
  DeviceIndex deviceCount() const noexcept override { return 8; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)
"""


@dataclass(frozen=True)
class Copy:
    source: str
    destination: str
    size_bytes: int


copies: list[Copy] = []
"""Every copy between two devices since the last `copies.clear()`."""

_state: dict[str, object] = {}


def setup() -> str | None:
    """Registers the device; returns why it cannot, or None."""
    if "reason" not in _state:
        _state["reason"] = _setup()
    return _state["reason"]  # type: ignore[return-value]


@pytest.fixture
def sim():
    """``sim(n)`` names n simulated devices; their copies are in ``copies``."""
    if (reason := setup()) is not None:
        pytest.skip(reason)
    copies.clear()
    return lambda count: [f"sim:{index}" for index in range(count)]


def _setup() -> str | None:
    if torch.cuda.is_available():
        return "a GPU is here, and autograd takes one kind of accelerator beside the processor"
    if shutil.which("g++") is None:
        return "the simulated devices need g++"
    try:
        library = _compile_guard()
    except subprocess.CalledProcessError as error:
        return f"g++ could not compile the simulated device's guard: {error.stderr.splitlines()[:1]}"
    from torch.utils.backend_registration import _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

    module = SimpleNamespace(  # what torch looks up as ``torch.sim``
        is_available=lambda: False,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        device_count=lambda: MAX_DEVICES,
        current_device=lambda: 0,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )

    class Hook(_DummyPrivateUse1Hook):
        def is_available(self):  # keeps torch.accelerator, and all who ask it, as they are without this device
            return False

    _state["hook"] = Hook()
    _setup_privateuseone_for_python_backend("sim", backend_module=module, hook=_state["hook"])
    ctypes.CDLL(str(library))
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("triu_indices", _triu_indices, "PrivateUse1")
    # torch.tensor(..., device=...) copies with Python dispatch switched off and ends here.
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    _state["library"] = aten
    return None


def _compile_guard() -> Path:
    """The compiled guard, from a cache folder keyed by its source and torch's version."""
    key = hashlib.sha256((_GUARD + torch.__version__).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rlplace-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"guard-{key}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        source = folder / f"guard-{key}-{os.getpid()}.cpp"
        built = source.with_suffix(".so")
        source.write_text(_GUARD)
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include", str(source), "-o", str(built)]
        command += [f"-L{root}/lib", "-lc10", f"-Wl,-rpath,{root}/lib"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(library)
        source.unlink()
    return library


class SimTensor(torch.Tensor):
    """A tensor on ``sim:i`` whose numbers are in `payload`, on the CPU."""

    payload: torch.Tensor

    @staticmethod
    def __new__(cls, payload, device):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            payload.shape,
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=payload.dtype,
            device=device,
            requires_grad=False,
        )

    def __init__(self, payload, device):
        self.payload = payload

    def __repr__(self):
        return f"SimTensor({self.payload!r}, device={self.device})"

    def __tensor_flatten__(self):
        return ["payload"], self.device

    @staticmethod
    def __tensor_unflatten__(inner, device, outer_size, outer_stride):
        return SimTensor(inner["payload"], device)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        found: list[torch.Tensor] = []
        tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
        device = _common_device(func, found)
        target = torch.device(kwargs.get("device") or device)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if target.type == "sim" and target.index is None:
            target = torch.device("sim", 0)
        out = _OVERRIDES.get(func, func)(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
        if func is torch.ops.aten._to_copy.default and target != device:
            _log(device, target, args[0])
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            _log(args[1].device, args[0].device, args[1])
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], SimTensor):
            return args[0]
        if target.type != "sim":
            return out
        out = tree_map(lambda x: SimTensor(x, target) if isinstance(x, torch.Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


def _common_device(func, found):
    """The device an op runs on; refuses operands on several, as torch does."""
    if func is torch.ops.aten.copy_.default:
        return found[0].device
    sims = {t.device for t in found if isinstance(t, SimTensor)}
    # Real devices take scalars from the CPU, and indexing takes CPU indices.
    foreign = [t for t in found if not isinstance(t, SimTensor) and t.dim() > 0]
    if func in _TAKES_CPU_INDICES and isinstance(found[0], SimTensor):
        foreign = []
    if len(sims) > 1 or (sims and foreign):
        names = sorted({str(t.device) for t in found})
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} in {func}")
    return sims.pop()


def _log(source, destination, tensor):
    copies.append(Copy(str(source), str(destination), tensor.numel() * tensor.element_size()))


def _unwrap(x):
    return x.payload if isinstance(x, SimTensor) else x


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    options = {} if memory_format is None else {"memory_format": memory_format}
    return SimTensor(torch.empty(size, dtype=dtype, device="cpu", **options), device)


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)


def _triu_indices(row, col, offset=0, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.triu_indices(row, col, offset, dtype=dtype or torch.long, device="cpu"), device)


def _copy_from(source, destination, non_blocking=False):
    _unwrap(destination).copy_(_unwrap(source))
    return destination


def _lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """torch picks this fused kernel on every device but the CPU, which lacks it."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - tanh * tanh) + (0 if grad_cy is None else grad_cy)
    gates = [grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_hy * tanh * o * (1 - o)]
    grad_gates = torch.cat(gates, 1)
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


def _histc(x, bins=100, min=0, max=0):
    """Devices count whole numbers, the CPU kernel does not."""
    return torch.histc(x.float(), bins, min, max).to(x.dtype)


_OVERRIDES = {
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm_cell,
    torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
}

_TAKES_CPU_INDICES = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
