"""The captured training step: record, capture, coarsening, file format."""

from rlplace.model.graph.opgraph import OpGraph, Parameter

__all__ = ["OpGraph", "Parameter"]
