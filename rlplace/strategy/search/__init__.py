"""The search for the best strategy."""
