"""Bytes of a vision tower: its weights, what encoding an image takes, and the embeddings that are kept. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from kakera.arch.vision import COLOURS, PREFIX, VisionSpec
from kakera.plan.plan import Place, PlanRow
from kakera.target.target import Target

LEAST_TOKENS, MOST_TOKENS = 64, 16_384  # of the largest image, as somebody may wish
# Of an image of 1080p, where Qwen's people saw no more gain from pixels; of a CPU what takes it ten seconds.
USUAL_TOKENS, CPU_TOKENS = 2048, 256
STORE_BYTES = 256 * 10**6  # 12 images of 1080p for the 27B
WAITING = 32  # of the largest images, whose pixels may wait at a time
PIECE = 1024  # patches whose MLP is computed at a time (model/tower.py)
STREAMED = 2  # blocks on the device at a time, of a tower on the host: one computes while the next one comes


def most_tokens(wish: int | None, target: Target) -> int:
    return wish if wish is not None else CPU_TOKENS if target.one_memory else USUAL_TOKENS


def scratch_bytes(spec: VisionSpec, tokens: int, item: int) -> int:
    """For an image of so many tokens: the stream, queries, keys, values, what attention gives, and what a library
    copies of a few heads; a piece of the MLP. Rotations, and the patches before the first block, take less."""
    patches = tokens * spec.merge**2
    return item * (7 * patches * spec.hidden + 2 * min(patches, PIECE) * spec.mlp)


def streamed_parameters(spec: VisionSpec) -> tuple[int, int]:
    """Of a tower on the host: those that lie there, and those that are on the device at a time."""
    sizes: dict[str, int] = {}
    for tensor in spec.tensors():
        module, _, part = tensor.name.removeprefix(PREFIX).partition(".")
        unit = f"{module}.{part.split('.')[0]}"  # blocks.0, merger.linear_fc1
        if module == "blocks" or part.startswith("linear"):
            sizes[unit] = sizes.get(unit, 0) + tensor.count
    return sum(sizes.values()), max(max(sizes.values()), STREAMED * sizes["blocks.0"])


@dataclass(frozen=True)
class TowerPlan:
    """A tower of `stored` bytes in a place, for images of up to `tokens` tokens."""

    spec: VisionSpec
    place: Place
    tokens: int
    stored: int
    target: Target

    @property
    def store_tokens(self) -> int:
        """Whose embeddings are kept: at least the two largest images that one step may need."""
        return max(2 * self.tokens, STORE_BYTES // (self.spec.out * self.target.activation_bytes))

    @property
    def pixel_bytes(self) -> int:
        """Of images of all requests together."""
        return WAITING * self.tokens * self.spec.factor**2 * COLOURS

    def rows(self) -> tuple[PlanRow, ...]:
        spec, item = self.spec, self.target.activation_bytes
        whole = spec.parameters * item if self.target.one_memory else self.stored
        scratch = scratch_bytes(spec, self.tokens, item)
        store = self.store_tokens * spec.out * item
        form = f"{spec.depth} blocks, {spec.parameters / 1e6:.1f} M parameters"
        rows = [
            PlanRow("vision tower", "device", whole, form, "load"),
            PlanRow("images in the tower", "device", scratch, f"up to {self.tokens} tokens, one at a time"),
            PlanRow("image embeddings", "host", store, f"at most, of {self.store_tokens} tokens"),
            PlanRow("pixels of images", "host", 2 * self.pixel_bytes, f"at most: {WAITING} largest, in two processes"),
        ]
        if self.place == "host":
            apart, at_a_time = (whole * count // spec.parameters for count in streamed_parameters(spec))
            rows[0] = PlanRow("vision tower", "device", whole - apart + at_a_time, f"{form}, block by block", "load")
            rows.append(PlanRow("vision tower's blocks", "host", apart, "pinned", "load"))
        return tuple(rows)
