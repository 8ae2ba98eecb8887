"""The gymnasium environments, imported as `rlplace.envs`."""
