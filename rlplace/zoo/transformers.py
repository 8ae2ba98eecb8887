"""Models of the transformers library from their configuration classes: random weights, the head that is trained, inputs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, MissingError, unknown_name
from rlplace.zoo.options import parse_options, split_spec

_MAPPINGS = (
    ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("masked", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
)
"""Heads in order of preference: the pretraining head of a type, where there are several."""

_UNROLLED_SCAN = {"mamba": 64, "mamba2": 64, "falcon_mamba": 64, "jamba": 64}
"""Types whose recurrence is a Python loop over the sequence without their CUDA kernels, and the length they are cut to
unless the capture keeps the loop whole."""

_NO_POSITION_LIMIT = {"t5", "mt5", "umt5", "longt5", "switch_transformers"}
"""Types with relative positions: their configured length is that of pretraining, not a limit."""

_SMALL_IMAGE = 224

_CHECKPOINTING = "gradient_checkpointing"
"""Option beside the configuration: every layer runs its forward again in the backward."""


def load_transformers(text: str, batch: int, seq: int, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """Builds ``TYPE[,key=value...]``.

    Args:
        text: Type and options of its configuration.
        batch: Samples per step.
        seq: Tokens; refused when the model has fewer positions, cut to 64 where the model loops over tokens in Python, and to
            the decoder's length for speech models.
        device: "meta" or "cpu".

    Returns:
        The module in training mode, and keyword inputs with labels.
    """
    try:
        with _quiet():
            from transformers.models.auto import modeling_auto
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    except ImportError:
        raise MissingError(
            "hf: models need the transformers extra; install it with: pip install 'rlplace[transformers]'"
        ) from None
    kind, options = split_spec(text)
    if kind not in CONFIG_MAPPING_NAMES:
        raise unknown_name("transformers model type", kind, CONFIG_MAPPING_NAMES)
    with _quiet():
        checkpointing = parse_options(
            {key: options.pop(key) for key in (_CHECKPOINTING,) if key in options}, {_CHECKPOINTING: False}, f"hf:{kind}"
        )
        config = _configure(CONFIG_MAPPING[kind], kind, options)
        task = next((task for task, name in _MAPPINGS if type(config) in getattr(modeling_auto, name)), None)
        if task is None:
            raise InputError(
                f"hf:{kind}: has no language, speech or image head that can be trained from its configuration alone"
            )
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if task in ("seq2seq", "speech") and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        model_class = getattr(modeling_auto, dict(_MAPPINGS)[task])[type(config)]
        module = _build(model_class, config, kind, device)
        # The library warns once per process when the loss is looked up; do that while it is quiet.
        getattr(module, "loss_function", None)
        if checkpointing.get(_CHECKPOINTING):
            _enable_checkpointing(module, kind)
    return module.train(), _inputs(config, kind, task, batch, _length(config, kind, task, seq))


def _enable_checkpointing(module: Any, kind: str) -> None:
    try:
        enable = (
            getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        )  # the older name
        enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"hf:{kind}: {_CHECKPOINTING}: {_last_line(error)}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library warns about defaults that do not matter for random weights."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _configure(config_class: Any, kind: str, options: dict[str, str]) -> Any:
    try:
        config = config_class()
        names = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "transformers_version")}
        names |= {alias: getattr(config, name) for alias, name in config.attribute_map.items() if name in names}
        values = parse_options(options, names, f"hf:{kind}", extra=("num_labels", "attn_implementation"))
        for key, value in values.items():
            if type(value) is int and value < 0 and type(names.get(key)) is int and names[key] > 0:
                raise InputError(f"hf:{kind}: option {key} must not be negative, found {value}")
        return config_class(**values) if values else config
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"hf:{kind}: the configuration is refused: {_last_line(error)}") from None


def _build(model_class: Any, config: Any, kind: str, device: str) -> nn.Module:
    try:
        with torch.device(device):
            module: nn.Module = model_class(config)
    except MissingError:
        raise
    except ImportError as error:
        raise MissingError(f"hf:{kind}: needs another package: {_last_line(error)}") from None
    except Exception as error:
        raise InputError(f"hf:{kind}: cannot be built from this configuration: {_last_line(error)}") from None
    return module


def _length(config: Any, kind: str, task: str, seq: int) -> int:
    from rlplace.graph.scan import keeps_whole

    if task == "speech":
        return min(seq, int(getattr(config, "max_target_positions", seq) or seq))
    if kind in _UNROLLED_SCAN and not keeps_whole(kind):
        return min(seq, _UNROLLED_SCAN[kind])
    limit = getattr(config, "max_position_embeddings", None)
    if task == "image" or kind in _NO_POSITION_LIMIT or not isinstance(limit, int) or limit <= 0 or seq <= limit:
        return seq
    raise InputError(f"hf:{kind}: has {limit} positions, seq is {seq}; use --seq {limit} or max_position_embeddings={seq}")


def _inputs(config: Any, kind: str, task: str, batch: int, seq: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        return torch.randint(0, int(text_config.vocab_size), (batch, length), generator=generator)

    if task == "image":
        channels = int(getattr(config, "num_channels", 3))
        size = getattr(config, "image_size", None) or _SMALL_IMAGE
        height, width = (size, size) if isinstance(size, int) else tuple(int(s) for s in size)
        pixels = torch.rand((batch, channels, height, width), generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, int(config.num_labels), (batch,), generator=generator)}
    if task == "speech":
        bins = getattr(config, "num_mel_bins", None)
        frames = getattr(config, "max_source_positions", None)
        if bins is None or frames is None:
            raise InputError(
                f"hf:{kind}: only speech models that read mel spectrograms, like whisper, are built from a type name"
            )
        features = torch.rand((batch, int(bins), 2 * int(frames)), generator=generator)
        return {"input_features": features, "labels": tokens(seq)}
    if task == "causal":
        ids = tokens(seq)
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": tokens(seq), "labels": tokens(seq)}


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
