"""Builds op graphs by hand: forward ops are given, backward and update ops follow by mirroring.

For tests, benchmarks and toy problems; `rlplace.capture` makes the graphs of real models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlplace.model.graph.opgraph import (
    ACTIVATION,
    BACKWARD,
    BUFFER,
    FORWARD,
    GRADIENT,
    INPUT,
    PARAMETER,
    UPDATE,
    OpGraph,
    Parameter,
)


class GraphBuilder:
    """Collects forward ops, then mirrors them.

    Tensors are referred to by the numbers that `input`, `parameter`, `buffer` and `op` return.
    """

    def __init__(self, name: str = "synthetic", samples: int = 8) -> None:
        self.name, self.samples = name, samples
        self._ops: list[dict] = []
        self._parameters: list[Parameter] = []
        self._role: list[int] = []
        self._of_parameter: list[int] = []
        self._producer: list[int] = []
        self._bytes: list[int] = []
        self._consumers: list[list[int]] = []

    def _tensor(self, role: int, size_bytes: int, producer: int = -1, parameter: int = -1) -> int:
        self._role.append(role)
        self._of_parameter.append(parameter)
        self._producer.append(producer)
        self._bytes.append(size_bytes)
        self._consumers.append([])
        return len(self._role) - 1

    def input(self, size_bytes: int) -> int:
        """Returns an input of the model."""
        return self._tensor(INPUT, size_bytes)

    def parameter(self, name: str, size_bytes: int, *, trainable: bool = True, is_buffer: bool = False) -> int:
        """Returns a parameter, with a gradient of its size and Adam's two moments when trainable; or a buffer."""
        trainable = trainable and not is_buffer
        self._parameters.append(
            Parameter(
                name=name,
                aliases=(),
                shape=(size_bytes // 4,),
                dtype="float32",
                size_bytes=size_bytes,
                trainable=trainable,
                gradient_bytes=size_bytes if trainable else 0,
                optimizer_bytes=2 * size_bytes if trainable else 0,
                is_buffer=is_buffer,
            )
        )
        return self._tensor(BUFFER if is_buffer else PARAMETER, size_bytes, parameter=len(self._parameters) - 1)

    def op(
        self,
        module: str,
        reads: Sequence[int],
        output_bytes: int,
        *,
        kind: str = "elementwise",
        flops: float = 0.0,
        temporary_bytes: int = 0,
        dtype: str = "float32",
        saved: bool = True,
        writes: int | None = None,
    ) -> int:
        """Returns a forward op; returns its output tensor.

        Args:
            module: Module path.
            reads: Tensors that it reads.
            output_bytes: Size of its output; unused with `writes` and for views.
            kind: Entry of `OP_KINDS`; a "view" makes no tensor, it returns the first one that it reads.
            flops: Work of the forward; the backward takes twice as many.
            temporary_bytes: Live only while it runs.
            dtype: Compute dtype.
            saved: Whether its backward reads its activations and its output.
            writes: A tensor that the op changes in place instead of making one; the op is colocated with its producer.
        """
        number = len(self._ops)
        reads = list(dict.fromkeys(reads))
        for tensor in reads:
            self._consumers[tensor].append(number)
        order, colocate = -1, number
        if kind == "view":
            output, output_bytes, saved = reads[0], 0, False
        elif writes is None:
            output = self._tensor(ACTIVATION, output_bytes, producer=number)
        else:
            output, output_bytes = writes, self._bytes[writes]
            if number not in self._consumers[writes]:
                self._consumers[writes].append(number)
            # Later readers of the storage wait for this write through an edge without bytes.
            order = self._tensor(ACTIVATION, 0, producer=number)
        if self._producer[output] not in (-1, number):
            colocate = self._ops[self._producer[output]]["colocate"]
        self._ops.append(
            {
                "module": module,
                "reads": reads,
                "output": output,
                "kind": kind,
                "flops": flops,
                "dtype": dtype,
                "saved": saved,
                "temporary": temporary_bytes,
                "bytes": sum(self._bytes[t] for t in reads) + output_bytes,
                "order": order,
                "colocate": colocate,
            }
        )
        return output

    def build(self) -> OpGraph:
        """Adds a backward op to every forward op behind a trainable parameter, and the updates."""
        forward = list(self._ops)
        count = len(forward)
        trainable = [p.trainable for p in self._parameters]
        self._order_in_place_readers()
        alive = [False] * count  # whether the output has a gradient
        for number, op in enumerate(forward):
            for tensor in op["reads"]:
                producer, parameter = self._producer[tensor], self._of_parameter[tensor]
                if (producer >= 0 and alive[producer]) or (producer < 0 and parameter >= 0 and trainable[parameter]):
                    alive[number] = True
        names = [f"{op['module']}/op_{number}" if op["module"] else f"op_{number}" for number, op in enumerate(forward)]
        phase, owner, of_parameter = [FORWARD] * count, list(range(count)), [-1] * count
        colocate = [op["colocate"] for op in forward]
        backward_of: dict[int, int] = {}
        gradients: dict[int, list[int]] = {}  # forward op -> tensors that its backward consumes
        parameter_gradients: dict[int, list[int]] = {}
        for number in range(count - 1, -1, -1):
            if not alive[number] or forward[number]["kind"] == "view":
                continue
            mine = len(names)
            op = forward[number]
            backward_of[number] = mine
            names.append(f"{names[number]}.backward")
            phase.append(BACKWARD)
            owner.append(number)
            of_parameter.append(-1)
            colocate.append(op["colocate"])
            for tensor in gradients.get(number, []):
                self._consumers[tensor].append(mine)
            for tensor in [*op["reads"], *([op["output"]] if op["saved"] else [])]:
                if (op["saved"] or self._of_parameter[tensor] >= 0) and mine not in self._consumers[tensor]:
                    self._consumers[tensor].append(mine)
            if not op["saved"]:
                order = self._tensor(ACTIVATION, 0, producer=number)
                self._consumers[order].append(mine)
            for tensor in op["reads"]:
                producer, parameter = self._producer[tensor], self._of_parameter[tensor]
                if producer >= 0 and alive[producer]:
                    made = self._tensor(ACTIVATION, self._bytes[tensor], producer=mine)
                    gradients.setdefault(producer, []).append(made)
                elif producer < 0 and parameter >= 0 and trainable[parameter]:
                    made = self._tensor(GRADIENT, self._bytes[tensor], producer=mine, parameter=parameter)
                    parameter_gradients.setdefault(parameter, []).append(made)
        for parameter, tensors in sorted(parameter_gradients.items()):
            for tensor in tensors:
                self._consumers[tensor].append(len(names))
            names.append(f"{self._parameters[parameter].name}/update")
            phase.append(UPDATE)
            owner.append(-1)
            of_parameter.append(parameter)
            colocate.append(count + parameter)
        return self._graph(forward, names, phase, owner, of_parameter, colocate)

    def _order_in_place_readers(self) -> None:
        for number, op in enumerate(self._ops):
            if op["order"] < 0:
                continue
            later = [reader for reader in self._consumers[op["output"]] if reader > number]
            self._consumers[op["order"]].extend(later)

    def _graph(self, forward: list[dict], names: list[str], phase: list[int], owner: list[int], of_parameter: list[int], colocate: list[int]) -> OpGraph:  # fmt: skip  # noqa: E501
        count = len(names)
        source = [forward[o] if o >= 0 else None for o in owner]
        sizes = [self._parameters[p].size_bytes if p >= 0 else 0 for p in of_parameter]
        factor = [2.0 if p == BACKWARD else 1.0 for p in phase]
        consumers = [sorted(set(c)) for c in self._consumers]
        return OpGraph(
            name=self.name,
            samples=self.samples,
            op_names=tuple(names),
            op_target=tuple(s["kind"] if s else "optimizer.adam" for s in source),
            op_kind=tuple(s["kind"] if s else "optimizer" for s in source),
            op_module=tuple(
                s["module"] if s else self._parameters[p].name.rpartition(".")[0]
                for s, p in zip(source, of_parameter, strict=True)
            ),
            op_phase=np.array(phase, dtype=np.int8),
            op_forward=np.array(owner, dtype=np.int32),
            op_parameter=np.array(of_parameter, dtype=np.int32),
            op_dtype=tuple(s["dtype"] if s else "float32" for s in source),
            op_flops=np.array([s["flops"] * f if s else 0.0 for s, f in zip(source, factor, strict=True)]),
            op_bytes=np.array(
                [
                    0 if s and s["kind"] == "view" else int(s["bytes"] * f) if s else 7 * size
                    for s, f, size in zip(source, factor, sizes, strict=True)
                ],
                dtype=np.int64,
            ),
            op_temporary_bytes=np.array([s["temporary"] if s else 0 for s in source], dtype=np.int64),
            op_colocate=np.array(colocate, dtype=np.int32).reshape(count),
            parameters=tuple(self._parameters),
            tensor_role=np.array(self._role, dtype=np.int8),
            tensor_parameter=np.array(self._of_parameter, dtype=np.int32),
            tensor_producer=np.array(self._producer, dtype=np.int32),
            tensor_bytes=np.array(self._bytes, dtype=np.int64),
            consumer_ptr=np.concatenate([[0], np.cumsum([len(c) for c in consumers])]).astype(np.int64),
            consumers=np.array([op for c in consumers for op in c], dtype=np.int32),
            capture={"method": "synthetic", "optimizer": "adam", "dtype": "float32"},
        )


def random_graph(seed: int, num_ops: int, *, num_modules: int = 6, tied: bool = False, in_place: bool = False) -> OpGraph:
    """Returns a random branchy graph of `num_ops` forward ops.

    Args:
        seed: Decides everything.
        num_ops: Forward ops.
        num_modules: Modules that the ops are spread over, in order.
        tied: Lets some parameters be read in several places.
        in_place: Lets some ops write into their input.
    """
    rng = np.random.default_rng(seed)
    builder = GraphBuilder(name=f"random{seed}")
    data = builder.input(256)
    outputs: list[int] = []
    weights: list[int] = []
    for number in range(num_ops):
        block = number * num_modules // num_ops
        module = f"block.{block}.{'abc'[int(rng.integers(3))]}" if rng.random() < 0.8 else f"block.{block}"
        count = min(len(outputs), int(rng.choice([1, 1, 1, 2, 3])))
        recent = outputs[-12:] if rng.random() < 0.9 else outputs
        reads = [recent[int(i)] for i in rng.integers(len(recent), size=count)] if recent else [data]
        kind, flops = "elementwise", 0.0
        if rng.random() < 0.4:
            if tied and weights and rng.random() < 0.15:
                reads.append(weights[int(rng.integers(len(weights)))])
            else:
                weights.append(builder.parameter(f"{module}.weight{number}", int(rng.integers(1, 64)) * 1024))
                reads.append(weights[-1])
            kind, flops = "gemm", float(rng.integers(1, 200)) * 1e8
        if in_place and outputs and rng.random() < 0.1:
            builder.op(module, [outputs[-1]], 0, writes=outputs[-1], saved=False)
            continue
        size = int(rng.integers(0, 40)) * 4096
        saved = bool(rng.random() < 0.7)
        temporary = int(rng.integers(0, 3)) * 1000
        outputs.append(builder.op(module, reads, size, kind=kind, flops=flops, saved=saved, temporary_bytes=temporary))
    return builder.build()


def transformer_graph(
    layers: int, *, width: int = 512, tokens: int = 512, vocabulary: int = 8192, tied: bool = True
) -> OpGraph:
    """Returns a decoder-only transformer, written out op by op (about 20 forward ops a layer).

    Args:
        layers: Blocks.
        width: Hidden size.
        tokens: Tokens in the batch.
        vocabulary: Rows of the embedding.
        tied: Whether the head shares the embedding's weight.
    """
    builder = GraphBuilder(name=f"transformer{layers}")
    state, small = 4 * tokens * width, 4 * tokens
    ids, mask = builder.input(8 * tokens), builder.parameter("mask", 4096, is_buffer=True)
    embedding = builder.parameter("wte.weight", 4 * vocabulary * width)
    x = builder.op("wte", [ids, embedding], state, kind="embedding")
    bias = builder.op("", [mask], 4096)

    def linear(module: str, source: int, inputs: int, outputs: int) -> int:
        weight = builder.parameter(f"{module}.weight", 4 * inputs * outputs)
        rest = builder.parameter(f"{module}.bias", 4 * outputs)
        return builder.op(
            module, [source, weight, rest], 4 * tokens * outputs, kind="gemm", flops=2.0 * tokens * inputs * outputs
        )

    def norm(module: str, source: int) -> int:
        scale = builder.parameter(f"{module}.weight", 4 * width)
        return builder.op(module, [source, scale], state, kind="norm", temporary_bytes=small)

    for layer in range(layers):
        at = f"h.{layer}"
        h = norm(f"{at}.ln_1", x)
        parts = [linear(f"{at}.attn.{name}", h, width, width) for name in "qkv"]
        heads = [builder.op(f"{at}.attn", [part], 0, kind="view") for part in parts]
        h = builder.op(f"{at}.attn", [*heads, bias], state, kind="attention", flops=4.0 * tokens * tokens * width)
        h = builder.op(f"{at}.attn", [h], state, kind="copy", saved=False)
        h = linear(f"{at}.attn.out", h, width, width)
        x = builder.op(at, [x, h], state, saved=False)
        h = norm(f"{at}.ln_2", x)
        h = linear(f"{at}.mlp.up", h, width, 4 * width)
        for _ in range(4):
            h = builder.op(f"{at}.mlp.act", [h], 4 * state)
        h = linear(f"{at}.mlp.down", h, 4 * width, width)
        x = builder.op(at, [x, h], state, saved=False)
    x = norm("ln_f", x)
    head = embedding if tied else builder.parameter("lm_head.weight", 4 * vocabulary * width)
    logits = builder.op("lm_head", [x, head], 4 * tokens * vocabulary, kind="gemm", flops=2.0 * tokens * width * vocabulary)
    builder.op("", [logits, ids], 4, kind="softmax")
    return builder.build()
