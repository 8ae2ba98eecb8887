"""Pipelines on `torch.distributed.pipelining`; see `rlplace.runtime.distributed.pipeline.engine`."""
