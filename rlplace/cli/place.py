"""``rlplace place``: from a model and a cluster to a plan, the whole strategy or a placement."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.cli.models import (
    asked_batch,
    capture_sizes,
    compile_first,
    costs_of,
    load,
    machine_of,
    note_machine,
)
from rlplace.cli.options import MODEL, ModelOptions, argument, flag, natural, option, positive, print_json, say, seconds
from rlplace.cli.plan_tables import show_memory, show_placement, show_strategy
from rlplace.errors import InfeasibleError, InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.schedule import SCHEDULES
from rlplace.plan.strategy import uniform_words
from rlplace.text import gb, ms

if TYPE_CHECKING:
    from rlplace.captured import CapturedModel
    from rlplace.cluster import Cluster
    from rlplace.cost.footprint import Footprint
    from rlplace.placement.ask import Placed
    from rlplace.strategy.search.tries import SearchProblem


KERNELS = ("foreach", "fused", "single")


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(ModelOptions):
    """Options of the verb."""

    HELP = "plan how the devices of a cluster train a model"
    EXAMPLE = "example: rlplace place hf:gpt2 --cluster a100-80g:4 --out gpt2.plan.json"

    model: str = argument("MODEL", f"{MODEL}, *.problem.json")
    cluster: str | None = option("KIND:COUNT, KIND:HOSTSxCOUNT, joined by +; host (default); *.toml", None, "C")
    planner: str = option("planner (agent); 'rlplace info' lists them", None, "NAME", default="agent")
    agent: str | None = option("places groups: checkpoint name or folder (default)", None, "NAME")
    time_limit: float | None = option("seconds for the planner (5, with --calls no limit)", seconds, "S")
    seed: int = option("seed (0)", natural, "N", default=0)
    microbatches: int | None = option("micro-batches of a replica (chosen)", positive, "M")
    schedule: str | None = option("how micro-batches take turns (chosen)", choices=SCHEDULES)
    batch_curve: str | None = option("epochs by batch: the batch is chosen, too, from --batch (8) up", None, "FILE")
    space: str | None = option(
        'what may be chosen: auto (default, all that can run), all, or "tensor=1,2 sharding=0"; placement: groups instead',
        None,
        "S",
    )
    calls: int | None = option("plans to simulate at most: the answer is then the same every time", positive, "N")
    couple: str = option(
        "a loss that couples samples is computed over those of a replica (default), or of the whole batch",
        choices=("replica", "gather"),
        default="replica",
    )
    buffers: str = option(
        "where a forward writes buffers by its samples: keep batches whole (default), or let every replica write its own",
        choices=("whole", "replica"),
        default="whole",
    )
    statistics: str = option(
        "what BatchNorm normalizes by: the samples of a replica, as DDP does (default), or of all replicas",
        choices=("replica", "batch"),
        default="replica",
    )
    release_gradients: bool = flag("update each parameter in the backward, and free its gradient: one micro-batch a step")
    memory: bool = flag("show what fills the memory of the devices, kind by kind")
    alloc_conf: str = option(
        "with --memory, for placements: PYTORCH_CUDA_ALLOC_CONF, as in expandable_segments:True", None, "TEXT", default=""
    )
    optimizer_kernel: str | None = option("likewise: how the optimizer updates (foreach)", choices=KERNELS)
    out: str | None = option("write the plan", None, "P.plan.json")

    def check(self) -> None:
        """Refuses options that contradict each other."""
        from rlplace.cost.allocator import AllocatorOptions
        from rlplace.files import check_output

        if self.out:
            check_output(self.out)
        placements = self.placement_reason is not None
        AllocatorOptions.parse(self.alloc_conf)
        for name in self.given(("alloc_conf", "optimizer_kernel")):
            if not self.memory:
                raise InputError(f"{name} describes the memory table; add --memory, or leave it out")
            if not placements:
                raise InputError(f"{name} is about torch's allocator, which is replayed for placements; add --space placement")

    @property
    def placement_reason(self) -> str | None:
        """The reason why placements are asked for; None where whole strategies are."""
        from rlplace.api import PLACEMENT, why_placement

        if self.model.endswith(".problem.json"):
            if self.space not in (None, PLACEMENT):
                raise InputError(f"{self.model} is placed group by group; leave --space out, or name the model instead")
            return why_placement(self.planner, PLACEMENT) and "a problem file has groups only"
        return why_placement(self.planner, self.space, self.given(("agent", "granularity")))

    @property
    def limit_s(self) -> float | None:
        """Seconds for the planner; None: no limit."""
        return 5.0 if self.time_limit is None and self.calls is None else self.time_limit

    def run(self) -> int:
        """Runs the verb."""
        reason = self.placement_reason
        plan, show = answer(self) if reason is None else _place_groups(self, reason)
        if self.out:
            plan.save(self.out)
            say(f"wrote {self.out}")
        if self.json:
            print_json(plan.to_dict())
        else:
            show()
        return 0


def answer(options: PlaceOptions) -> tuple[PlacementPlan, Callable[[], None]]:
    """Returns the best strategy, or a quicker placement, and a function that prints it."""
    (best, placed), machine = _place_strategy(options), machine_of(options.cluster)
    if placed is None:
        return best, functools.partial(show_strategy, best, machine)

    plan, footprints = _with_memory(placed, options) if options.memory else (placed.plan, [])

    def show() -> None:
        show_placement(plan, placed.problem)
        assert best.strategy is not None
        words, finer = uniform_words(best.strategy), plan.predicted.op_level or plan.predicted
        own = f"branches side by side take {ms(finer.step_s)} ms op by op"
        print(f"{own}, the best strategy {ms(best.predicted.step_s)} ms ({words}); --planner strategy plans that one")
        show_memory(footprints)

    return plan, show


def _place_strategy(options: PlaceOptions) -> tuple[PlacementPlan, Placed | None]:
    """Plans the whole strategy that the options ask for; the answer may be a quicker placement."""
    from rlplace.api import FIXED, PER_DEVICE, allowed_space, default_batch, plan_model
    from rlplace.strategy.search.efficiency import BatchCurve

    fixed = {name: getattr(options, name) for name in FIXED}
    allowed_space(options.space, fixed, options.planner)  # contradictions are refused before the capture
    machine = machine_of(options.cluster)
    costs = costs_of(options, machine)
    note_machine(options.cluster, machine)
    curve = BatchCurve.load(options.batch_curve) if options.batch_curve else None
    batch, samples = asked_batch(options.model, options)
    if batch is None and curve is None:
        batch = default_batch(machine)
        say(f"no --batch: {batch} samples a step, {PER_DEVICE} a device")
    compile_first("strategy")
    captured = capture_sizes(options.model, options, samples)
    say(f"captured {captured.graph.num_ops} ops by {captured.graph.capture['method']}; choosing the strategy")
    with _progress_line() as progress:
        return plan_model(
            captured, machine, space=options.space, fixed=fixed, planner=options.planner, batch=batch, curve=curve,
            calls=options.calls, groups=options.granularity, time_limit_s=options.limit_s,
            seed=options.seed, costs=costs, host=options.host_mode, progress=progress, couple=options.couple,
            buffers=options.buffers, statistics=options.statistics, memory=options.memory,
            release_gradients=options.release_gradients,
        )  # fmt: skip


def question_of(captured: CapturedModel, machine: Cluster, batch: int, *, costs: Any, host: str, **asked: Any) -> SearchProblem:
    """Returns the search problem of a captured model; `asked` is as for `rlplace.api.what_may_be`."""
    from rlplace.api import what_may_be
    from rlplace.strategy.search.plan import ask

    return ask(cluster=machine, batch=batch, costs=costs, host=host, **what_may_be(captured, **asked))


@contextlib.contextmanager
def _progress_line() -> Iterator[Callable[[int, float], None] | None]:
    """Yields a function that shows the progress of a search in one line of a terminal; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def write(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def report(calls: int, best_s: float) -> None:
        write(f"{calls} strategies simulated" + (f", the best takes {ms(best_s)} ms" if math.isfinite(best_s) else ""))

    try:
        yield report
    finally:
        write("")


def _place_groups(options: PlaceOptions, reason: str) -> tuple[PlacementPlan, Callable[[], None]]:
    """Returns the best placement, and a function that prints it."""
    from rlplace.agents.checkpoint import load_checkpoint
    from rlplace.api import WHOLE_LOSS
    from rlplace.explanation.compare.rows import takes_calls
    from rlplace.placement.ask import place_priced

    for name in options.given(("batch_curve", "microbatches", "schedule")):
        raise InputError(f"{name} is for whole strategies, these are placements ({reason}); leave it out")
    if options.couple == "gather":
        raise InputError(f"--couple gather is for replicas, {WHOLE_LOSS} ({reason}); leave --couple out")
    if options.release_gradients:
        raise InputError(f"--release-gradients is for strategies, these are placements ({reason}); leave it out")
    extra: dict[str, Any] = {}
    if options.planner == "agent":
        extra["agent"] = options.agent or "default"
        load_checkpoint(extra["agent"])  # one that is missing or damaged is refused before any work
        compile_first()
    if options.calls is not None:
        if not takes_calls(options.planner):
            raise InputError(f"planner {options.planner} is no search, and simulates what it needs; leave --calls out")
        extra["calls"] = options.calls
    loaded = load(options.model, options.cluster, options, runs=True)
    say(f"planning with {options.planner}")
    try:
        placed = place_priced(loaded, planner=options.planner, seed=options.seed, time_limit_s=options.limit_s, **extra)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error}; '{_explain_command(options)}' says what would make it fit",
            device=error.device,
            short_bytes=error.short_bytes,
        ) from None
    plan, footprints = _with_memory(placed, options) if options.memory else (placed.plan, [])
    if not options.memory:
        _warn_of_update(placed, options)
    notes = []
    if loaded.graph is not None:
        from rlplace.strategy.search.remarks import bf16_note, without_bf16

        kinds = without_bf16(loaded.graph, machine_of(options.cluster), np.unique(plan.device_of_group).tolist())
        notes = [bf16_note(loaded.graph, kinds)] if kinds else []
    question = f"question: which device each group of ops runs on ({reason})"
    if options.json:
        say(question)

    def show() -> None:
        show_placement(plan, placed.problem)
        print(question + ("" if loaded.graph is None else "; --space auto asks for the whole strategy"))
        for note in notes:
            print(f"note: {note}")
        show_memory(footprints)

    return plan, show


def _explain_command(options: PlaceOptions) -> str:
    """Returns the command that looks for what would make the model fit."""
    from rlplace.api import PLACEMENT

    words = ["rlplace", "explain", options.model]
    words += ["--cluster", options.cluster] if options.cluster else []
    words += [] if options.model.endswith(".problem.json") else ["--space", PLACEMENT]
    return shlex.join([*words, *options.model_words()])


def _with_memory(placed: Placed, options: PlaceOptions) -> tuple[PlacementPlan, list[Footprint]]:
    """Returns the plan with ``predicted.memory``, and the footprints in it: op by op where the graph is known, else by task."""
    from rlplace.cost.allocator import AllocatorOptions
    from rlplace.cost.footprint import MemoryOptions, footprint

    settings = MemoryOptions(
        allocator=AllocatorOptions.parse(options.alloc_conf), optimizer_kernel=options.optimizer_kernel or "foreach"
    )
    plan, problem = placed.plan, placed.problem
    whole = plan
    if placed.op_problem is not None:
        problem = placed.op_problem
        # Priority and order number tasks, not ops.
        whole = dataclasses.replace(plan, problem=problem.fingerprint, priority=None, order=None)
    footprints = footprint(problem, whole, graph=placed.graph, options=settings)
    return plan.with_predicted(plan.predicted.replace(memory=tuple(item.to_dict() for item in footprints))), footprints


def _warn_of_update(placed: Placed, options: PlaceOptions) -> None:
    """Says so when the plan fits but torch's default optimizer update on an accelerator would not."""
    from rlplace.cost.contract import foreach_update_bytes

    if placed.graph is None:
        return
    needed = foreach_update_bytes(
        placed.problem, placed.plan, str(placed.graph.capture["optimizer"]), master_weights=options.master_weights
    )
    for device, size in zip(placed.problem.devices, needed.tolist(), strict=True):
        if device.memory_bytes is not None and size > device.memory_bytes and device.kind != "cpu":
            say(
                f"note: on {device.name} the optimizer's foreach update needs {gb(size)} of "
                f"{gb(device.memory_bytes)} GB; make the optimizer with fused=True or foreach=False, or place with "
                "--memory to see it all"
            )
