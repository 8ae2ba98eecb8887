"""Plans whose backward ops run elsewhere than their forward ops; see `rlplace.runtime.distributed.joint.engine`."""
