"""Op graph files: ``rlplace.graph`` version 1, and the networkx exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_header, check_keys, read_record, write_json
from rlplace.graph.opgraph import PHASES, TENSOR_ROLES, OpGraph, Parameter

if TYPE_CHECKING:
    import networkx as nx

FORMAT = "rlplace.graph"
VERSION = 1

_OP_KEYS = ("name", "target", "kind", "module", "phase", "forward", "parameter", "dtype", "flops", "bytes", "temporary_bytes", "colocate")  # fmt: skip  # noqa: E501
_TENSOR_KEYS = ("role", "parameter", "producer", "bytes", "consumers")
_PARAMETER_KEYS = tuple(item.name for item in dataclasses.fields(Parameter))


def save_graph(graph: OpGraph, path: str | Path) -> None:
    """Writes a graph file, atomically."""
    write_json(path, graph_to_dict(graph))


def load_graph(path: str | Path) -> OpGraph:
    """Reads and checks a graph file.

    Raises:
        InputError: The file is missing, malformed, newer than this code, or describes an impossible graph.
    """
    return read_record(path, FORMAT, VERSION, _parse)


def graph_from_dict(data: dict[str, Any]) -> OpGraph:
    """Builds a graph from parsed JSON, with the same checks as `load_graph`."""
    return _parse(check_header(data, FORMAT, VERSION, where="graph"))


def graph_to_dict(graph: OpGraph) -> dict[str, Any]:
    """The graph as plain JSON data: ops and tensors as columns, so that 100,000 ops stay a small file."""
    ops = {
        "name": list(graph.op_names),
        "target": list(graph.op_target),
        "kind": list(graph.op_kind),
        "module": list(graph.op_module),
        "phase": [PHASES[phase] for phase in graph.op_phase.tolist()],
        "forward": graph.op_forward.tolist(),
        "parameter": graph.op_parameter.tolist(),
        "dtype": list(graph.op_dtype),
        "flops": graph.op_flops.tolist(),
        "bytes": graph.op_bytes.tolist(),
        "temporary_bytes": graph.op_temporary_bytes.tolist(),
        "colocate": graph.op_colocate.tolist(),
    }
    if graph.op_launches is not None:
        ops["launches"] = graph.op_launches.tolist()
    ptr, consumers = graph.consumer_ptr.tolist(), graph.consumers.tolist()
    tensors = {
        "role": [TENSOR_ROLES[role] for role in graph.tensor_role.tolist()],
        "parameter": graph.tensor_parameter.tolist(),
        "producer": graph.tensor_producer.tolist(),
        "bytes": graph.tensor_bytes.tolist(),
        "consumers": [consumers[ptr[i] : ptr[i + 1]] for i in range(graph.num_tensors)],
    }
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "samples": int(graph.samples),
        "ops": ops,
        "parameters": [
            {**dataclasses.asdict(p), "aliases": list(p.aliases), "shape": [int(s) for s in p.shape]} for p in graph.parameters
        ],
        "tensors": tensors,
    }
    if graph.op_dims:
        data["op_dims"] = {str(op): dict(dims) for op, dims in sorted(graph.op_dims.items())}
    if graph.capture:
        data["capture"] = dict(graph.capture)
    if graph.source is not None:
        data["source"] = dict(graph.source)
    return data


def graph_to_networkx(graph: OpGraph) -> nx.DiGraph:
    """One node per op with all its attributes, one edge per producer and consumer.

    Edge attributes are `bytes` and `tensor`; several tensors between the same two ops add their bytes and keep the first
    tensor's number. Parameters, buffers and inputs have no producing op and appear as the graph attribute `parameters`.
    """
    import networkx as nx

    result: nx.DiGraph = nx.DiGraph(
        name=graph.name, samples=graph.samples, parameters=[dataclasses.asdict(p) for p in graph.parameters]
    )
    for index, name in enumerate(graph.op_names):
        parameter = int(graph.op_parameter[index])
        result.add_node(
            name,
            target=graph.op_target[index],
            kind=graph.op_kind[index],
            module=graph.op_module[index],
            phase=PHASES[graph.op_phase[index]],
            forward=graph.op_names[graph.op_forward[index]] if graph.op_forward[index] >= 0 else None,
            parameter=graph.parameters[parameter].name if parameter >= 0 else None,
            dtype=graph.op_dtype[index],
            flops=float(graph.op_flops[index]),
            bytes=int(graph.op_bytes[index]),
            temporary_bytes=int(graph.op_temporary_bytes[index]),
            colocate=int(graph.op_colocate[index]),
            dims=dict(graph.op_dims.get(index, {})),
        )
    for tensor, consumer in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        producer = int(graph.tensor_producer[tensor])
        if producer < 0:
            continue
        ends = graph.op_names[producer], graph.op_names[consumer]
        size = int(graph.tensor_bytes[tensor])
        if result.has_edge(*ends):
            result.edges[ends]["bytes"] += size
        else:
            result.add_edge(*ends, bytes=size, tensor=tensor)
    return result


def _parse(data: dict[str, Any]) -> OpGraph:
    check_keys(data, {"ops", "parameters", "tensors"}, {"name", "samples", "op_dims", "capture", "source"}, "graph")
    ops, tensors = _columns(data["ops"], _OP_KEYS, "ops", ("launches",)), _columns(data["tensors"], _TENSOR_KEYS, "tensors")
    for key in ("op_dims", "capture", "source"):
        if not isinstance(data.get(key, {}), dict):
            raise InputError(f"graph: {key}: expected an object")
    name = data.get("name", "graph")
    if not isinstance(name, str):
        raise InputError("graph: name: expected a string")
    if not isinstance(data["parameters"], list):
        raise InputError("graph: parameters: expected a list")
    consumers = tensors["consumers"]
    if not all(isinstance(row, list) for row in consumers):
        raise InputError("graph: tensors.consumers: expected lists of ops")
    lengths = [len(row) for row in consumers]
    return OpGraph(
        name=name,
        samples=_whole(data.get("samples", 1), "samples"),
        op_names=_strings(ops["name"], "ops.name"),
        op_target=_strings(ops["target"], "ops.target"),
        op_kind=_strings(ops["kind"], "ops.kind"),
        op_module=_strings(ops["module"], "ops.module"),
        op_phase=_named(ops["phase"], PHASES, "phase"),
        op_forward=_whole_numbers(ops["forward"], "ops.forward", np.int32),
        op_parameter=_whole_numbers(ops["parameter"], "ops.parameter", np.int32),
        op_dtype=_strings(ops["dtype"], "ops.dtype"),
        op_flops=_numbers(ops["flops"], "ops.flops"),
        op_bytes=_whole_numbers(ops["bytes"], "ops.bytes", np.int64),
        op_temporary_bytes=_whole_numbers(ops["temporary_bytes"], "ops.temporary_bytes", np.int64),
        op_colocate=_whole_numbers(ops["colocate"], "ops.colocate", np.int32),
        parameters=tuple(_parse_parameter(item, i) for i, item in enumerate(data["parameters"])),
        tensor_role=_named(tensors["role"], TENSOR_ROLES, "tensor role"),
        tensor_parameter=_whole_numbers(tensors["parameter"], "tensors.parameter", np.int32),
        tensor_producer=_whole_numbers(tensors["producer"], "tensors.producer", np.int32),
        tensor_bytes=_whole_numbers(tensors["bytes"], "tensors.bytes", np.int64),
        consumer_ptr=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        consumers=_whole_numbers([op for row in consumers for op in row], "tensors.consumers", np.int32),
        capture=data.get("capture", {}),
        source=data.get("source"),
        op_dims=_parse_dims(data.get("op_dims", {})),
        op_launches=_whole_numbers(ops["launches"], "ops.launches", np.int32) if "launches" in ops else None,
    )


def _columns(item: Any, keys: tuple[str, ...], where: str, optional: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    check_keys(item, keys, optional, f"graph: {where}")
    for key in item:
        if not isinstance(item[key], list) or len(item[key]) != len(item[keys[0]]):
            raise InputError(f"graph: {where}.{key}: expected a list as long as {where}.{keys[0]}")
    return dict(item)


def _parse_parameter(item: Any, index: int) -> Parameter:
    where = f"graph: parameters[{index}]"
    check_keys(item, _PARAMETER_KEYS, (), where)
    for key in ("trainable", "is_buffer"):
        if not isinstance(item[key], bool):
            raise InputError(f"{where}.{key}: expected true or false")
    for key in ("aliases", "shape"):
        if not isinstance(item[key], list):
            raise InputError(f"{where}.{key}: expected a list")
    return Parameter(
        name=_strings([item["name"]], f"{where}.name")[0],
        aliases=_strings(item["aliases"], f"{where}.aliases"),
        shape=tuple(_whole(size, f"{where}.shape") for size in item["shape"]),
        dtype=_strings([item["dtype"]], f"{where}.dtype")[0],
        size_bytes=_whole(item["size_bytes"], f"{where}.size_bytes"),
        trainable=item["trainable"],
        gradient_bytes=_whole(item["gradient_bytes"], f"{where}.gradient_bytes"),
        optimizer_bytes=_whole(item["optimizer_bytes"], f"{where}.optimizer_bytes"),
        is_buffer=item["is_buffer"],
    )


def _parse_dims(item: Mapping[str, Any]) -> dict[int, dict[str, int]]:
    result: dict[int, dict[str, int]] = {}
    for key, dims in item.items():
        if not key.isdecimal() or not isinstance(dims, dict):
            raise InputError(f"graph: op_dims[{key[:40]!r}]: expected an op number and an object of sizes")
        result[int(key)] = {name: _whole(size, f"op_dims[{key}].{name}") for name, size in dims.items()}
    return result


def _whole(value: Any, where: str) -> int:
    if type(value) is not int or abs(value) > 1 << 62:
        raise InputError(f"graph: {where}: {show(value)} is not a whole number")
    return value


def _whole_numbers(values: list[Any], where: str, dtype: type[np.integer[Any]]) -> Any:
    if not all(type(value) is int for value in values):
        bad = next(value for value in values if type(value) is not int)
        raise InputError(f"graph: {where}: {show(bad)} is not a whole number")
    limit = np.iinfo(dtype)
    if values and not (limit.min <= min(values) and max(values) <= limit.max):
        raise InputError(f"graph: {where}: a value is out of range")
    return np.array(values, dtype=dtype)


def _numbers(values: list[Any], where: str) -> Any:
    if not all(type(value) in (int, float) for value in values):
        bad = next(value for value in values if type(value) not in (int, float))
        raise InputError(f"graph: {where}: {show(bad)} is not a number")
    convert: Callable[[Any], float] = float
    try:
        return np.array([convert(value) for value in values], dtype=np.float64)
    except OverflowError:
        raise InputError(f"graph: {where}: a number is too large") from None


def _strings(values: list[Any], where: str) -> tuple[str, ...]:
    if not all(type(value) is str for value in values):
        raise InputError(f"graph: {where}: expected strings")
    return tuple(values)


def _named(values: list[Any], names: tuple[str, ...], what: str) -> Any:
    number = {name: index for index, name in enumerate(names)}
    unknown = [value for value in values if not isinstance(value, str) or value not in number]
    if unknown:
        raise unknown_name(what, unknown[0], names)
    return np.array([number[value] for value in values], dtype=np.int8)
