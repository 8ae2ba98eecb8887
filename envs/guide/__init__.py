"""What guides a refinement: compiled analysis of a simulated step, moves, their features and their prices."""
