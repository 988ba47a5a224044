"""What a plan's engine takes while it sleeps (POST /sleep): bytes of the host at level 1, and what the host's prefix
cache has room for of the pages that leave the card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kakera.contract.grid import PAGE
from kakera.plan.plan import Plan
from kakera.plan.sizes import margin
from kakera.plan.store_sizes import StoreSizes
from kakera.target.devices import Machine

KEPT = ("KV windows and sinks", "activations and scratch", "checkpoint staging")  # beside the weights


@dataclass(frozen=True)
class Asleep:
    """`level_1_bytes`: of the host beyond the plan, at most. `free_bytes`: that it has for it, now. `tokens`: of one
    conversation that the prefix cache on the host holds, of `pool_tokens` on the card."""

    level_1_bytes: int
    free_bytes: int
    tokens: int
    pool_tokens: int

    @staticmethod
    def of(plan: Plan, machine: Machine) -> Asleep:
        store, pool = StoreSizes.of_plan(plan), plan.pages * PAGE
        taken = plan.total("host") + (plan.total("device") if plan.target.one_memory else 0)
        pages = max(0, store.blocks - store.checkpoint - store.sink) // store.page
        free = max(0, machine.ram - machine.ram_used - margin(machine.ram) - taken)
        return Asleep(asleep_bytes(plan), free, min(pool, pages * PAGE), pool)

    @property
    def text(self) -> str:
        """One line."""
        kept = "leaves the weights where they are"
        if self.level_1_bytes:
            free = f"{self.free_bytes / 1e9:.2f} GB are free beside the plan"
            kept = f"keeps at most {self.level_1_bytes / 1e9:.2f} GB in host memory ({free})"
        line = f"Asleep (POST /sleep): level 1 {kept}, level 2 reads the weights again"
        if self.tokens < self.pool_tokens:
            line += (
                f"; of {self.pool_tokens} tokens of KV pages {self.tokens} find room in the prefix cache on the host"
            )
        return f"{line}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def asleep_bytes(plan: Plan) -> int:
    """Of the host at level 1, at most: of a CPU nothing moves."""
    if plan.target.one_memory:
        return 0
    kept = (row for row in plan.rows if row.place == "device" and (row.meter == "load" or row.name in KEPT))
    return len(plan.device_bytes) * sum(row.bytes for row in kept)
