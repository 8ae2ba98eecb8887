"""Bi-partition: PipeDream's public profiles, read and turned into chains and problems."""
