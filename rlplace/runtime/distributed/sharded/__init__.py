"""Plans that cut ops into parts, run as one program on all devices; see `rlplace.runtime.distributed.sharded.engine`."""
