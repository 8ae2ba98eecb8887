"""The cost model: op times, transfer times, memory by liveness, and pricing of op graphs."""

from rlplace.cost.compute import explain_times
from rlplace.cost.contract import split_backward
from rlplace.cost.foreign import ModelledCosts
from rlplace.cost.price import device_times, price
from rlplace.cost.table import CostTable

__all__ = ["CostTable", "ModelledCosts", "device_times", "explain_times", "price", "split_backward"]
