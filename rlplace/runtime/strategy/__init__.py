"""Whole strategies run by torch's own parts: what every axis, level and schedule of a strategy means in torch's terms."""
