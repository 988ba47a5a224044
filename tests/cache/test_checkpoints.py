from kakera.cache.checkpoints import Checkpoints, least_needed
from kakera.cache.keys import PageKey
from kakera.cache.tree import Node


def publish(registry, kind):
    record = registry.reserve(64, kind)
    registry.publish(record, Node(None, PageKey(b"", b"")))
    return record


def evict(registry, asking="message"):
    record = registry.victim(asking)
    registry.forget(record)
    return record


def test_kinds_go_in_order_and_the_least_recently_used_first_within_a_kind():
    registry = Checkpoints()
    kinds = ["system", "message", "grid", "branch", "rolling", "message"]
    records = [publish(registry, kind) for kind in kinds]
    registry.refresh(records[1])  # the older message is used once more
    assert [evict(registry) for _ in kinds] == [records[i] for i in (2, 4, 5, 1, 3, 0)]
    assert registry.victim("message") is None


def test_no_kind_is_immortal():
    registry = Checkpoints()
    forgotten = publish(registry, "system")
    for _ in range(20):
        publish(registry, "message")
        publish(registry, "message")
        if evict(registry) is forgotten:
            break
    assert forgotten.id not in registry.published


def test_pinned_and_reserved_records_stay():
    registry = Checkpoints()
    publish(registry, "grid").pins = 1
    registry.reserve(128, "grid")
    assert registry.victim("system") is None


def test_a_grid_point_never_displaces_a_better_record():
    registry = Checkpoints()
    message = publish(registry, "message")
    assert registry.victim("grid") is None
    assert registry.victim("rolling") is message


def test_thinning_leaves_the_newest_dense_and_the_older_geometric():
    positions, end = [1000 * i for i in range(1, 100)], 100_000
    while len(positions) > 15:
        del positions[least_needed(positions, end, [True] * len(positions))]
    gaps = [b - a for a, b in zip(positions, [*positions[1:], end], strict=True)]
    assert gaps[-1] == 1000 and gaps[0] >= 8000
    distances = [end - position for position in positions]
    assert all(gap <= max(2000, distance) for gap, distance in zip(gaps, distances, strict=True))


def test_thinning_touches_loose_records_only():
    assert least_needed([64, 128, 192], 256, [False, True, False]) == 1
    assert least_needed([64], 128, [False]) is None
