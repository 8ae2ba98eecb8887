"""The text of a training script, as a template; a part is written only where the strategy needs it."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment

_SCRIPT = '''\
{% for name, value in constants.items() %}
{{ name }} = {{ value }}
{% endfor %}


{% if own_loss %}
loss_of = {{ own_loss }}


{% endif %}
def build_model():
    """The model with random weights, which depend on the seed alone."""
    torch.manual_seed(SEED)
{% for line in build %}
    {{ line }}
{% endfor %}


def whole_batch(step):
    """{{ what }} where your data goes: the whole batch of a step, the same on every process."""
{% for line in batch %}
    {{ line }}
{% endfor %}


{% for code in sources %}
{{ code }}

{% endfor %}
{% if several %}
class Stage(nn.Module):
    """The model with the blocks of one stage: takes what the stage before made where the model takes {{ first }}."""

    def __init__(self, model, last):
        super().__init__()
        self.model, self.last = model, last

    def forward(self, hidden=None, **inputs):
        if hidden is not None:
            del inputs["{{ first }}"]
            inputs["{{ hidden }}"] = hidden
        if not self.last:
            inputs.pop("labels", None)
        with torch.autocast(inputs[next(iter(inputs))].device.type, torch.bfloat16, enabled=AUTOCAST, cache_enabled=False):
            output = self.model(**inputs)
        if self.last:
            return {{ loss }}.reshape(1).double()
        return output{{ ".logits" if loss == "output.loss" else "" }}.clone()  # a split backward cannot detach a view


{% endif %}
{% if tied %}
def groups_of_ties(mesh):
    """For every weight that stages share, the processes that hold the same part of it."""
    groups = []
    for names in TIED:
        places = sorted({place for place, held in enumerate(HELD) if set(names) & set(held)})
        columns = mesh.mesh[places].reshape(len(places), -1).T.tolist()
        made = [dist.new_group(ranks) for ranks in columns]
        groups.append(next((group for ranks, group in zip(columns, made) if dist.get_rank() in ranks), None))
    return groups


def sum_tied_gradients(stages, groups):
    """Every stage has a copy of a weight that it shares; the copies' gradients are summed."""
    for names, group in zip(TIED, groups):
        grads = [stages[n].model.get_parameter(name).grad for n, name in names.items() if n in stages]
        if grads:
            local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            total = torch.stack(local).sum(0)
            dist.all_reduce(total, group=group)
            for grad in local:
                grad.copy_(total)


{% endif %}
def parallelize({{ "root, model, blocks" if several else "model" }}, mesh, device):
    """Torch's order: tensor layouts, recomputation, then the data axes, block by block."""
{% for names, call in wraps %}
    for name in {{ "(name for name in %s if name in blocks)" % names if several else names }}:
        block = model.get_submodule(name)
        {{ call }}
{% endfor %}
    return {{ whole }}


{% if several %}
def make_stage(number, mesh, device):
    """The model with the blocks of one stage, and torch's wrappers on it."""
    model = build_model()
    for other, blocks in enumerate(STAGES):
        for name in blocks if other != number else ():
            model.set_submodule(name, Elsewhere())
    stage = Stage(model.to(device), number == len(STAGES) - 1)
    return parallelize(stage, model, STAGES[number], mesh, device)


def torch_stage(module, number, mesh, device):
    """Torch's stage; examples of what is handed on, so that no forward has to be run to know it."""
    hidden = torch.empty(**HIDDEN, device=device, requires_grad=True)
    taken = (hidden,) if number else ()
    loss = torch.empty(1, dtype=torch.float64, device=device, requires_grad=True)
    given = hidden if number < len(STAGES) - 1 else loss
    group = mesh["pipeline"].get_group()
    return PipelineStage(module, number, len(STAGES), device, input_args=taken, output_args=(given,), group=group)


{% endif %}
def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = {{ mesh }}
    replica = {{ replica }}
{% if several %}
    held = {n: make_stage(n, mesh, device) for n in HELD[mesh["pipeline"].get_local_rank()]}
    stages = [torch_stage(module, n, mesh, device) for n, module in held.items()]
    schedule = {{ schedule.torch_class }}(
        stages{{ "[0]" if schedule.layout == "one" else "" }},
        MICROBATCHES,
        loss_fn=lambda loss, target: loss.sum() / MICROBATCHES,
        scale_grads=False,
    )
{% if tied %}
    groups = groups_of_ties(mesh)
{% endif %}
    parameters = [p for module in held.values() for p in module.parameters()]
{% else %}
    model = parallelize(build_model().to(device), mesh, device)
{% endif %}
    torch.manual_seed(SEED + 1 + replica)  # dropout is unlike on replicas
    optimizer = torch.optim.{{ optimizer }}
    for step in range(steps):
        mine = {name: value.chunk(REPLICAS)[replica].to(device) for name, value in whole_batch(step).items()}
        losses = []
{% if several %}
        schedule.step(**mine, target=torch.arange(MICROBATCHES), losses=losses, return_outputs=False)
{% else %}
        for number in range(MICROBATCHES):
            part = {name: value.chunk(MICROBATCHES)[number] for name, value in mine.items()}
            last = number == MICROBATCHES - 1
{% if asked.stage.data_degree > 1 and not copies %}
            model.set_is_last_backward(last)
{% if asked.stage.sharding < 2 %}
            model.set_requires_gradient_sync(last)  # gradients are reduced once a step
            model.set_reshard_after_backward(last)
{% endif %}
{% endif %}
{% set reduced = "contextlib.nullcontext() if last else model.no_sync(), " if copies else "" %}
            with {{ reduced }}torch.autocast(device.type, torch.bfloat16, enabled=AUTOCAST, cache_enabled=False):
                output = model(**part)
                value = {{ loss }} / MICROBATCHES
            value.backward()
            losses.append(value.detach())
{% endif %}
{% if tied %}
        sum_tied_gradients(held, groups)
{% endif %}
        optimizer.step()
        optimizer.zero_grad()
        loss = sum(losses, torch.zeros((), dtype=torch.float64, device=device)).detach()
        dist.all_reduce(loss)
        loss /= {{ counted }}
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.12g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_HEAD = '''\
"""Trains {{ asked.recipe.model }}: {{ words }}.

Start it with: torchrun --nproc-per-node {{ asked.plan.strategy.devices | length }} SCRIPT [STEPS]
Written by rlplace for plan {{ asked.plan.fingerprint[:12] }}; plain torch{{ also }}.
"""

{{ imports }}
{{ model_import }}

'''

_IMPORTS = (
    ("import contextlib", "contextlib"),
    ("import os", "os"),
    ("import sys", "sys"),
    ("from functools import partial", "partial"),
    ("", ""),
    ("import torch", "torch"),
    ("import torch.distributed as dist", "dist"),
    ("from torch import nn", "nn"),
    ("from torch.distributed._composable.replicate_with_fsdp import {}", "replicate"),
    ("from torch.distributed.device_mesh import {}", "DeviceMesh init_device_mesh"),
    ("from torch.distributed.fsdp import {}", "CPUOffloadPolicy fully_shard"),
    ("from torch.distributed.pipelining import {}", "PipelineStage Schedule\\w+"),
    ("from torch.distributed.tensor import {}", "DTensor Replicate Shard"),
    (
        "from torch.distributed.tensor.parallel import {}",
        "ColwiseParallel PrepareModuleInput PrepareModuleOutput RowwiseParallel SequenceParallel parallelize_module",
    ),
    ("from torch.nn.parallel import {}", "DistributedDataParallel"),
    ("from torch.utils.checkpoint import {}", "CheckpointPolicy checkpoint create_selective_checkpoint_contexts"),
)


def script_text(**values: Any) -> str:
    """Returns the script; `values` are those that the template names."""
    templates = Environment(trim_blocks=True, keep_trailing_newline=True)
    body = templates.from_string(_SCRIPT).render(values)
    lines = []
    for line, names in _IMPORTS:
        used = [match.group() for name in names.split() if (match := re.search(rf"(?<![\w.\"]){name}(?=[(.,)\]])", body))]
        if used or not names:
            lines.append(line.format(", ".join(used)))
    return templates.from_string(_HEAD).render(values, imports="\n".join(lines)) + body
