"""The cost model: op times, transfer times, memory by liveness, and pricing of op graphs."""

from rlplace.cost.compute import op_times
from rlplace.cost.price import device_times, price
from rlplace.cost.split import split_backward

__all__ = ["device_times", "op_times", "price", "split_backward"]
