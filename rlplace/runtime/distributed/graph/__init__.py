"""The forward of a model as a graph, what it is traced with, and its random ops."""
