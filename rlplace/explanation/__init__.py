"""Explanations: why a plan takes the time that it takes, why groups sit where they sit, and what would change it."""
