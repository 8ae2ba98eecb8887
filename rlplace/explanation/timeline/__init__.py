"""Whole strategies of plans evaluated again: what their step takes, and what happens when in it."""
