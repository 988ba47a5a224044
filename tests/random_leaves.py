"""The leaves of random linears, in every format."""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.ops.codec import codebook


def made(name: str, outputs: int, inputs: int, seed: int) -> dict[str, Tensor]:
    """Of one linear [O, I]; `name`: a format, of Escha and EXL3 with its bits, of EXL3 with its codebook, or `signs`
    for bare ones. Its biases are the caller's."""
    generator = torch.Generator().manual_seed(seed)
    kind, *rest = name.split()

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def code(bits: float) -> Tensor:
        shape = (inputs // 16, outputs // 16, round(16 * bits))
        return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)

    def signs(channels: int) -> Tensor:
        return torch.randint(-(1 << 15), 1 << 15, (channels // 16,), generator=generator).to(torch.int16)

    if kind == "plain":
        return {"weight": numbers(outputs, inputs)}
    if kind == "int8":
        codes = torch.randint(-127, 128, (outputs, inputs), generator=generator).to(torch.int8)
        return {"weight_int8": codes, "weight_scale": (numbers(outputs).abs() / 50).half()}
    if kind == "escha":
        bits = int(rest[0])
        return {
            "escha_code": code(bits),
            "escha_rin": numbers(inputs).half(),
            "escha_rout": numbers(outputs).half(),
            "escha_s_in": 1 + numbers(inputs) / 50,
            "escha_s_out": 1 + numbers(outputs) / 50,
            "escha_config": torch.tensor([16, bits, 2, 1, inputs, outputs], dtype=torch.int32),
        }
    bits, book = rest
    if book == "signs":
        return {"trellis": code(float(bits)), "su": signs(inputs), "sv": signs(outputs)}
    flags = {"mcg": codebook.MCG_MULTIPLIER, "mul1": codebook.MUL1_MULTIPLIER}
    flag = {book: torch.tensor(flags[book]).to(torch.int32)} if book in flags else {}
    return {"trellis": code(float(bits)), "suh": numbers(inputs).half(), "svh": numbers(outputs).half(), **flag}
