"""Plans whose backward ops run elsewhere than their forward ops; see `rlplace.runtime.placement.engine`."""
