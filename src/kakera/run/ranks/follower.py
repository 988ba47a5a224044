"""The process of a rank that follows: builds its runner, then carries out what rank 0 says, until that ends. No torch.

It is told nothing but by rank 0: Ctrl-C and SIGTERM are for the engine as a whole, and whoever stops that stops this.
"""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import sys
from collections.abc import Callable

from kakera.errors import KakeraError, RanksApart
from kakera.run.process.engine_process import die_with_parent, settle, show_crashes
from kakera.run.ranks.leader import RankRunner, Together
from kakera.run.ranks.meeting import Meeting
from kakera.run.ranks.messages import Built, CanNotBuild, Done, Execute, Sweep, Swept, decode_to_rank, digest, encode
from kakera.run.ranks.seat import Seat
from kakera.run.ranks.wire import IDLE, Peer, Wire

log = logging.getLogger(__name__)
Build = Callable[[Meeting], tuple[RankRunner, Together]]  # of any rank; what is sent to followers can be pickled


def main() -> None:
    """`python -m kakera.run.ranks.follower LINK PARENT`: the descriptor of a socket to rank 0, and its process."""
    link, parent = (int(word) for word in sys.argv[1:])
    show_crashes()
    die_with_parent(parent)
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    sys.exit(run(Wire(socket.socket(fileno=link), Peer(0, parent))))


def run(wire: Wire) -> int:
    """The whole life of a rank behind its wire to rank 0. Returns the exit status."""
    seat, build = pickle.loads(wire.receive())
    assert isinstance(seat, Seat)
    meeting = seat.meeting()
    try:
        runner, exchange = build(meeting)
    except Exception as error:
        status = error.exit_status if isinstance(error, KakeraError) else 70
        if not isinstance(error, KakeraError):
            log.exception("rank %d could not start", seat.rank)
        text = str(error) if isinstance(error, KakeraError) else f"rank {seat.rank} could not start: {error!r}"
        wire.send(encode(CanNotBuild(text, status)))
        meeting.abort(text)
        return status
    settle()
    try:
        wire.send(encode(Built()))
        follow(runner, exchange, wire)
        meeting.check()
    except RanksApart as error:
        log.error("rank %d ends: %s", seat.rank, error)
        return 70
    except Exception as error:
        log.exception("rank %d died", seat.rank)
        exchange.abort(f"rank {seat.rank}: {error!r}")
        return 70
    return 0


def follow(runner: RankRunner, exchange: Together, wire: Wire) -> None:
    """Carry out what comes until rank 0 hangs up. Raises what the runner raises, and RanksApart."""
    exchange.meet()
    while True:
        try:
            message = wire.receive(IDLE)
        except RanksApart:
            return
        match decode_to_rank(message):
            case Execute(plan):
                exchange.meet()
                runner.execute(plan)
                wire.send(encode(Done(plan.step, digest(message), runner.branch)))
            case Sweep():
                wire.send(encode(Swept(runner.sweep())))


if __name__ == "__main__":
    main()
