"""Models of the transformers library from their configuration classes: random weights, the head that is trained, inputs.

Inputs are synthetic batches of the arguments that a forward requires, with labels where its head computes a loss.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, MissingError, unknown_name
from rlplace.files import read_text
from rlplace.limits import CONFIG_BYTES
from rlplace.model.quantize import quantize
from rlplace.model.torch_adapter import pytree
from rlplace.model.zoo.adapters import add_adapters
from rlplace.model.zoo.functions import config_file, parse_options, split_spec

_SPECIAL = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
"""Tokens of images, video and sound, which a batch of text alone has not."""


class _Batch:
    """The sizes of a batch, and the generator of its values."""

    def __init__(self, config: Any, task: str, size: int, seq: int) -> None:
        self.config, self.task, self.size, self.seq = config, task, size, seq
        self.generator = torch.Generator().manual_seed(0)

    def setting(self, *names: str, default: Any = None) -> Any:
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
        high = int(
            getattr(self.config.get_text_config(decoder=True), "vocab_size", None) or self.setting("vocab_size", default=2)
        )
        ids = self.below(high, self.seq)
        for special in filter(None, (getattr(self.config, name, None) for name in _SPECIAL)):
            ids = torch.where(ids == special, (int(special) + 1) % high, ids)
        return ids

    def sides(self) -> tuple[int, int]:
        size = self.setting("image_size", "crop_size", default=224)
        height, width = (size, size) if isinstance(size, int) else size.values() if isinstance(size, dict) else size
        return int(height), int(width)

    def images(self) -> torch.Tensor:
        frames = self.setting("num_frames", "frames_per_clip", default=8 if self.task == "video" else None)
        video = [frames] if self.task == "video" or (self.task in ("contrastive", "outputs") and frames) else []
        return self.rand(*video, self.setting("num_channels", "in_channels", "in_chans", default=3), *self.sides())

    def sound(self) -> torch.Tensor:
        bins, length, strides = (
            self.setting("num_mel_bins"),
            self.setting("max_length"),
            self.setting("conv_stride", "upsampling_ratios"),
        )
        if bins is not None and length is not None:
            return self.rand(length, bins)
        samples, channels = self.seq * math.prod(strides or (320,)), self.setting("audio_channels")
        return self.rand(samples) if strides and channels is None else self.rand(channels or 1, samples)

    def spectrum(self) -> torch.Tensor:
        bins, frames = (
            self.setting("feature_projection_input_dim", "input_dim", "num_mel_bins"),
            self.setting("max_source_positions"),
        )
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
    "past_values": lambda batch: batch.rand(batch.setting("context_length"), batch.setting("num_input_channels", default=1)),
    "return_loss": lambda batch: True,
}
"""Makers of the arguments of a forward, by name."""

_LABELS: Mapping[str, Callable[[_Batch], torch.Tensor]] = {
    **dict.fromkeys(("speech", "seq2seq", "masked", "multimodal"), _Batch.tokens),
    **dict.fromkeys(("image", "video", "audio"), _Batch.classes),
    "pixels": lambda batch: batch.classes(*batch.sides()),
    "words": lambda batch: batch.classes(batch.seq),
}
"""Makers of the targets of a head; "causal" has its own tokens, all others outputs of zero."""


def inputs_of(module: nn.Module, config: Any, kind: str, task: str, size: int, seq: int) -> dict[str, Any]:
    """Makes the keyword inputs of one step: all that the forward cannot run without, then labels.

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


Loss = Callable[[Any], torch.Tensor]

_HEADS = (
    ("speech", "SPEECH_SEQ_2_SEQ"), ("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM"), ("masked", "MASKED_LM"), ("causal", "CAUSAL_LM"),
    ("multimodal", "IMAGE_TEXT_TO_TEXT"), ("contrastive", "ZERO_SHOT_IMAGE_CLASSIFICATION"), ("image", "IMAGE_CLASSIFICATION"),
    ("ctc", "CTC"), ("video", "VIDEO_CLASSIFICATION"), ("audio", "AUDIO_CLASSIFICATION"), ("detection", "OBJECT_DETECTION"),
    ("pixels", "SEMANTIC_SEGMENTATION"), ("masks", "UNIVERSAL_SEGMENTATION"), ("masks", "MASK_GENERATION"),
    ("words", "TOKEN_CLASSIFICATION"),
)  # fmt: skip
"""Heads in order of preference, with their mapping in the library: the pretraining head of a type, where there are several.
A type with none of them is trained towards outputs of zero, with any other head or without one."""

_UNROLLED_SCAN = {"mamba": 64, "mamba2": 64, "falcon_mamba": 64, "jamba": 64}
"""Types whose recurrence is a Python loop over the sequence without their CUDA kernels, and the length they are cut to
unless the capture keeps the loop whole."""

_NO_POSITION_LIMIT = {"t5", "mt5", "umt5", "longt5", "switch_transformers"}
"""Types with relative positions: their configured length is that of pretraining, not a limit."""

_NO_SEQUENCE = frozenset({"image", "video", "audio", "ctc", "pixels", "masks", "detection"})

_CHECKPOINTING = "gradient_checkpointing"
"""Option beside the configuration: every layer runs its forward again in the backward."""


def load_transformers(text: str, batch: int, seq: int, device: str) -> tuple[nn.Module, dict[str, Any], Loss | None]:
    """Builds ``TYPE[,key=value...]``; ``text_config.num_hidden_layers=2`` reaches into a configuration inside.

    The JSON file of a configuration, or its folder, may be in place of the type. ``lora.r=16,lora.targets=q_proj+v_proj`` adds
    adapters by PEFT and freezes the rest; ``quantize=nf4`` packs the frozen linear layers but the head.

    Args:
        text: Type, file or folder, and options of the configuration.
        batch: Samples per step.
        seq: Tokens; refused when the model has fewer positions, cut to 64 where the model loops over tokens in Python, and to
            the decoder's length for speech models.
        device: "meta" or "cpu".

    Returns:
        The module in training mode, keyword inputs with labels, and the loss of a model that computes none.
    """
    try:
        with _quiet():
            from transformers.models.auto import modeling_auto
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    except ImportError:
        install = "pip install 'rlplace[transformers]'"
        raise MissingError(f"hf: models need the transformers extra; install it with: {install}") from None
    kind, options = split_spec(text)
    base: dict[str, Any] = {}
    if "/" in kind or kind.endswith(".json"):
        kind, base = read_config(kind, CONFIG_MAPPING_NAMES)
    if kind not in CONFIG_MAPPING_NAMES:
        raise unknown_name("transformers model type", kind, CONFIG_MAPPING_NAMES)
    with _quiet():
        apart = {key: options.pop(key) for key in (_CHECKPOINTING,) if key in options}
        quantized = options.pop("quantize", None)
        lora = {key.removeprefix("lora."): options.pop(key) for key in [*options] if key.startswith("lora.")}
        checkpointing = parse_options(apart, {_CHECKPOINTING: False}, f"hf:{kind}")
        config = _configure(CONFIG_MAPPING[kind], kind, options, base)
        task, model_class = _head(modeling_auto, config, kind)
        wanted = model_class.config_class or object
        if not isinstance(config, wanted) and isinstance(part := config.get_text_config(decoder=True), wanted):
            config = part  # of a type that holds several
        parts = [config]
        for part in parts:
            parts += _parts(part).values()
            if hasattr(part, "use_cache"):
                part.use_cache = False
        if task in ("seq2seq", "speech") and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        module = _build(model_class, config, kind, device)
        # The library warns once per process when the loss is looked up; do that while it is quiet.
        getattr(module, "loss_function", None)
        if checkpointing.get(_CHECKPOINTING):
            _enable_checkpointing(module, kind)
    inputs = inputs_of(module, config, kind, task, batch, _length(config, kind, task, seq))
    loss = None if "labels" in inputs or "return_loss" in inputs else mean_square
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if lora:
        with _quiet(), torch.device(device):
            module = add_adapters(module, lora, kind)
    if quantized is not None:
        quantize(module, quantized, () if head is None else (head,))
    return module.train(), inputs, loss


_NOT_BUILT = ("model_type", "transformers_version", "auto_map", "quantization_config", "dtype", "torch_dtype")
"""Keys of a configuration's file that are not about the architecture: other code, and the storage of weights."""


def read_config(name: str, known: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Returns the type and the arguments of a configuration in a file.

    Args:
        name: A JSON file, or a folder with a ``config.json``.
        known: All types.

    Raises:
        InputError: There is no such file, or it is no configuration.
    """
    path = config_file(f"hf:{name}")
    if path is None:
        words = name.lower().replace("-", "_")
        like = max((kind for kind in known if kind.replace("-", "_") in words), key=len, default="llama")
        raise InputError(
            f"hf:{name[:200]}: no such file, and nothing is downloaded: take a type with options, such as hf:{like}, or the "
            "model's configuration, hf:path/to/config.json"
        )
    try:
        data = json.loads(read_text(path, CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, InputError) else InputError(f"{path}: no JSON: {_last_line(error)}") from None
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{path}: says no model_type, so it is no configuration of transformers; name a model's config.json")
    return kind, {key: value for key, value in data.items() if key not in _NOT_BUILT}


def _head(modeling_auto: Any, config: Any, kind: str) -> tuple[str, Any]:
    """Returns the task of a configuration, and its class: the one that its file names, else the first that the library
    holds.
    """
    others = (name for name in sorted(vars(modeling_auto), reverse=True) if name.endswith("_MAPPING"))
    known = ((task, f"MODEL_FOR_{name}_MAPPING") for task, name in _HEADS)
    named, first = (getattr(config, "architectures", None) or [None])[0], None
    for task, name in (*known, *(("outputs", name) for name in others)):
        mapping: Any = getattr(modeling_auto, name, {})
        if type(config) not in mapping:
            continue
        found = mapping[type(config)]
        for each in found if isinstance(found, tuple) else (found,):
            first = first or (task, each)
            if named is None or each.__name__ == named:
                return task, each
    if first is None:
        raise InputError(
            f"hf:{kind}: has no head that the library trains, only its configuration, as a part of other types; name one of "
            "those"
        )
    return first


def _parts(config: Any) -> dict[str, Any]:
    """Returns the configurations that a configuration holds."""
    held = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()}
    return {name: part for name, part in held.items() if hasattr(part, "to_diff_dict")}


def _enable_checkpointing(module: Any, kind: str) -> None:
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable  # its older name
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"hf:{kind}: {_CHECKPOINTING}: {_last_line(error)}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes warnings of the library about defaults that do not matter for random weights."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _configure(config_class: Any, kind: str, options: dict[str, str], base: dict[str, Any]) -> Any:
    try:
        types = {key: options.pop(key) for key in [*options] if key.endswith("_config.model_type")}
        base = base | {key.partition(".")[0]: {"model_type": part} for key, part in types.items()}
        config = config_class(**base)
        names = _names(config)
        extra = ("num_labels", "attn_implementation", *_read_if_there(config_class))
        values = types | parse_options(options, names, f"hf:{kind}", extra)
        for key, value in values.items():
            if type(value) is int and value < 0 and type(names.get(key)) is int and names[key] > 0:
                raise InputError(f"hf:{kind}: option {key} must not be negative, found {value}")
        nested = _nested(config, values)
        try:
            return config_class(**base | nested) if values else config
        except Exception:  # lists with an element a layer
            if "num_hidden_layers" not in values:
                raise
            return config_class(**base | _cut(config, config.to_dict(), values) | nested)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"hf:{kind}: the configuration is refused: {_last_line(error)}") from None


def _read_if_there(config_class: Any) -> Iterator[str]:
    """Yields options that a type's models read and its configuration does not list, as that of Qwen3-30B-A3B sets."""
    code = Path(inspect.getfile(config_class)).parent.glob("modeling_*.py")
    if any('getattr(config, "head_dim"' in path.read_text("utf-8") for path in code):
        yield "head_dim"


def _names(config: Any) -> dict[str, Any]:
    """Returns all options with their defaults; ``part.name`` for those of a configuration inside."""
    names = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "transformers_version")}
    names |= {alias: getattr(config, name) for alias, name in config.attribute_map.items() if name in names}
    return names | {f"{part}.{key}": value for part, inner in _parts(config).items() for key, value in _names(inner).items()}


def _nested(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns options as arguments of the class: a part that is reached into keeps what it sets beside them."""
    result = {key: value for key, value in values.items() if "." not in key}
    for name, part in _parts(config).items():
        own = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        if own:
            kept = {} if "model_type" in own else part.to_diff_dict()
            result[name] = kept | _cut(part, kept, own) | _nested(part, own)
    return result


def _cut(config: Any, held: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns the lists of a configuration with an element a layer, for another number of layers."""
    old, new = getattr(config, "num_hidden_layers", None), values.get("num_hidden_layers", 0)
    return {key: value[:new] for key, value in held.items() if isinstance(value, list) and len(value) == old and new}


def _build(model_class: Any, config: Any, kind: str, device: str) -> nn.Module:
    try:
        with torch.device(device):
            module: nn.Module = model_class(config)
    except ImportError as error:
        raise MissingError(f"hf:{kind}: needs another package: {_last_line(error)}") from None
    except Exception as error:
        raise InputError(f"hf:{kind}: cannot be built from this configuration: {_last_line(error)}") from None
    return module


def _length(config: Any, kind: str, task: str, seq: int) -> int:
    from rlplace.model.capture.whole_ops import keeps_whole

    if task == "speech":
        return min(seq, int(getattr(config, "max_target_positions", seq) or seq))
    exact = math.prod(getattr(config, "axial_pos_shape", ())) if kind == "reformer" else None
    exact = config.max_position_embeddings if kind == "perceiver" and task == "masked" else exact
    if exact is not None and exact != seq:
        option = "max_position_embeddings" if kind == "perceiver" else "axial_pos_shape=A/B, whose product is the length,"
        raise InputError(f"hf:{kind}: trains on exactly {exact} positions, seq is {seq}; use --seq {exact} or set {option}")
    if kind in _UNROLLED_SCAN and not keeps_whole(kind):
        return min(seq, _UNROLLED_SCAN[kind])
    limit = getattr(config, "max_position_embeddings", None)
    if task in _NO_SEQUENCE or kind in _NO_POSITION_LIMIT or not isinstance(limit, int) or limit <= 0 or seq <= limit:
        return seq
    raise InputError(f"hf:{kind}: has {limit} positions, seq is {seq}; use --seq {limit} or max_position_embeddings={seq}")


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
