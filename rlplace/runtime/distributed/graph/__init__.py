"""The forward of a model as a graph, where a plan puts its nodes, and the segments that it is cut into."""
