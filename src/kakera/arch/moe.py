"""Moe: a block of routed experts beside a shared one. No torch.

A router's softmax over all experts, the best `top` of them, their shares scaled to add up to 1; every expert is a
SwiGLU of its own. The shared one runs for every token, times the sigmoid of a gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kakera.arch.blocks import MLP_DOWN, MLP_GATE, MLP_UP, Block
from kakera.arch.config import Config
from kakera.arch.tensors import CODED, WHOLE, Kind, Place, Shard, State, Tensor, by_blocks, gate, linear
from kakera.errors import CheckpointError

# Experts carry nearly all weights and are the last to get a bit more
EXPERTS_DOWN, EXPERTS_GATE_UP = Kind("experts.down", 110, escha=3, above=0), Kind("experts.gate_up", 120, above=0)
EXPERT_PLACES: tuple[Place, ...] = ("device", "host")  # few are read at a time


@dataclass(frozen=True)
class Moe:
    """`width`, `shared`: channels inside a routed expert and inside the shared one, blocks of 128 of which ranks share
    unequally where they do not divide: 640 are 2 + 3 for two. `hidden`: channels of what each gives."""

    kind: ClassVar[str] = "moe"
    stream: ClassVar[bool] = False

    experts: int
    top: int
    width: int
    shared: int
    hidden: int
    name: str = "mlp"

    @property
    def alive(self) -> int:
        """Of all chosen experts gate, up, their product and what each gives; of the shared one the same."""
        return self.top * (3 * self.width + self.hidden) + 3 * self.shared + self.hidden

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        rows, columns = by_blocks(0, self.shared, unequal=True), by_blocks(1, self.shared, unequal=True)
        inside = by_blocks(2, self.width, unequal=True)
        both = Shard(1, inside.ranges * 2, unequal=True)  # gate, then up
        return (
            gate("gate", self.experts, hidden, WHOLE),
            gate("shared_expert_gate", 1, hidden, WHOLE),
            self._stack("gate_up_proj", 2 * self.width, hidden, both, EXPERTS_GATE_UP, "gate_proj", "up_proj"),
            self._stack("down_proj", hidden, self.width, inside, EXPERTS_DOWN, "down_proj"),
            linear("shared_expert.gate_proj", self.shared, hidden, MLP_GATE, rows),
            linear("shared_expert.up_proj", self.shared, hidden, MLP_UP, rows),
            linear("shared_expert.down_proj", hidden, self.shared, MLP_DOWN, columns),
        )

    def _stack(self, name: str, outputs: int, inputs: int, shard: Shard, kind: Kind, *pieces: str) -> Tensor:
        return Tensor(
            f"experts.{name}",
            (self.experts, outputs, inputs),
            "stack",
            shard,
            CODED,
            kind,
            active=self.top,
            pieces=tuple(f"experts.*.{piece}" for piece in pieces),
            part="experts",
            places=EXPERT_PLACES,
        )

    def states(self) -> tuple[State, ...]:
        return ()

    def of_rank(self, rank: int, ranks: int) -> Block:
        return replace(self, width=_part(self.width, rank, ranks), shared=_part(self.shared, rank, ranks))


def _part(width: int, rank: int, ranks: int) -> int:
    return sum(end - begin for begin, end in by_blocks(0, width, unequal=True).parts(rank, ranks))


def moe_of(config: Config, hidden: int) -> Moe:
    """As configs of the family say it. Raises CheckpointError for a router that is another model's."""
    if config.get("norm_topk_prob") is False:
        raise CheckpointError("norm_topk_prob is false: experts whose shares do not add up to 1 are another model")
    experts, top = config.size("num_experts"), config.size("num_experts_per_tok")
    if top > experts:
        raise CheckpointError(f"num_experts_per_tok is {top} of {experts} experts")
    return Moe(
        experts, top, config.size("moe_intermediate_size"), config.size("shared_expert_intermediate_size"), hidden
    )
