"""Ranks and what they say to each other, without a model: what is shown arrives, who is apart or hangs is found out."""

from __future__ import annotations

import errno
import os
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from symbolic_ranks import Killed, Known, SymbolicRunner, killed_at, meetings, random_plans, together, wires

from kakera.contract.step import StepPlan
from kakera.errors import KakeraError, RanksApart
from kakera.run.ranks import meeting, memory, wire
from kakera.run.ranks.engine import see_only
from kakera.run.ranks.follower import follow
from kakera.run.ranks.leader import LeadingRunner
from kakera.run.ranks.meeting import HEAD_BYTES, Meeting
from kakera.run.ranks.messages import Execute, encode
from kakera.run.ranks.wire import IDLE, STEP, Wire

SLOT = 64  # bytes, where large ones are to go in pieces


@pytest.fixture
def quick(monkeypatch):
    """Ticks are counted, not timed."""
    monkeypatch.setattr(wire, "TICK", 0.001)


def test_messages_of_any_length_arrive_in_their_order():
    mine, its = wires()
    sent = [random.Random(i).randbytes(size) for i, size in enumerate((0, 1, 5, 70_000, 1_000_000, 3))]
    thread = threading.Thread(target=lambda: [mine.send(data) for data in sent])
    thread.start()
    assert [its.receive() for _ in sent] == sent
    thread.join()


LOOKS = STEP.looks
ACTIVITIES = {
    "stopped": ([("stopped", 1.0)], True),
    "asleep": ([("sleeping", 1.0)], True),
    "dead, and its end of the wire is held by somebody": ([("dead", 0.0)], True),
    "slow": ([("sleeping", 1.0)] * (LOOKS - 1) + [("sleeping", 1.01)], False),
    "is held by a debugger": ([("tracing-stop", 1.0)], False),
    "waits for its turn": ([("running", 1.0)], False),
    "reads pages from a drive": ([("disk-sleep", 1.0)], False),
}


@pytest.mark.parametrize(
    ("way", "doing"), [(way, doing) for doing in ACTIVITIES for way in ("receive", "send")[: 1 + ACTIVITIES[doing][1]]]
)
def test_a_rank_that_does_nothing_is_ended_and_a_slow_one_waited_for(quick, doing, way):
    """Neither reads a clock: who was suspended with its machine had no ticks meanwhile."""
    states, hangs = ACTIVITIES[doing]
    looks = 0

    def look() -> tuple[str, float]:
        nonlocal looks
        looks += 1
        if looks == 5 * LOOKS:  # it comes at last
            its.send(b"late")
        status, used = states[looks % len(states)]
        return status, used + looks // len(states) * (len(states) > 1)

    peer = Known(1, 4711, look)
    mine, its = wires(peer)
    work = mine.receive if way == "receive" else lambda: mine.send(bytes(3_000_000))
    if hangs:
        with pytest.raises(RanksApart, match=r"rank 1 \(process 4711\) did nothing for"):
            work()
        assert looks == LOOKS + 1 and peer.ended == [True]
    else:
        assert work() == b"late" and looks >= 5 * LOOKS and not peer.ended


def test_who_waits_for_a_plan_minds_only_that_rank_0_is_stopped(quick):
    looks = iter([("sleeping", 1.0)] * 5 * IDLE.looks + [("stopped", 1.0)] * IDLE.looks)
    mine, _its = wires(Known(1, 4711, lambda: next(looks)))
    with pytest.raises(RanksApart, match="rank 1"):
        mine.receive(IDLE)
    assert not list(looks)


def test_whoever_waits_hears_at_once_that_the_other_end_is_gone():
    for leave in (Wire.close, Wire.hang_up):
        mine, its = wires()
        mine.send(b"last words")
        leave(mine)
        assert its.receive(IDLE) == b"last words"
        for act in (lambda its=its: its.receive(IDLE), lambda its=its: its.send(bytes(10))):
            with pytest.raises(RanksApart, match=r"rank 0 .* has ended"):
                act()


@pytest.fixture(scope="module")
def small_slots():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "SLOT_BYTES", SLOT)
        yield


@given(st.integers(2, 4), st.lists(st.sampled_from(["show", "large", "hop", "meet"]), min_size=1, max_size=8))
def test_every_rank_sees_what_all_have_shown(small_slots, ranks, calls):
    def data(step: int, rank: int, size: int) -> bytes:
        return random.Random(100 * step + rank).randbytes(size)

    def work(own: Meeting) -> list[list[bytes]]:
        found = []
        for step, call in enumerate(calls):
            if call == "meet":
                own.meet()
            elif call == "hop" and own.rank == 0:
                for other in range(1, ranks):
                    own.send("hop", data(step, 0, 40), other)
            elif call == "hop":
                assert own.receive("hop", 0) == data(step, 0, 40)
            else:
                size = 3 * SLOT if call == "large" else SLOT // 2
                shown = own.everyones(call, memoryview(data(step, own.rank, size + own.rank)))
                found.append([bytes(each) for each in shown])
        return found

    sizes = [(step, 3 * SLOT if call == "large" else SLOT // 2) for step, call in enumerate(calls)]
    wanted = [[data(s, r, n + r) for r in range(ranks)] for s, n in sizes if calls[s] in ("show", "large")]
    for found in together(meetings(ranks), work):
        assert found == wanted


APART = {
    "another purpose": lambda m: m.everyones(f"sum {m.rank}", memoryview(b"1")),
    "a meeting less": lambda m: [m.meet() for _ in range(2)] if m.rank else m.everyones("sum", memoryview(b"1")),
    "a hop for a sum": lambda m: m.send("hop", b"1", 1) or [m.meet(), m.meet()] if m.rank == 0 else m.meet(),
    "another hop": lambda m: m.send("one", b"1", 1) or m.meet() if m.rank == 0 else m.receive("other", 0),
}


@pytest.mark.parametrize("ways", APART)
def test_ranks_that_go_apart_are_found_out_and_all_hear_why(ways):
    found = together(meetings(2), APART[ways])
    assert all(isinstance(error, RanksApart) for error in found)
    assert len({str(error) for error in found}) == 1 and "ranks are apart" in str(found[0])


def test_who_gives_up_takes_all_others_along_wherever_they_wait():
    one, two, three = meetings(3)
    threading.Timer(0.05, three.abort, ["the card is lost" + "!" * HEAD_BYTES]).start()
    found = together([one, two], Meeting.meet)
    three.abort("another reason")
    for each in (one, two, three):
        with pytest.raises(RanksApart, match=r"^the card is lost"):
            each.meet()
    assert [str(error)[:16] for error in found] == ["the card is lost"] * 2


def test_a_rank_that_never_comes_is_named(quick):
    one, two = meetings(2, Known(1, 4711, lambda: ("stopped", 0.0)))
    with pytest.raises(RanksApart, match=r"rank 1 \(process 4711\)"):
        one.meet()
    with pytest.raises(RanksApart, match=r"rank 1 \(process 4711\)"):
        two.meet()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_too_little_memory_to_share_is_told_with_its_size(monkeypatch, code):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(KakeraError, match=r"the ranks need 4\.0 MiB of memory to share.*close something"):
        memory.shared_memory(4 * 2**20)


def test_memory_that_ranks_share_has_no_name_to_be_left_behind():
    found = memory.mapped(memory.shared_memory(2**16))
    assert found.read() == bytes(2**16)


@pytest.mark.parametrize(
    ("shown", "card", "seen"), [(None, 1, "1"), ("3,5", 0, "3"), ("3, GPU-5f", 1, "GPU-5f"), ("2", 0, "2")]
)
def test_a_rank_sees_its_own_card_alone(monkeypatch, shown, card, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown or "")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if shown is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    see_only(card)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


# A leader and a follower, a thread each, with a wire between them that can spoil what goes over it.


def pair(
    plans: list[StepPlan],
    spoil=lambda data: data,
    change=lambda runner, step: None,
    killed: tuple[int, int] | None = None,
) -> BaseException | None:
    """Carry plans out on two ranks. `spoil` changes messages of rank 0; `change` what rank 1 holds before a step;
    `killed`: (rank, at its so manieth use of a wire). Returns what the leader raised."""
    ahead, behind = meetings(2)
    mine, its = wires()
    if killed is not None:
        ends = [*(ahead, behind)[killed[0]]._wires.values(), (mine, its)[killed[0]]]
        killed_at(killed[1], ends)
    send = mine.send
    mine.send = lambda data: send(spoil(data))  # type: ignore[method-assign]
    follower = SymbolicRunner(behind)
    execute = follower.execute

    def changed(plan: StepPlan):
        change(follower, plan.step)
        return execute(plan)

    follower.execute = changed  # type: ignore[method-assign, assignment]

    def lead(meeting: Meeting) -> None:
        meeting.meet()
        leader = LeadingRunner(SymbolicRunner(meeting), meeting, [mine])
        for plan in plans:
            leader.execute(plan)
        assert [read.region for read in leader.sweep()] == ["memory", "rank 1's memory"]
        mine.hang_up()

    def behave(meeting: Meeting) -> None:
        try:
            (lead if meeting.rank == 0 else lambda m: follow(follower, m, its))(meeting)
        finally:
            (mine if meeting.rank == 0 else its).hang_up()

    found = together([ahead, behind], behave)
    assert found[0] is not None or found[1] is None or isinstance(found[1], Killed)
    return found[0]


@given(st.integers(0, 10**6))
def test_ranks_that_carry_out_the_same_plans_stay_together(seed):
    assert pair(random_plans(seed, 12)) is None


@given(st.integers(0, 10**6), st.data())
def test_a_flipped_bit_of_a_plan_is_found_in_its_step(seed, data):
    """Wherever it is flipped: in a number that leads a rank another way, or in a token that changes nothing it sees."""
    plans = random_plans(seed, 6)
    which = data.draw(st.integers(0, 5))
    bit = data.draw(st.integers(0, 8 * len(encode(Execute(plans[which]))) - 1))
    sent = 0

    def spoil(message: bytes) -> bytes:
        nonlocal sent
        sent += 1
        if sent != which + 1:
            return message
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)

    assert isinstance(pair(plans, spoil), RanksApart) and sent == which + 1


def test_a_decision_that_differs_is_found_in_its_step(caplog):
    """What one rank let run ahead and the other not is in no plan."""

    def change(runner: SymbolicRunner, step: int) -> None:
        if step == 9 and runner.ahead:
            runner.ahead.popitem()

    plans = random_plans(3, 20)
    assert plans[7].may_follow, "rows ran ahead of step 9"
    error = pair(plans, change=change)
    assert isinstance(error, RanksApart) and "rank 1" in str(error) and "in step 9" in str(error)
    assert "rank 0 took" in caplog.text and "rank 1 (process 0) took" in caplog.text


@given(st.integers(0, 10**6), st.integers(0, 1), st.integers(1, 60))
def test_wherever_a_rank_is_killed_the_other_one_leaves(seed, rank, count):
    """Both threads have ended when this returns: nobody waits for ever."""
    error = pair(random_plans(seed, 6), killed=(rank, count))
    if error is not None and rank == 1:
        assert isinstance(error, RanksApart) and "rank 1" in str(error)
    if error is not None and rank == 0:
        assert isinstance(error, Killed)


def test_what_a_rank_raises_ends_the_other():
    def change(runner: SymbolicRunner, step: int) -> None:
        if step == 4:
            raise MemoryError("no memory")

    error = pair(random_plans(1, 6), change=change)
    assert isinstance(error, RanksApart) and str(error) == "rank 1: no memory"
