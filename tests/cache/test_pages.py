import pytest

from kakera.cache.pages import IdPool


def test_ids_are_handed_out_once_and_come_back():
    pool = IdPool(3)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2] and pool.free == 0
    with pytest.raises(IndexError, match="all 3"):
        pool.take()
    pool.give(1)
    assert pool.take() == 1


def test_nothing_is_freed_twice():
    pool = IdPool(2)
    page = pool.take()
    pool.give(page)
    with pytest.raises(KeyError):
        pool.give(page)
