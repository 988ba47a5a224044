"""How memory is taken of a card: who has chosen, and a refusal in words that a person can act on."""

from __future__ import annotations

import pytest

from kakera.target.allocator import Segments, maps_pages, torch_segments
from kakera.target.refused import Room, in_words, is_refusal


@pytest.mark.parametrize(
    ("environ", "wsl", "on", "by", "settings"),
    [
        ({}, False, True, "kakera", "expandable_segments:True"),
        ({}, True, False, "kakera", None),
        ({"PYTORCH_ALLOC_CONF": ""}, False, True, "kakera", "expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            False,
            True,
            "kakera",
            "max_split_size_mb:64,expandable_segments:True",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, True, False, "kakera", None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False, False, "PYTORCH_CUDA_ALLOC_CONF", None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments : True"}, True, True, "PYTORCH_ALLOC_CONF", None),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
            False,
            False,
            "PYTORCH_CUDA_ALLOC_CONF",
            None,
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            False,
            False,
            "PYTORCH_ALLOC_CONF",
            None,
        ),
    ],
)
def test_a_user_is_left_alone_and_wsl_goes_without(environ, wsl, on, by, settings):
    found = torch_segments(environ, wsl)
    assert (found.on, found.by, found.settings) == (on, by, settings)
    assert ("is on" if on else "is off") in found.text and by in found.text
    assert maps_pages(wsl) is not wsl


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ("CUDA error: device not ready\nCUDA kernel errors might be reported later", True),
        ("CUDA out of memory. Tried to allocate 1.21 GiB. GPU 0 has a total capacity of 11.94 GiB", True),
        ("misc dxg: dxgk: dxgkio_make_resident: Ioctl failed: -12", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("size mismatch, got 3", False),
    ],
)
def test_what_a_driver_says_when_it_refuses_memory(error, refused):
    assert is_refusal(error) is refused


@pytest.mark.parametrize("wsl", [True, False])
def test_a_refusal_names_the_line_the_others_and_the_choice(wsl):
    room = Room(10_440_000_000, 12_820_000_000, 1_300_000_000, ("GPU 0 (RTX 5070): process 812 holds 1.3 GB of it",))
    said = in_words("CUDA error: device not ready\nlong words", room, Segments(True, "PYTORCH_ALLOC_CONF", "so"), wsl)
    for words in ("device not ready", "10.44 of 12.82 GB", "1.30 GB (GPU 0 (RTX 5070): process 812", "--reserve"):
        assert words in said
    assert "expandable_segments is on, set by PYTORCH_ALLOC_CONF" in said and "long words" not in said
    assert ("9.6 of 12.2 GiB" in said) is wsl and ("-12" in said) is wsl
