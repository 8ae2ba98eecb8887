"""Texts of the cards of rlplace's own planners."""

from __future__ import annotations

from dataclasses import dataclass

_HEURISTICS = "docs/planners.md"
_FLOOR = "It starts from the plan of best, whose own simulations and time are in no budget."


@dataclass(frozen=True)
class Ours:
    """Texts of a card.

    Attributes:
        kind, method, link: See `benchmarks.leaderboard.records.Card`.
    """

    kind: str
    method: str
    link: str


OURS = {
    "best": Ours(
        "heuristic",
        "The best plan of ten one-shot planners, each with the shared repair of memory: the floor of rlplace.",
        _HEURISTICS,
    ),
    "heft": Ours(
        "heuristic",
        "HEFT (Topcuoglu, Hariri, Wu 2002): ops by falling upward rank, each where it finishes earliest; the first op of "
        "a group decides for all. Candidates on several numbers of devices are simulated and the best one is kept.",
        "https://doi.org/10.1109/71.993206",
    ),
    "critical_path": Ours(
        "heuristic",
        "The longest chain stays on one device until it is full, the rest is placed as by HEFT (the rule that FastT uses, "
        "2020). Candidates on several numbers of devices are simulated and the best one is kept.",
        _HEURISTICS,
    ),
    "m_etf": Ours(
        "heuristic",
        "m-ETF (Baechi, Jeon et al. 2020): of ready ops and devices with room the pair that starts earliest goes next, a "
        "whole group with its first op.",
        _HEURISTICS,
    ),
    "metis": Ours(
        "heuristic",
        "METIS (Karypis, Kumar 1998): parts of equal work with the least traffic; candidates differ in their number, "
        "weights and imbalance, and the simulator picks.",
        _HEURISTICS,
    ),
    "balanced": Ours(
        "heuristic",
        "The topological order is cut into one segment a device, the longest as short as possible, or compute plus "
        "transfers as small as possible; the simulator picks.",
        _HEURISTICS,
    ),
    "single": Ours(
        "heuristic",
        "Everything on the fastest device that holds the model; no plan where none does, or only with a slow one.",
        _HEURISTICS,
    ),
    "compiler": Ours(
        "heuristic",
        "The compiler's partition of Tavarageri, Sridharan, Kaul (2019), reconstructed from its abstract: little traffic "
        "and equal loads by multilevel Fiduccia-Mattheyses, also in bands; the simulator picks among such plans. The "
        "assistants at run time are left out: a plan cannot hold them.",
        "https://arxiv.org/abs/1906.08168",
    ),
    "pardnn": Ours(
        "heuristic",
        "ParDNN (Qararyah et al. 2021): the graph is sliced into heavy paths, the rest is mapped by locality and load, "
        "memory is repaired by moving groups. Three views of the groups and several numbers of devices are tried and the "
        "simulator picks.",
        "https://arxiv.org/abs/2008.08636",
    ),
    "dlplacer": Ours(
        "exact",
        "DLPlacer (Pal et al. 2019), its program reconstructed: the graph is shrunk to at most 64 nodes, an exact "
        "placement program is solved by CP-SAT within the time, its solutions are simulated and repaired. The plan of "
        "best is its hint and one of its candidates, so it is never worse; the time of best is in its budget.",
        "https://arxiv.org/abs/1907.13257",
    ),
    "bipartition": Ours(
        "heuristic",
        "Bi-Partition (Cui et al. 2023), reconstructed: forward and backward passes of a chain of layers cut at different "
        "layers by dynamic programming. Its question differs: problems of this board keep the passes of a group "
        "together, and a placement is one pass, which gains nothing from a pipeline. So its answers on the split problem "
        "are projected: both passes go where the forward pass is, or where the backward pass is, with displaced layers "
        "and without; the simulator picks, and what does not fit is repaired.",
        "docs/planners.md",
    ),
    "annealing": Ours(
        "search", f"Simulated annealing of the simulated step time over random moves of groups. {_FLOOR}", _HEURISTICS
    ),
    "local_search": Ours(
        "search",
        f"Moves along the critical chain, the first that improves; random kicks at local optima. {_FLOOR}",
        _HEURISTICS,
    ),
    "random": Ours(
        "search", f"Random plans, each simulated once and none repaired; the best one is kept. {_FLOOR}", _HEURISTICS
    ),
    "agent": Ours(
        "learned",
        "The shipped agent: a small network, fitted to simulated moves of other model families, ranks moves of a plan and "
        f"guides a search. {_FLOOR}",
        "docs/agent.md",
    ),
}
"""By planner."""

PASE = Ours(
    "heuristic",
    "PaSE (Elango 2021) chooses how every layer is split over like devices; a placement problem, whose groups are "
    "whole, is not its question, and it answers none of this board. Its nearest planner stands in: PaSE minimises the "
    "sum of layer costs and re-layout costs, which overlap nowhere, and with whole layers that sum is least with "
    "everything on one device. So this is the planner single: the fastest device that holds the model, and no plan "
    "where none does.",
    "https://arxiv.org/abs/2407.04001",
)
"""Of the planner `single`, in place of pase."""
