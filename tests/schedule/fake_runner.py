"""A runner that computes nothing but knows what pages, slots, checkpoints and sinks hold, as token prefixes.

Every read is checked against the prefix that the row needs, so an action out of order, a page reused too early or a
state saved at the wrong place fails the test at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kakera.cache.prefix import PrefixCache
from kakera.contract.events import TokenLogprob
from kakera.contract.grid import PAGE
from kakera.contract.step import (
    Action,
    DemotePages,
    Drop,
    MovePages,
    PromotePages,
    ReadRecords,
    ResetSlot,
    RestoreCheckpoint,
    RowResult,
    SamplingInput,
    SaveSink,
    SaveSlot,
    Segment,
    StepPlan,
    StepResult,
    WriteRecords,
    decode_plan,
    encode_plan,
    follow_drafts,
)

Prefix = tuple[int, ...]
VOCAB = 1000


def next_token(context: Prefix) -> int:
    """What the fake model says: a function of the whole context, like greedy decoding."""
    return hash(context) % VOCAB


class FakeRunner:
    def __init__(
        self,
        cache: PrefixCache,
        context_of: Callable[[str], Prefix],
        seconds: Callable[[StepPlan], float] = lambda plan: 0.01,
    ) -> None:
        """`context_of`: what a request's tokens really are, to hold plans against."""
        self.cache = cache
        self.context_of = context_of
        self.seconds = seconds
        self.pages: dict[int, Prefix] = {}  # page -> all tokens up to the last one written into it
        self.host_pages: dict[int, Prefix] = {}
        self.states: dict[int, Prefix] = {}  # slot -> tokens in its recurrent state
        self.sinks: dict[int, Prefix] = {}
        self.slot_sinks: dict[int, Prefix] = {}
        self.checkpoints: dict[int, Prefix] = {}
        self.tables: dict[int, list[int]] = {}  # slot -> the pages that plans have named
        self.read: dict[int, dict[int, Prefix]] = {}  # slot -> full pages that its request has found right
        self.ahead: dict[int, tuple[str, int]] = {}  # slot -> whose row has been computed already, and its start
        self.disk = None  # fake_disk.py
        self.failing: set[str] = set()  # request ids whose next row fails
        self.layer: Callable[[SamplingInput, int], Sequence[int]] | None = (
            None  # a draft layer: (text, most) -> guesses
        )
        self.computed_tokens = 0

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput] | None = None) -> StepResult:
        plan = decode_plan(encode_plan(plan))  # as another rank would get it
        for action in plan.before:
            self.apply(action)
        for row in plan.rows:
            assert len(self.tables[row.slot]) >= row.known_pages, "a row builds on pages that its slot never got"
            self.tables[row.slot][row.known_pages :] = row.new_pages
            assert len(self.tables[row.slot]) == row.page_count
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows in one slot"
        self.check_exclusive_writes(plan)
        results = tuple(self.run(row, (sampling or {}).get(row.request_id)) for row in plan.rows)
        assert not (plan.may_follow and plan.prefill)
        for i in plan.may_follow:
            self.run_ahead(plan.decode[i], results[i])
        for action in plan.after:
            self.apply(action)
        return StepResult(plan.step, results, self.seconds(plan))

    def apply(self, action: Action) -> None:
        match action:
            case ResetSlot(slot):
                self.ahead.pop(slot, None)
                self.states[slot] = ()
                self.tables[slot], self.read[slot] = [], {}
                self.slot_sinks[slot] = ()
            case RestoreCheckpoint(slot, checkpoint, position, sink):
                state = self.checkpoints[checkpoint]
                assert len(state) == position and position % PAGE == 0
                self.ahead.pop(slot, None)
                self.states[slot] = state
                self.tables[slot], self.read[slot] = [], {}
                if self.cache.sizes.windowed:
                    assert sink is not None and self.sinks[sink] == state[:PAGE], "the sink of another prefix"
                    self.slot_sinks[slot] = self.sinks[sink]
            case SaveSlot(slot, checkpoint, position):
                assert slot not in self.ahead and checkpoint not in self.checkpoints
                assert len(self.states[slot]) == position and position % PAGE == 0
                self.checkpoints[checkpoint] = self.states[slot]
            case SaveSink(slot, sink):
                assert sink not in self.sinks
                self.sinks[sink] = self.slot_sinks[slot][:PAGE]
            case DemotePages(pairs):
                for device, host in pairs:
                    assert host not in self.host_pages, "demoted over a page that was not dropped"
                    self.host_pages[host] = self.pages.pop(device)
            case PromotePages(pairs):
                for host, device in pairs:
                    self.pages[device] = self.host_pages[host]
            case MovePages(pairs):
                assert len({page for pair in pairs for page in pair}) == 2 * len(pairs)
                for old, new in pairs:
                    if old in self.pages:  # else taken, and not written yet
                        self.pages[new] = self.pages.pop(old)
                    for slot, table in self.tables.items():
                        self.tables[slot] = [-1 if page == old else page for page in table]
            case Drop(checkpoints, sinks, host_pages):
                for checkpoint in checkpoints:
                    self.checkpoints.pop(checkpoint, None)  # a failed row never saved it
                for sink in sinks:
                    self.sinks.pop(sink, None)
                for host in host_pages:
                    del self.host_pages[host]
            case WriteRecords() | ReadRecords():
                self.disk.carry_out(action)

    def check_exclusive_writes(self, plan: StepPlan) -> None:
        written = [page for row in plan.rows for page in self.tables[row.slot][row.start // PAGE :]]
        assert len(written) == len(set(written)), "two rows write one page"
        cached = {node.device for node in self.cache.tree.nodes()}
        assert not cached.intersection(written), "a row writes a page of the tree"

    def run(self, row: Segment, given: SamplingInput | None) -> RowResult:
        pages, drafted = self.tables[row.slot], self.context_of(row.request_id) + row.drafts
        assert row.tokens and row.tokens == drafted[row.start : row.end] and (not row.drafts or row.end == len(drafted))
        ahead = self.ahead.pop(row.slot, None) == (row.request_id, row.start)
        assert self.states[row.slot] == drafted[: row.end if ahead else row.start], "the slot holds another prefix"
        assert given is None or tuple(given.context) == self.context_of(row.request_id)
        read = self.read[row.slot]
        for i, page in enumerate(pages[: (row.start + PAGE - 1) // PAGE]):
            if self.pages[page] is not read.get(page):  # nothing was written since: contexts only grow
                known = min((i + 1) * PAGE, row.start)
                assert self.pages[page][:known] == drafted[:known], "a page holds another prefix"
                if known == (i + 1) * PAGE:
                    read[page] = self.pages[page]
        if row.request_id in self.failing:
            self.failing.remove(row.request_id)
            self.states[row.slot] = (-1,)
            return RowResult(row.request_id, error="told to fail")
        for i in range(row.start // PAGE, len(pages)):
            self.pages[pages[i]] = drafted[: min((i + 1) * PAGE, row.end)]
        if row.start < PAGE:
            self.slot_sinks[row.slot] = drafted[: min(row.end, PAGE)]
        result = self.answer(row, given)
        if row.propose:
            assert self.layer is not None and given is not None, "guesses are wanted of a layer that is not there"
            result = replace(
                result, proposed=tuple(self.layer(given.behind(result.tokens), row.propose))[: row.propose]
            )
        kept = len(result.tokens) if row.drafts else len(row.tokens)
        self.states[row.slot] = drafted[: row.start + kept]
        for save in row.saves:
            assert row.start < save.position <= row.end and save.position % PAGE == 0
            assert save.checkpoint not in self.checkpoints and (not row.drafts or save.position == row.end)
            if save.position <= row.start + kept:
                self.checkpoints[save.checkpoint] = drafted[: save.position]
        self.computed_tokens += len(row.tokens)
        return result

    def run_ahead(self, row: Segment, result: RowResult) -> None:
        """The next row, before anybody has seen the token; it needs the page that the plan has brought."""
        if not result.error:
            (token,), page = result.tokens, self.tables[row.slot][row.end // PAGE]
            self.states[row.slot] += (token,)
            self.pages[page] = self.states[row.slot][: (row.end // PAGE + 1) * PAGE]
            if row.end < PAGE:
                self.slot_sinks[row.slot] = self.states[row.slot]
            self.ahead[row.slot] = row.request_id, row.end

    def answer(self, row: Segment, given: SamplingInput | None) -> RowResult:
        if given is None:
            assert row.sampled == row.scored == 0
            return RowResult(row.request_id)
        targets = given.context[row.start + 1 : row.start + 1 + row.scored]
        echo = tuple(TokenLogprob(token, -1.0) for token in targets)
        if not row.sampled:
            return RowResult(row.request_id, prompt_logprobs=echo)

        def choose(drafts: int) -> RowResult:
            token = self.choose(given.behind(row.drafts[:drafts]))
            return RowResult(row.request_id, (token,), (TokenLogprob(token, -0.5),))

        return replace(follow_drafts(row.drafts, choose), prompt_logprobs=echo)

    @staticmethod
    def choose(given: SamplingInput) -> int:
        token = next_token(tuple(given.context))
        if given.generated < given.sampling.min_tokens:
            while token in given.sampling.stop_token_ids:
                token = (token + 1) % VOCAB
        return token

    def check_stores(self) -> None:
        """Once nothing is pending, the host store holds exactly what the cache believes, at the right prefix."""
        for node in self.cache.tree.nodes():
            prefix = self.prefix_of(node)
            if node.device is not None:
                assert self.pages[node.device] == prefix
            if node.host is not None:
                assert self.host_pages[node.host] == prefix
            if node.checkpoint is not None:
                assert self.checkpoints[node.checkpoint.id] == prefix
            if node.sink is not None:
                assert self.sinks[node.sink.id] == prefix
        coming = {begun.record.id for begun in self.cache.imports.live.values()}
        assert set(self.checkpoints) == set(self.cache.checkpoints.published) | coming
        assert set(self.host_pages) == self.cache.host_ids.held
        assert len(self.sinks) == self.cache.host.counts["sink"]

    @staticmethod
    def prefix_of(node) -> Prefix:
        keys = []
        while node.parent is not None:
            keys.append(node.key.tokens)
            node = node.parent
        return tuple(memoryview(b"".join(reversed(keys))).cast("i"))
