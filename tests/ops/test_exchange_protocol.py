"""The protocol of exchange_norm.cu, every interleaving of two lanes: no wrong value is read, nobody waits for ever.

A model checker in thirty lines. Memory is that of a strong machine between the protocol's release and acquire, which
is what both promise; a word of payload and its flag are separate places, and a payload of two words can be seen half
written, so that a reader that does not wait would be caught.
"""

from __future__ import annotations

import pytest

WORDS = 2
ROUNDS = 6


def lane(rank: int, slots: int, epochs: bool, waits: bool):
    """The steps of a lane in one exchange: names of what happens, in program order."""
    steps = [("write", word) for word in range(WORDS)] + [("publish",)]
    steps += [("wait",)] if waits else []
    return [*steps, *[("read", word) for word in range(WORDS)]]


def explore(slots: int = 2, epochs: bool = True, waits: bool = True) -> set[str]:
    """What can go wrong: "stale" reads, or a "deadlock"; the empty set if nothing can."""
    program = lane(0, slots, epochs, waits)
    length = len(program)
    empty = ((0,) * WORDS,) * slots, (0,) * slots
    start = ((0, 0), (empty, empty))  # program counters over all rounds; each rank's (payload, flags)
    seen, stack, found = {start}, [start], set()
    while stack:
        counters, memory = stack.pop()
        moved = False
        for rank in (0, 1):
            at = counters[rank]
            if at == ROUNDS * length:
                continue
            epoch = at // length + 1
            slot = epoch % slots
            mark = epoch if epochs else 1
            step = program[at % length]
            payload, flags = memory[rank]
            others, other_flags = memory[1 - rank]
            if step[0] == "write":
                words = tuple(epoch if i == step[1] else w for i, w in enumerate(payload[slot]))
                mine = tuple(words if i == slot else s for i, s in enumerate(payload)), flags
            elif step[0] == "publish":
                mine = payload, tuple(mark if i == slot else f for i, f in enumerate(flags))
            else:
                mine = memory[rank]
                if step[0] == "wait" and other_flags[slot] != mark:
                    continue
                if step[0] == "read" and others[slot][step[1]] != epoch:
                    found.add("stale")
            moved = True
            after = tuple(at + 1 if i == rank else counters[i] for i in (0, 1))
            state = after, tuple(mine if i == rank else memory[i] for i in (0, 1))
            if state not in seen:
                seen.add(state)
                stack.append(state)
        if not moved and counters != (ROUNDS * length,) * 2:
            found.add("deadlock")
    return found


def test_two_slots_and_counted_epochs_are_right_under_every_interleaving():
    assert explore() == set()


@pytest.mark.parametrize("broken", [{"slots": 1}, {"epochs": False}, {"waits": False}])
def test_the_checker_finds_what_each_part_of_the_protocol_is_for(broken):
    assert "stale" in explore(**broken) or "deadlock" in explore(**broken)
