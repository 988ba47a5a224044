"""Work of a GPU beside the computation: what is given to it runs in order, and waits are between streams only."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """The host waits in `finish` only. `run` orders work behind the computation, `wait` the other way round."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Queue `work`, which begins when all that the computing stream has now is done. Returns its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(self._stream)
        return end

    def wait(self, end: torch.cuda.Event) -> None:
        """What the computing stream gets from now on begins behind `end`."""
        torch.cuda.current_stream(self._device).wait_event(end)

    def finish(self) -> None:
        """The host waits for all that was queued."""
        self._stream.synchronize()
