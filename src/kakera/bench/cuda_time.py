"""How long work takes on a GPU: a CUDA graph of it, replayed, the median. And what the card can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROTATE_BYTES = 180 << 20  # inputs of one replay together: three times the largest L2, so that every read is a miss
COPY_VALUES = 1 << 29  # 2 GiB of float32 each way


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 20, pause: float = 0.0) -> float:
    """Median seconds of one call, the calls captured one after the other in one graph.

    `pause` seconds of idleness go before each replay: a card that has rested runs long products at higher clocks.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # which makes the inputs
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(repeats + 2):
            if pause:
                time.sleep(pause)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[2:])


def copies(bytes_of_one: float) -> int:
    """How many sets of inputs to rotate through."""
    return max(1, -(-ROTATE_BYTES // int(bytes_of_one)))


def copy_bytes_per_second() -> float:
    """Bytes read and written a second by a kernel that copies 2 GiB: the card's memory ceiling."""
    source = torch.rand(COPY_VALUES, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds([lambda: torch.add(source, 1.0, out=target)], repeats=10)
