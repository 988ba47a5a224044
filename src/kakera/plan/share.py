"""What one rank carries out of a plan that several share: its sizes, its card, its part of the host store. No torch."""

from __future__ import annotations

from dataclasses import replace

from kakera.arch.shard import of_rank
from kakera.plan.plan import Plan
from kakera.plan.sizes import checkpoint_bytes


def plan_of_rank(plan: Plan, rank: int, ranks: int) -> Plan:
    """As the plan of a model of its own. Pages, slots, ids and positions are those of all; only sizes are shared."""
    if ranks == 1:
        return plan
    spec = of_rank(plan.spec, rank, ranks)
    card = slice(rank, rank + 1) if len(plan.device_bytes) == ranks else slice(None)
    return replace(
        plan,
        spec=spec,
        device_names=plan.device_names[card],
        device_bytes=plan.device_bytes[card],
        host_cache=plan.host_cache // ranks,
        checkpoint_bytes=checkpoint_bytes(spec, plan.kv, plan.state_dtype, plan.target),
        sink_bytes=plan.kv.window_page_bytes(spec),
        page_bytes=plan.kv.page_bytes(spec),
        rows=tuple(replace(row, bytes=row.on_card(rank), cards=()) for row in plan.rows),
        ranks=1,
    )
