"""Low-rank adapters by PEFT on models of transformers, by options beside those of the configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlplace.errors import InputError, MissingError, show
from rlplace.model.zoo.functions import first_line, parse_options

_KNOWN = {"r": 8, "alpha": 8, "dropout": 0.0, "targets": ""}
"""Settings of adapters, with PEFT's defaults; its own targets of the type where none are named."""


def with_options(model: str, lora: str | None, quantize: str | None) -> str:
    """Returns a MODEL text with adapters, of which `lora` is such as ``r=16,targets=q_proj+v_proj``, and packed weights.

    Raises:
        InputError: The model is not one of transformers by its type.
    """
    if not model.startswith("hf:"):
        own = "peft.get_peft_model(...)" if lora else "rlplace.model.quantize.quantize(...)"
        raise InputError(
            f"--{'lora' if lora else 'quantize'} is for hf: models, found {show(model, 80)}; name a configuration's file by "
            f"hf:PATH, or let your function return {own}"
        )
    parts = [f"lora.{part}" for part in (lora or "").split(",") if part]
    return ",".join([model, *parts, *([f"quantize={quantize}"] if quantize else ())])


def add_adapters(module: nn.Module, options: dict[str, str], kind: str) -> nn.Module:
    """Freezes a model and adds adapters.

    Args:
        module: Real or meta module; its layers are replaced in place.
        options: Texts of the settings.
        kind: Type of the model, for messages.

    Raises:
        InputError: An unknown setting, or targets that the model does not have.
        MissingError: PEFT is not installed.
    """
    values: dict[str, Any] = parse_options(options, _KNOWN, f"hf:{kind}: lora")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingError("adapters need the peft extra; install it with: pip install 'rlplace[peft]'") from None
    given = {f"lora_{key}" if key in ("alpha", "dropout") else key: value for key, value in values.items() if key != "targets"}
    targets = values.get("targets")
    chosen = None if targets is None else targets if targets == "all-linear" else targets.split("+")
    try:
        adapted: nn.Module = get_peft_model(module, LoraConfig(**given, target_modules=chosen))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise InputError(
            f"hf:{kind}: lora: {first_line(error)}; name layers by their last name, targets=q_proj+v_proj"
        ) from None
    return adapted
