"""Synthetic batches of transformers models: what their forward asks for, and labels where their head computes a loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.model.torch_adapter import pytree

_SPECIAL = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
"""Words that stand for what a batch of text alone has not."""


class _Batch:
    """The sizes of a batch, and what it draws from."""

    def __init__(self, config: Any, task: str, size: int, seq: int) -> None:
        self.config, self.task, self.size, self.seq = config, task, size, seq
        self.generator = torch.Generator().manual_seed(0)

    def said(self, *names: str, default: Any = None) -> Any:
        """Returns the first of these that the configuration, or one inside it, sets."""
        inner = [getattr(self.config, key, None) for key in (getattr(self.config, "sub_configs", None) or ())]
        values = (getattr(config, name, None) for config in (self.config, *inner) for name in names)
        return next((value for value in values if value is not None), default)

    def below(self, high: Any, *shape: int) -> torch.Tensor:
        return torch.randint(0, max(1, int(high)), (self.size, *shape), generator=self.generator)

    def rand(self, *shape: Any) -> torch.Tensor:
        return torch.rand((self.size, *map(int, shape)), generator=self.generator)

    def classes(self, *shape: int) -> torch.Tensor:
        return self.below(self.config.num_labels, *shape)

    def tokens(self) -> torch.Tensor:
        high = int(getattr(self.config.get_text_config(decoder=True), "vocab_size", None) or self.said("vocab_size", default=2))
        ids = self.below(high, self.seq)
        for special in filter(None, (getattr(self.config, name, None) for name in _SPECIAL)):
            ids = torch.where(ids == special, (int(special) + 1) % high, ids)
        return ids

    def sides(self) -> tuple[int, int]:
        size = self.said("image_size", "crop_size", default=224)
        height, width = (size, size) if isinstance(size, int) else size.values() if isinstance(size, dict) else size
        return int(height), int(width)

    def images(self) -> torch.Tensor:
        frames = self.said("num_frames", "frames_per_clip", default=8 if self.task == "video" else None)
        video = [frames] if self.task == "video" or (self.task in ("contrastive", "outputs") and frames) else []
        return self.rand(*video, self.said("num_channels", "in_channels", "in_chans", default=3), *self.sides())

    def sound(self) -> torch.Tensor:
        bins, length, strides = (
            self.said("num_mel_bins"),
            self.said("max_length"),
            self.said("conv_stride", "upsampling_ratios"),
        )
        if bins is not None and length is not None:
            return self.rand(length, bins)
        samples, channels = self.seq * math.prod(strides or (320,)), self.said("audio_channels")
        return self.rand(samples) if strides and channels is None else self.rand(channels or 1, samples)

    def spectrum(self) -> torch.Tensor:
        bins, frames = self.said("feature_projection_input_dim", "input_dim", "num_mel_bins"), self.said("max_source_positions")
        if bins is None:
            raise InputError("its configuration does not say how many mel bins it reads")
        return self.rand(8 * self.seq, bins) if frames is None else self.rand(bins, 2 * frames)


_ARGUMENTS: Mapping[str, Callable[[_Batch], Any]] = {
    "input_ids": _Batch.tokens,
    "decoder_input_ids": _Batch.tokens,
    "inputs": lambda batch: batch.tokens() if batch.task == "masked" else batch.images(),
    **dict.fromkeys(("pixel_values", "pixel_values_videos"), _Batch.images),
    "input_values": _Batch.sound,
    "input_features": _Batch.spectrum,
    "bbox": lambda batch: batch.below(2, batch.seq, 4),
    "past_values": lambda batch: batch.rand(batch.said("context_length"), batch.said("num_input_channels", default=1)),
    "return_loss": lambda batch: True,
}
"""What stands for an argument of a forward."""

_LABELS: Mapping[str, Callable[[_Batch], torch.Tensor]] = {
    **dict.fromkeys(("speech", "seq2seq", "masked", "multimodal"), _Batch.tokens),
    **dict.fromkeys(("image", "video", "audio"), _Batch.classes),
    "pixels": lambda batch: batch.classes(*batch.sides()),
    "words": lambda batch: batch.classes(batch.seq),
}
"""What a head is trained towards; "causal" towards its own tokens, all others towards outputs of zero."""


def inputs_of(module: nn.Module, config: Any, kind: str, task: str, size: int, seq: int) -> dict[str, Any]:
    """Keyword inputs of one step: all that the forward cannot run without, then labels.

    Raises:
        InputError: The forward needs something for which nothing is made.
    """
    batch = _Batch(config, task, size, seq)
    known = {name: p for name, p in inspect.signature(module.forward).parameters.items() if p.kind < p.VAR_KEYWORD}
    needed = [name for name, p in known.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    main = str(getattr(module, "main_input_name", "input_ids"))
    if "return_loss" in known:  # two towers, whose loss compares their outputs
        needed += [name for name in ("input_ids", "pixel_values", "input_features", "return_loss") if name in known]
    elif main in known or not needed:
        needed.insert(0, main)
    needed += ["input_ids"] if task == "multimodal" and "input_ids" in known else []
    outputs = task not in _LABELS and task != "causal"
    needed += ["decoder_input_ids"] if outputs and "input_ids" in needed and "decoder_input_ids" in known else []
    try:
        if unknown := next((name for name in needed if name not in _ARGUMENTS), None):
            raise InputError(f"its forward needs {unknown}, for which nothing is made up")
        inputs = {name: _ARGUMENTS[name](batch) for name in dict.fromkeys(needed)}
        if outputs or "labels" not in known:
            return inputs
        return inputs | {"labels": inputs["input_ids"] if task == "causal" else _LABELS[task](batch)}
    except InputError as error:
        raise InputError(
            f"hf:{kind}: {error}; give the model and its inputs by a function of yours, file.py:function"
        ) from None


def mean_square(output: Any) -> torch.Tensor:
    """Returns the loss of a model that computes none: the mean square of each tensor that it returns, added up."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    trained = [leaf.square().mean() for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    return torch.stack(trained or [torch.zeros(())]).sum()
