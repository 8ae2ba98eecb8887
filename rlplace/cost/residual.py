"""The learned correction of a curve: features of a call's shape and a small network with a bounded output.

The features are logarithms of sizes and the waste of covering a product with tiles of whole processors. A prediction is the
curve's time multiplied by at most `bound`, divided by at most `bound`, and never below the roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from rlplace.cost.table import Residual

Sizes = Mapping[str, NDArray[np.float64]]
"""Float arrays [N] by name of `rlplace.cost.table.DIMS`; sizes that an op class does not have are 1."""

Feature = Callable[[Sizes, float], NDArray[np.float64]]


def _log(name: str) -> Feature:
    return lambda sizes, processors: np.log2(np.maximum(sizes[name], 1.0))


def _intensity(sizes: Sizes, processors: float) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.log2(np.maximum(sizes["flops"], 1.0)) - np.log2(np.maximum(sizes["bytes"], 1.0))
    return result


def _tiles(sizes: Sizes, side: tuple[int, int]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = sizes["batch"] * np.ceil(sizes["m"] / side[0]) * np.ceil(sizes["n"] / side[1])
    return result


def _wave_waste(*side: int) -> Feature:
    """log2 of (processor slots in whole waves) / (tiles): 0 when the last wave is full."""

    def feature(sizes: Sizes, processors: float) -> NDArray[np.float64]:
        tiles = _tiles(sizes, (side[0], side[1]))
        result: NDArray[np.float64] = np.log2(np.ceil(tiles / processors) * processors / tiles)
        return result

    return feature


def _edge_waste(*side: int) -> Feature:
    """log2 of (area covered by whole tiles) / (area of the product)."""

    def feature(sizes: Sizes, processors: float) -> NDArray[np.float64]:
        covered = _tiles(sizes, (side[0], side[1])) * side[0] * side[1]
        result: NDArray[np.float64] = np.log2(covered / (sizes["batch"] * sizes["m"] * sizes["n"]))
        return result

    return feature


def _waves(*side: int) -> Feature:
    """log2 of waves of tiles, fractions included."""

    def feature(sizes: Sizes, processors: float) -> NDArray[np.float64]:
        result: NDArray[np.float64] = np.log2(_tiles(sizes, (side[0], side[1])) / processors)
        return result

    return feature


FEATURES: Mapping[str, Feature] = {
    **{f"log_{name}": _log(name) for name in ("batch", "m", "n", "k", "heads", "queries", "keys", "width", "rows", "columns")},
    "log_flops": _log("flops"),
    "log_bytes": _log("bytes"),
    "log_intensity": _intensity,
    "waves_128": _waves(128, 128),
    "wave_waste_128": _wave_waste(128, 128),
    "edge_waste_128": _edge_waste(128, 128),
    "wave_waste_64": _wave_waste(64, 64),
    "edge_waste_64": _edge_waste(64, 64),
}
"""Features by name: functions of sizes and of the number of processors (streaming multiprocessors) of the device."""


def feature_matrix(names: tuple[str, ...], sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Features as columns [N, F]."""
    return np.stack([FEATURES[name](sizes, processors) for name in names], axis=1)


def residual_factor(residual: Residual, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """What to multiply the curve's time by: [N], between 1 / bound and bound."""
    value = np.clip(feature_matrix(residual.features, sizes, processors), np.array(residual.low), np.array(residual.high))
    value = (value - np.array(residual.mean)) / np.array(residual.scale)
    for layer, (weights, bias) in enumerate(zip(residual.weights, residual.bias, strict=True)):
        value = value @ np.array(weights).T + np.array(bias)
        if layer < len(residual.weights) - 1:
            value = np.tanh(value)
    factor: NDArray[np.float64] = residual.bound ** np.tanh(value[:, 0])
    return factor
