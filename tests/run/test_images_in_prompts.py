"""Images in prompts through the whole engine: what is computed, what is shared, and that a hit is a cold run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_world import CODECS, World, ask, equal, logprob_gap, tiny_plan, tokens_of

from kakera.contract.events import Finished
from kakera.contract.images import ImageSpan
from kakera.contract.request import Request
from kakera.errors import RequestRefused
from seeing_model import picture, prompt_of

SYSTEM, QUESTION, OTHER = tokens_of(1, 140), tokens_of(2, 30), tokens_of(3, 40)
SEES = {"vision": "device", "image_tokens": 256, "image_store": 4000, "pixel_bytes": 10**8}
CAT, DOG = picture(1, 9, 20), picture(2, 9, 20)  # 180 tokens: over two borders of pages


def world(directory: Path, kv: str = "int2", **changes: Any) -> World:
    return World.build(directory, kv, **{**SEES, **changes}).watch()


def look(id: str, *parts: tuple[int, ...] | ImageSpan, max_tokens: int = 3) -> Request:
    """A request with images; the first part is the system's message."""
    tokens, images = prompt_of(*parts)
    first = len(parts[0]) if isinstance(parts[0], tuple) else 1
    return replace(ask(id, tokens, max_tokens, [first]), images=images)


def cached(completion) -> int:
    return completion.finished.usage.cached_tokens


def encoded(at: World) -> int:
    return at.cache.counters["images_encoded"]


@pytest.mark.parametrize("kv", [pytest.param(kv, marks=() if kv == "int2" else pytest.mark.slow) for kv in CODECS])
def test_a_hit_is_a_cold_run_to_the_bit(seeing_model, kv):
    """The same prompt again, the same image with another question, a later turn with a second image; each beside its
    own cold run. Chunks of 128 tokens cut both images."""
    at = world(seeing_model, kv)
    stories = {
        "first": (SYSTEM, CAT, QUESTION),
        "again": (SYSTEM, CAT, QUESTION),
        "other question": (SYSTEM, CAT, OTHER),
        "second turn": (SYSTEM, CAT, QUESTION, OTHER, DOG, tokens_of(4, 90)),
        "text": (SYSTEM, QUESTION, tokens_of(5, 200)),
    }
    hits = {}
    for name, parts in stories.items():
        warm = at.one(look(name, *parts))
        hits[name] = cached(warm)
        alone = world(seeing_model, kv)
        cold = alone.one(look(name, *parts))
        assert equal(alone.seen[name], at.seen[name]), name
        assert warm.tokens == cold.tokens and logprob_gap(cold, warm) < 1e-4
    assert hits == {"first": 0, "again": 320, "other question": 320, "second turn": 320, "text": 128}
    assert encoded(at) == 2  # each image once, though they were in four prompts
    at.check_idle()


def test_another_image_is_another_prompt_and_the_text_before_it_is_shared(seeing_model):
    """Public bugs 2, 3 and 5: keys by token ids alone. Also of an image of other sides and as many tokens."""
    at = world(seeing_model)
    turned = ImageSpan(0, 20, 9, b"t" * 32, CAT.pixels)
    answers = [at.one(look(f"{i}", SYSTEM, image, QUESTION)) for i, image in enumerate((CAT, DOG, CAT, turned))]
    assert [cached(answer) for answer in answers] == [0, 128, 320, 128]
    logits = [at.seen[f"{i}"].logits_V for i in range(4)]
    assert torch.equal(logits[0], logits[2])
    assert all((logits[0] - logits[i]).abs().max() > 1e-3 for i in (1, 3))
    assert encoded(at) == 3


def test_a_second_question_about_an_image_computes_no_tower(seeing_model):
    """Public bug 1: a hybrid model whose checkpoints lie behind questions only. The whole page before the image's end
    is hit, and nothing of the image is left."""
    at = world(seeing_model)
    end = 1 + CAT.tokens + 1  # the image begins the prompt
    at.one(look("a", CAT, tokens_of(2, 300)))
    encodes = at.runner.images.tower.encode
    at.runner.images.tower.encode = None  # whoever calls it fails
    found = at.one(look("b", CAT, tokens_of(3, 300)))
    assert cached(found) == end // 64 * 64 and encoded(at) == 1
    at.runner.images.tower.encode = encodes
    at.check_idle()


def test_a_text_prefix_that_hits_encodes_the_image_behind_it(seeing_model):
    """Public bug 17: a hit happened, so the images are done."""
    at, alone = world(seeing_model), world(seeing_model)
    at.one(look("seed", SYSTEM, tokens_of(9, 3)))
    found = at.one(look("a", SYSTEM, CAT, QUESTION))
    alone.one(look("a", SYSTEM, CAT, QUESTION))
    assert cached(found) == 128 and encoded(at) == 1 and equal(at.seen["a"], alone.seen["a"])


def test_a_hit_inside_an_image_goes_on_inside_it(seeing_model):
    """Public bug 16: an engine that hung there. The prompt is left while its image is half computed."""
    at, alone = world(seeing_model, chunk=64), world(seeing_model)
    at.engine.submit(look("left", tokens_of(6, 200), picture(3, 16, 16), QUESTION))
    for _ in range(6):
        at.engine.step()
    at.engine.abort("left")
    found = at.one(look("a", tokens_of(6, 200), picture(3, 16, 16), QUESTION))
    alone.one(look("a", tokens_of(6, 200), picture(3, 16, 16), QUESTION))
    assert 200 < cached(found) < 456 and encoded(at) == 1 and equal(at.seen["a"], alone.seen["a"])


def test_embeddings_that_were_evicted_are_computed_again(seeing_model):
    """Also in the middle of an image, where a hit ends."""
    at, alone = world(seeing_model, chunk=64, image_store=300), world(seeing_model)
    at.engine.submit(look("left", tokens_of(6, 200), picture(3, 16, 16), QUESTION))
    for _ in range(6):
        at.engine.step()
    at.engine.abort("left")
    at.one(look("other", CAT, QUESTION))
    assert at.runner.images.bytes == CAT.tokens * 64 * 4
    found = at.one(look("a", tokens_of(6, 200), picture(3, 16, 16), QUESTION))
    alone.one(look("a", tokens_of(6, 200), picture(3, 16, 16), QUESTION))
    assert cached(found) > 200 and encoded(at) == 3 and equal(at.seen["a"], alone.seen["a"])
    assert at.runner.images.bytes == 256 * 64 * 4


def test_many_small_images_and_large_ones_in_one_prompt(seeing_model):
    """Two in one page, one of a token, and more than a step encodes; public bug 11: positions kept between calls."""
    parts = (SYSTEM, picture(4, 1, 1), tokens_of(7, 3), picture(5, 2, 3), *[picture(i, 10, 15) for i in range(6, 10)])
    at, alone = world(seeing_model), world(seeing_model, chunk=512)
    for id in ("a", "b"):
        at.one(look(id, *parts, OTHER))
    alone.one(look("a", *parts, OTHER))
    assert equal(at.seen["a"], alone.seen["a"]) and equal(at.seen["a"], at.seen["b"])
    assert encoded(at) == 6


def test_rows_of_text_beside_rows_of_images_keep_their_bits(seeing_model):
    """Public bug 26 and the like: a position that is another row's."""
    at, alone = world(seeing_model), world(seeing_model)
    requests = [look("image", CAT, QUESTION), look("text", tokens_of(8, 150)), look("images", DOG, CAT, OTHER)]
    answers = at.answer(*requests)
    for request, answer in zip(requests, answers, strict=True):
        single = alone.one(replace(request, cache=False))
        assert equal(at.seen[request.id], alone.seen[request.id], 1e-5), request.id
        assert logprob_gap(single, answer) < 1e-4


def test_preempted_requests_come_back_with_their_images(seeing_model):
    """Pages for less than all: somebody is preempted, and his answer is that of a run alone."""
    requests = [look(f"{i}", tokens_of(20 + i, 60), picture(30 + i, 8, 12), QUESTION, max_tokens=40) for i in range(3)]
    at, alone = world(seeing_model, pages=11), world(seeing_model)
    answers = at.answer(*requests)
    assert at.cache.counters["preemptions"] > 0
    for request, answer in zip(requests, answers, strict=True):
        assert alone.one(request).tokens == answer.tokens
    at.check_idle()


def test_an_image_that_can_not_be_encoded_fails_its_request_alone(seeing_model):
    """Public bugs 6 and 7: a failed image leaves a model that answers nobody."""
    at = world(seeing_model)
    encode = at.runner.images.tower.encode

    def fail(pixels: bytes, rows: int, columns: int):
        if pixels == DOG.pixels:
            raise RuntimeError("out of memory")
        return encode(pixels, rows, columns)

    at.runner.images.tower.encode = fail
    failed, seen, text = at.answer(look("dog", DOG, QUESTION), look("cat", CAT, QUESTION), look("text", SYSTEM))
    assert failed.finished.reason == "error" and "could not encode an image of 9 x 20 tokens: out of memory" in (
        failed.finished.message
    )
    assert seen.finished.reason == text.finished.reason == "length"
    at.runner.images.tower.encode = encode
    assert at.one(look("dog again", DOG, QUESTION)).finished.reason == "length"
    at.check_idle()


def test_text_is_served_as_without_a_tower(seeing_model):
    """Public bug 18: what loads a tower changes its text service. Bits, pages, hits."""
    seeing, blind = world(seeing_model), world(seeing_model, vision=None)
    for at in (seeing, blind):
        at.one(look("a", SYSTEM, QUESTION))
        assert cached(at.one(look("b", SYSTEM, OTHER))) == 128
    assert all(equal(seeing.seen[id], blind.seen[id]) for id in ("a", "b"))
    assert blind.runner.images is None and seeing.runner.images.bytes == 0
    keys = [[node.key for node in at.cache.tree.nodes()] for at in (seeing, blind)]
    assert sorted(keys[0]) == sorted(keys[1])


def test_flush_forgets_embeddings(seeing_model):
    at = world(seeing_model)
    at.one(look("a", CAT, QUESTION))
    at.engine.flush()
    assert at.runner.images.bytes == 0
    assert cached(at.one(look("b", CAT, QUESTION))) == 0 and encoded(at) == 2


def test_images_that_lie_outside_their_prompt_are_refused(seeing_model):
    at = world(seeing_model)
    for images in ((CAT,), (picture(1, 2, 2, 5), picture(2, 2, 2, 8)), (picture(1, 0, 2, 5),)):
        with pytest.raises(RequestRefused, match="images of a prompt lie in it"):
            at.engine.submit(replace(ask("a", tokens_of(1, 100)), images=images))


def test_pixels_that_wait_have_a_bound(seeing_model):
    """A small body may hold many: a picture of one colour is a kilobyte, and megabytes once it is decoded."""
    at = world(seeing_model, pixel_bytes=2 * len(CAT.pixels) + 5)
    with pytest.raises(RequestRefused, match="one request may have 69,125") as refused:
        at.engine.submit(look("three", CAT, CAT, DOG))
    assert refused.value.status == 400
    at.engine.submit(look("a", CAT, QUESTION))
    at.engine.submit(look("b", DOG, QUESTION))
    with pytest.raises(RequestRefused, match="images of other requests have 69,120 bytes") as refused:
        at.engine.submit(look("c", picture(3, 1, 1)))
    assert refused.value.status == 429
    at.engine.submit(look("text", QUESTION))
    while at.engine.step():
        pass
    assert at.one(look("c", picture(3, 1, 1))).finished.reason == "length"


def test_a_warm_up_encodes_the_largest_image(seeing_model):
    from kakera.run.step.warmup import warm_up

    at = World.build(seeing_model, **SEES)
    encode, seen = at.runner.images.tower.encode, []
    at.runner.images.tower.encode = lambda pixels, rows, columns: (
        seen.append(rows * columns) or encode(pixels, rows, columns)
    )
    warm_up(at.runner, tiny_plan(seeing_model, **SEES))
    assert seen == [256]


def test_a_request_with_images_goes_to_the_engine_s_process_as_it_is():
    from kakera.run.process.messages import Submit, decode_to_engine, encode

    request = look("a", SYSTEM, CAT, QUESTION)
    found = decode_to_engine(encode(Submit.of(request))).request
    assert found.images == request.images and tuple(found.tokens) == request.tokens


def test_what_ends_is_told(seeing_model):
    at = world(seeing_model)
    (answer,) = at.answer(look("a", CAT, QUESTION))
    assert isinstance(answer.finished, Finished) and answer.finished.usage.prompt_tokens == CAT.tokens + 2 + 30


@pytest.mark.parametrize("prompts", [True, False], ids=["prompts", "stand-ins"])
def test_a_recording_with_images_replays_and_without_prompts_shows_none(seeing_model, tmp_path, prompts):
    from kakera.contract.recording import Header, Recorder, read_recording
    from kakera.run.recording.record import RecordingRunner
    from kakera.run.recording.replay import Replay

    at, again = (World.build(seeing_model, **SEES) for _ in range(2))
    plan = tiny_plan(seeing_model)
    header = Header(1, "", "tiny", {}, plan.spec.vocab, plan.pages, prompts)
    at.engine.runner = RecordingRunner(at.runner, Recorder(tmp_path / "steps", header))
    for id, question in (("a", QUESTION), ("b", OTHER)):
        at.engine.submit(look(id, SYSTEM, CAT, question))
        while at.engine.step():
            pass
    found, steps = read_recording(tmp_path / "steps")
    steps = list(steps)
    data = (tmp_path / "steps").read_bytes()
    assert [secret in data for secret in (CAT.pixels, CAT.digest)] == [prompts, prompts]
    replay = Replay(again.runner, plan, found, [given for step in steps for given in step.inputs])
    assert [difference for step in steps for difference in replay.step(step)] == []
    assert (replay.report.hits, replay.report.hits_unknown) == (0, 1)
