"""Hostile input: damaged, lying and oversized files for every loader of rlplace (docs/testing.md)."""
