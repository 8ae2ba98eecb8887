"""Tied weights: how much of one a device holds, and what it takes to sum its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlplace.strategy.costs import BlockCosts
from rlplace.strategy.drafts import Draft, Place
from rlplace.strategy.executor.meshes import places_of, share_degree, tie_groups
from rlplace.strategy.executor.traffic import Traffic, table_s


def tie_part(costs: BlockCosts, tie_blocks: Sequence[int], place: Place) -> float:
    """The part of a tied weight that one device of a tensor group holds: that of its smallest block, mostly the weight."""
    whole, cut = costs.held().weight_bytes, costs.held(place.tensor, place.expert).weight_bytes
    block = min(tie_blocks, key=lambda number: (whole[number], number))
    return float(cut[block]) / float(whole[block]) if whole[block] > 0 else 1.0


def tie_exchanges(draft: Draft, costs: BlockCosts, traffic: Traffic) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Seconds in which the places that hold a tied weight sum its gradients, and these places."""
    for tie in costs.ties:
        involved = places_of(draft, tie.blocks)
        if len(involved) > 1:
            places = [draft.places[place] for place in involved]
            item = costs.held(places[0].tensor, places[0].expert).gradient_item
            part = max(tie_part(costs, tie.blocks, place) / share_degree(place) for place in places)
            table = traffic.table("all_reduce", tie_groups(places))
            yield table_s(table, tie.gradient_bytes * item * part), involved
