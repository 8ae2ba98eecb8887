"""Guidance of a refinement: compiled analysis of a simulated step, moves and their features."""
