"""Keys of pages: chained, stable, and different wherever the contents of a page would be."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kakera.cache import keys
from kakera.cache.keys import LastKeys, page_keys
from kakera.contract.grid import PAGE

TOKENS = [i * 7 % 50_021 for i in range(3 * PAGE + 5)]
THIRD = "03fb00f57d5f90acd48a81b6ca9e7044"


def test_a_key_is_the_same_in_every_process():
    """Python's own hash is salted by process: keys made of it find nothing after a restart."""
    code = (
        "from kakera.cache.keys import page_keys; "
        f"print(page_keys([i * 7 % 50_021 for i in range({3 * PAGE})], b'salt')[-1].hash.hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {THIRD}, "a changed key makes every stored prefix a miss: raise the version of what is stored"


def test_an_extra_key_changes_its_page_and_all_behind_it():
    plain, pictured = page_keys(TOKENS), page_keys(TOKENS, extra={1: b"digest of an image"})
    assert [a == b for a, b in zip(plain, pictured, strict=True)] == [True, False, False]
    assert [key.tokens for key in plain] == [key.tokens for key in pictured]
    assert page_keys(TOKENS, known=pictured[:2]) != pictured[2:] or pictured[2].hash != plain[2].hash


def test_salts_share_nothing():
    one, other = page_keys(TOKENS, b"one"), page_keys(TOKENS, b"other")
    assert not {key.hash for key in one} & {key.hash for key in other}


@given(st.lists(st.integers(0, 2**31 - 1), max_size=4 * PAGE), st.integers(0, 4), st.integers(0, 4 * PAGE - 1))
def test_keys_follow_their_prefix_and_nothing_else(tokens, known, changed):
    found = page_keys(tokens)
    assert len(found) == len(tokens) // PAGE
    assert page_keys(tokens, known=found[:known]) == found[known:]
    if changed < len(tokens):
        other = page_keys([*tokens[:changed], tokens[changed] ^ 1, *tokens[changed + 1 :]])
        same = [a.hash == b.hash for a, b in zip(found, other, strict=True)]
        assert same == [page < changed // PAGE for page in range(len(found))]


EXTRAS = st.dictionaries(st.integers(0, 3), st.sampled_from((b"one image", b"other")), max_size=2)
PROMPTS = st.tuples(st.integers(0, 4 * PAGE), st.integers(0, 4 * PAGE), st.sampled_from((b"", b"salt")), EXTRAS)


@given(st.lists(PROMPTS, max_size=9))
def test_keys_of_the_last_prompts_shorten_the_work_and_change_nothing(prompts):
    """Each prompt is cut somewhere and differs from the others from some token on."""
    last = LastKeys()
    for length, same, salt, extra in prompts:
        tokens = [i if i < same else i + same for i in range(length)]
        assert last.page_keys(tokens, salt, extra) == page_keys(tokens, salt, (), extra)


def test_the_next_turn_hashes_its_own_pages_only(monkeypatch):
    last, hashed = LastKeys(), []
    blake2b = keys.hashlib.blake2b
    monkeypatch.setattr(keys.hashlib, "blake2b", lambda *a, **k: hashed.append(1) or blake2b(*a, **k))
    last.page_keys(TOKENS)
    hashed.clear()
    last.page_keys([*TOKENS, *range(2 * PAGE)])
    assert len(hashed) == 2


def test_pages_with_images_are_compared_by_what_stands_beside_their_tokens():
    """Not by a hash alone, which a stranger may have years to collide; and no router is told that tokens name them."""
    from kakera.cache.announced import Announced
    from kakera.cache.tree import PageTree

    both = {name: page_keys(TOKENS, extra={1: name}) for name in (b"cat", b"dog")}
    forged = both[b"cat"][1]._replace(hash=both[b"dog"][1].hash)
    assert forged != both[b"dog"][1] and forged.tokens == both[b"dog"][1].tokens
    tree = PageTree()
    announced = Announced(tree)
    text = tree.add(tree.root, both[b"cat"][0])
    seen = tree.add(text, both[b"cat"][1])
    announced.gained(seen)
    assert announced.take() == []
    announced.gained(text)
    assert len(announced.take()) == 1
    announced.lost(seen)
    assert announced.take() == []
