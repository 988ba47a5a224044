"""Clients take turns: whoever comes waits for one request of each other client, however many those have queued."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from driver import Driver, prose
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.request import Request, Sampling
from kakera.errors import RequestRefused
from kakera.schedule.queue import WaitingQueue
from kakera.schedule.sequence import Sequence


def sequence(number: int, client: str) -> Sequence:
    return Sequence(Request(f"r{number}", (1,), Sampling(1, 0), client=client), number, 0.0)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5]))
def test_nobody_waits_for_more_than_one_request_of_each_other_client(seed, clients):
    rng = random.Random(seed)
    queue, running, arrivals = WaitingQueue(), [], 0
    passed: dict[str, Counter[str]] = {}  # by its first waiting request: who was admitted since it was first
    for _ in range(120):
        first = next(iter(queue), None)
        match rng.randrange(5):
            case 0 | 1:
                arrivals += 1
                queue.push(sequence(arrivals, rng.choice("abcde"[:clients])))
                if first is not None:
                    assert next(iter(queue)) is first, "who is next stays next, whoever comes"
            case 2 if first is not None:
                queue.admit(first)
                running.append(first)
                for counter in passed.values():
                    counter[first.request.client] += 1
                passed.pop(first.id, None)
            case 3 if running:
                back = running.pop(rng.randrange(len(running)))
                queue.push_back(back)
                assert next(iter(queue)) is back and queue.get(back.id) is back
                queue.admit(back)  # the next to run: its turn is not counted twice
                running.append(back)
            case 4 if first is not None:
                gone = rng.choice(list(queue))
                assert queue.pop(gone.id) is gone and queue.pop(gone.id) is None
                passed.pop(gone.id, None)
        waiting = list(queue)
        assert len(waiting) == len(queue) == len({each.id for each in waiting})
        for client in "abcde":
            own = [each.arrival for each in waiting if each.request.client == client]
            assert own == sorted(own) and queue.of(client) == len(own), "a client's own come in their order"
            oldest = next((each for each in waiting if each.request.client == client), None)
            if oldest is not None:
                passed.setdefault(oldest.id, Counter())
        assert all(count <= 1 for counter in passed.values() for count in counter.values())


def test_preempted_requests_come_first_in_their_order():
    queue = WaitingQueue()
    for number, client in ((5, "a"), (6, "b")):
        queue.push(sequence(number, client))
    for number, client in ((4, "b"), (2, "a"), (7, "c")):
        queue.push_back(sequence(number, client))
    assert [each.arrival for each in queue] == [2, 4, 7, 5, 6]
    queue.admit(queue.get("r2"))
    assert [each.arrival for each in queue] == [4, 7, 5, 6], "coming back is no turn of its client's"


@pytest.mark.parametrize("slots", [1, 3])
def test_a_short_question_does_not_wait_for_a_queue_of_long_prompts(slots):
    driver = Driver(slots=slots)
    long = [driver.submit(prose(600, seed=i), client="a") for i in range(24)]
    driver.step()
    question = driver.submit(prose(10, seed=99), client="b")
    driver.run()
    ends = [*driver.finished]
    assert set(ends) == {*long, question} and ends.index(question) <= slots + 1
    assert [name for name in ends if name != question][:slots] == long[:slots]


def test_three_clients_share_alike():
    driver = Driver(slots=1)
    for client, count in (("a", 9), ("b", 6), ("c", 3)):
        for i in range(count):
            driver.submit(prose(70, seed=i), client=client, id=f"{client}{i}")
    driver.run()
    assert "".join(name[0] for name in driver.finished) == "abc" * 3 + "ab" * 3 + "aaa"


def test_one_client_leaves_a_part_of_the_queue_to_others():
    driver = Driver(slots=2, max_waiting=8)

    def fill(client: str) -> int:
        for taken in range(100):
            try:
                driver.submit(prose(70), client=client)
            except RequestRefused as error:
                assert (error.status, error.code) == (429, "queue_full")
                return taken
        raise AssertionError("it never ended")

    assert fill("greedy") == 6 + 2 and fill("other") == 2 and fill("third") == 0
    driver.run()
    assert len(driver.finished) == 10
    assert fill("") == 10, "what is nobody's is bounded by the queue alone"
