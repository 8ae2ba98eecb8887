"""InceptionV3 as a layer graph: 299 x 299 images, 1000 classes, no auxiliary head, batch 128 in the paper's tables.

A convolution and its batch normalisation are two layers; activations are not counted. 219 layers (the paper counts one fewer).
"""

from __future__ import annotations

from benchmarks.papers.pase.builder import Tensor
from benchmarks.papers.pase.cnns import CnnBuilder, Pair
from benchmarks.papers.pase.layers import LayerGraph

Kernel = tuple[int, Pair, Pair]
"""Channels, window and padding of a convolution with stride 1."""


def inception_v3(batch: int = 128) -> LayerGraph:
    """The network."""
    net = CnnBuilder("inception_v3")
    x = _unit(net, Tensor((batch, 3, 299, 299)), 32, (3, 3), stride=2)
    x = _chain(net, x, (32, (3, 3), (0, 0)), (64, (3, 3), (1, 1)))
    x = net.pool(x, (3, 3), stride=2)
    x = _chain(net, x, (80, (1, 1), (0, 0)), (192, (3, 3), (0, 0)))
    x = net.pool(x, (3, 3), stride=2)
    for pool_channels in (32, 64, 64):
        x = _block_a(net, x, pool_channels)
    x = _block_b(net, x)
    for channels in (128, 160, 160, 192):
        x = _block_c(net, x, channels)
    x = _block_d(net, x)
    for _ in range(2):
        x = _block_e(net, x)
    net.loss(net.fc(net.mean(x), 1000))
    return net.build()


def _unit(net: CnnBuilder, x: Tensor, channels: int, kernel: Pair, *, stride: int = 1, pad: Pair = (0, 0)) -> Tensor:
    """Convolution and batch normalisation."""
    return net.batch_norm(net.conv(x, channels, kernel, stride=stride, pad=pad))


def _chain(net: CnnBuilder, x: Tensor, *kernels: Kernel) -> Tensor:
    """Units one after the other."""
    for channels, kernel, pad in kernels:
        x = _unit(net, x, channels, kernel, pad=pad)
    return x


def _pooled(net: CnnBuilder, x: Tensor, channels: int) -> Tensor:
    """The pooling branch."""
    return _chain(net, net.pool(x, (3, 3), pad=(1, 1)), (channels, (1, 1), (0, 0)))


def _block_a(net: CnnBuilder, x: Tensor, pool_channels: int) -> Tensor:
    """35 x 35 block."""
    return net.concat(
        [
            _chain(net, x, (64, (1, 1), (0, 0))),
            _chain(net, x, (48, (1, 1), (0, 0)), (64, (5, 5), (2, 2))),
            _chain(net, x, (64, (1, 1), (0, 0)), (96, (3, 3), (1, 1)), (96, (3, 3), (1, 1))),
            _pooled(net, x, pool_channels),
        ]
    )


def _block_b(net: CnnBuilder, x: Tensor) -> Tensor:
    """From 35 x 35 to 17 x 17."""
    direct = _unit(net, x, 384, (3, 3), stride=2)
    double = _chain(net, x, (64, (1, 1), (0, 0)), (96, (3, 3), (1, 1)))
    double = _unit(net, double, 96, (3, 3), stride=2)
    return net.concat([direct, double, net.pool(x, (3, 3), stride=2)])


def _block_c(net: CnnBuilder, x: Tensor, channels: int) -> Tensor:
    """17 x 17 block with factorised 7 x 7 convolutions."""
    row, column = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    return net.concat(
        [
            _chain(net, x, (192, (1, 1), (0, 0))),
            _chain(net, x, (channels, (1, 1), (0, 0)), (channels, *row), (192, *column)),
            _chain(net, x, (channels, (1, 1), (0, 0)), (channels, *column), (channels, *row), (channels, *column), (192, *row)),
            _pooled(net, x, 192),
        ]
    )


def _block_d(net: CnnBuilder, x: Tensor) -> Tensor:
    """From 17 x 17 to 8 x 8."""
    single = _unit(net, _chain(net, x, (192, (1, 1), (0, 0))), 320, (3, 3), stride=2)
    factored = _chain(net, x, (192, (1, 1), (0, 0)), (192, (1, 7), (0, 3)), (192, (7, 1), (3, 0)))
    factored = _unit(net, factored, 192, (3, 3), stride=2)
    return net.concat([single, factored, net.pool(x, (3, 3), stride=2)])


def _block_e(net: CnnBuilder, x: Tensor) -> Tensor:
    """8 x 8 block whose 3 x 3 branches fan out."""
    one = _chain(net, x, (320, (1, 1), (0, 0)))
    three = _fan(net, _chain(net, x, (384, (1, 1), (0, 0))))
    double = _fan(net, _chain(net, x, (448, (1, 1), (0, 0)), (384, (3, 3), (1, 1))))
    return net.concat([one, three, double, _pooled(net, x, 192)])


def _fan(net: CnnBuilder, x: Tensor) -> Tensor:
    """A row and a column convolution side by side."""
    return net.concat([_chain(net, x, (384, (1, 3), (0, 1))), _chain(net, x, (384, (3, 1), (1, 0)))])
