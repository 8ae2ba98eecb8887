"""Plans that run over several processes; see `rlplace.runtime.distributed.distribute`."""
