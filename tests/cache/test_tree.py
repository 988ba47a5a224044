import time

from kakera.cache.keys import page_keys
from kakera.cache.tree import PageTree
from kakera.contract.grid import PAGE


def grow(tree, keys, first_page=0):
    node, path = tree.root, []
    for i, key in enumerate(keys):
        node = node.children.get(key) or tree.add(node, key)
        if node.device is None:
            tree.place(node, first_page + i)
        path.append(node)
    return path


def test_keys_cover_complete_pages_only_and_continue_where_they_stopped():
    tokens = list(range(3 * PAGE + 5))
    keys = page_keys(tokens)
    assert len(keys) == 3
    assert page_keys(tokens, known=keys[:2]) == keys[2:] and page_keys(tokens, known=keys) == []


def test_walk_ends_at_the_first_difference_and_at_the_limit():
    tree = PageTree()
    tokens = list(range(4 * PAGE))
    path = grow(tree, page_keys(tokens))
    other = tokens[: 2 * PAGE] + [7] * PAGE
    assert tree.walk(page_keys(other), 9) == path[:2]
    assert tree.walk(page_keys(tokens), 3) == path[:3]
    assert tree.walk(page_keys(tokens, b"salt"), 9) == []


def test_eviction_takes_the_least_recently_used_tail_first():
    tree = PageTree()
    old = grow(tree, page_keys([1] * 2 * PAGE))
    new = grow(tree, page_keys([2] * 2 * PAGE), first_page=10)
    for path in (old, new):
        tree.lock(path)
    assert tree.unlocked == 0
    tree.unlock(old)
    tree.unlock(new)
    order = []
    while tree.unlocked:
        node = tree.coldest()
        order.append(node.device)
        tree.place(node, None)
        tree.remove(node)
    assert order == [1, 0, 11, 10]


def test_a_locked_tail_protects_its_whole_path():
    tree = PageTree()
    path = grow(tree, page_keys([1] * 3 * PAGE))
    tree.lock(path[:2])
    assert tree.unlocked == 1
    assert tree.coldest() is path[2]


def test_removed_nodes_are_remembered():
    tree = PageTree()
    keys = page_keys([1] * 2 * PAGE)
    path = grow(tree, keys)
    tree.place(path[1], None)
    tree.remove(path[1])
    assert tree.was_removed(keys[1])
    assert not tree.was_removed(keys[0])


def test_a_prompt_of_262144_tokens_is_matched_in_milliseconds():
    tree = PageTree()
    keys = page_keys([i % 50_021 for i in range(262_144)])
    grow(tree, keys)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        assert len(tree.walk(keys, len(keys))) == 4096
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.1
