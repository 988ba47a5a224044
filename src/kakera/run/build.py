"""From a model directory and a plan to a running engine. The only place that allocates what the plan says."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from kakera.arch.layout import Dtypes, checkpoint_record
from kakera.cache.host import CacheSizes
from kakera.cache.prefix import PrefixCache
from kakera.constrain.compiler import Compiler
from kakera.constrain.output import Outputs
from kakera.contract.grid import pages_for
from kakera.disk.home import DiskCache
from kakera.errors import UsageError
from kakera.kv.cache import KVCache
from kakera.kv.pool import MakeMapper
from kakera.kv.rotation import Rotation
from kakera.model.load import Progress
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.model.tower import Tower
from kakera.ops.exchange import ALONE, Exchange
from kakera.ops.virtual_memory import CudaMapper
from kakera.plan.page_pool import PoolShape
from kakera.plan.plan import Plan
from kakera.plan.share import plan_of_rank
from kakera.plan.sizes import margin
from kakera.plan.store_sizes import StoreSizes
from kakera.run.asleep import Sleeper
from kakera.run.card_watch import CardWatch
from kakera.run.choose.chooser import Chooser, Chooses
from kakera.run.choose.spoken import Listener, Speaker
from kakera.run.engine import LocalEngine
from kakera.run.process.starting import Tell
from kakera.run.step.draft_layer import DraftLayer
from kakera.run.step.graphs import DecodeGraphs
from kakera.run.step.images import ImageEmbeddings
from kakera.run.step.page_tables import PageTables
from kakera.run.step.runner import TorchRunner
from kakera.run.step.warmup import warm_up
from kakera.run.store.disk import DiskRecords
from kakera.run.store.host import CheckpointShape, HostStore, Store
from kakera.run.store.open_disk import disk_key, open_disk
from kakera.run.store.pinned import PinnedStore, pinned_segments
from kakera.run.store.side_stream import SideStream
from kakera.schedule.drafts import Drafts
from kakera.schedule.lending import LEAST_TOKENS, LendingRule
from kakera.schedule.limits import Limits
from kakera.schedule.scheduler import Scheduler
from kakera.target.allocator import maps_pages, torch_segments
from kakera.target.as_torch import DTYPES, activation_of, is_there
from kakera.target.devices import device_bytes_used
from kakera.target.target import Target
from kakera.text.tokenizer import Tokenizer
from kakera.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)
LOADING = "loading layers"
PINNING = "host memory of the prefix cache (256 MB each)"
WARMING = "steps to warm up (kernels are compiled at the first start)"
NEAR_PLAN = 0.03  # of the plan: what is taken may differ by so much


def check_cards(plan: Plan, ranks: int = 1) -> None:
    """Raises UsageError if torch can not compute on what the plan is for: it may be made for cards elsewhere, or for
    more ranks than `ranks`. Before the first use of CUDA."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # else CUDA counts by speed, the plan as NVML does
    if not is_there(plan.target):
        raise UsageError("torch finds no NVIDIA GPU here (kakera doctor says why); --gpus cpu works")
    if plan.ranks > ranks:
        what = "cards" if plan.target.has_cards else "processes"
        one = f"{plan.device_bytes[0] / 1e9:.0f}GB" if plan.target.has_cards else "cpu"
        raise UsageError(f"the plan shares the model among {plan.ranks} {what}, and this computes on one: --gpus {one}")


def build_engine(
    directory: Path,
    plan: Plan,
    *,
    dtype: torch.dtype | None = None,
    progress: Tell | None = None,
    escha_bias: bool = False,
    grammars: bool = False,
    disk: DiskCache | None = None,
    drafts: Drafts | None = None,
) -> LocalEngine:
    """A runner of `build_runner`, whose arguments these are, and what decides for it, with guesses of what comes next
    if there are `drafts`."""
    runner = build_runner(
        directory, plan, dtype=dtype, progress=progress, escha_bias=escha_bias, grammars=grammars, disk=disk
    )
    sleeper = Sleeper(runner, directory, _loader(directory, plan, dtype, escha_bias))
    pool = runner.kv.store.pool
    card = CardWatch(lending_rule(plan, pool.shape), free_bytes, pool.hold) if pool.mapped_bytes else None
    return LocalEngine(scheduler_for(plan, runner.disk, drafts), runner, sleeper, card)


def build_runner(
    directory: Path,
    plan: Plan,
    *,
    dtype: torch.dtype | None = None,
    progress: Tell | None = None,
    escha_bias: bool = False,
    grammars: bool = False,
    disk: DiskCache | None = None,
    exchange: Exchange = ALONE,
) -> TorchRunner:
    """Load the weights and allocate pages, slots and states. Raises CheckpointError, UsageError.

    `progress` is told how far loading and warming up have come. `escha_bias`: add the biases that Escha files carry and
    their published scores leave out. `grammars`: build now what grammars need (1.3 s for 248,320 tokens) instead of
    with the first one, when running streams would wait for it. `disk`: keep prefixes there too. `exchange`: of a rank
    that shares the plan with others, which build theirs at the same time; all of `plan` is that of all of them.
    """
    rank, ranks, whole = exchange.rank, exchange.ranks, plan
    check_cards(whole, ranks)
    if disk is not None and ranks > 1:
        raise UsageError("--disk-cache: not for a model that several processes share yet")
    rotation = Rotation.load(Path(whole.rotation), whole.spec) if whole.rotation else None  # a wrong one is known now
    if rotation is not None and ranks > 1:
        rotation = rotation.of_rank(whole.spec, rank, ranks)
    plan = plan_of_rank(whole, rank, ranks)
    target, device = plan.target, torch.device(plan.target.kind)
    others = 0
    if target.has_cards:
        others = device_bytes_used()  # the plan left it to them
        take_memory(plan)
    dtype = dtype or DTYPES[target.dtype]
    tell = progress or (lambda stage, done, total: None)
    segments = None
    if plan.staged is not None and CacheSizes.of(plan).can_save:  # beside the loading: 8 GB take 5 s
        told = partial(tell, PINNING)
        segments = ThreadPoolExecutor(1).submit(pinned_segments, StoreSizes.of_plan(plan), told)
    told = partial(tell, LOADING)
    model = _loader(directory, plan, dtype, escha_bias, exchange)(told)
    images = None
    if plan.vision is not None:
        stored = Checkpoint.of_tower(Path(plan.vision_tower or directory), plan.spec)
        images = ImageEmbeddings(Tower.load(stored, dtype, device, on_host=plan.vision == "host"))
    mapper = mapper_for(target) if ranks == 1 else None
    kv = KVCache(plan.spec, plan.kv, plan.pages, plan.slots, rotation, device, plan.chunk, dtype, mapper)
    if target.has_cards:
        cap_allocator(plan, kv.store.pool.mapped_bytes)
    states = StatePool(plan.spec, plan.slots, device, dtype)
    dtypes = Dtypes(plan.state_dtype, activation_of(dtype))
    shape = CheckpointShape(checkpoint_record(plan.spec, plan.kv.checkpoint_pages, dtypes), device)
    chooser: Chooses = Listener(exchange)
    if rank == 0:
        compiler = Compiler(lambda: Tokenizer.load(directory), whole.spec.vocab, whole.spec.eos)
        if grammars:
            compiler.prepare()
        chooser = Chooser(Outputs(compiler))
        chooser = chooser if ranks == 1 else Speaker(chooser, exchange)
    tables = PageTables(plan.slots, pages_for(plan.context), device)
    graphs = None
    if model.capturable and kv.backend.capturable:  # all of a decode step is kernels
        graphs = DecodeGraphs(kv, states, tables)
    store: Store = HostStore(shape, kv.store, states)
    if segments is not None and plan.staged is not None:
        sizes, side = StoreSizes.of_plan(plan), SideStream(device)
        store = PinnedStore(shape, kv.store, states, sizes, segments.result(), plan.staged, side)
    records = None
    if disk is not None:
        key = disk_key(directory, plan, str(dtype).removeprefix("torch."), escha_bias)
        tier = open_disk(disk, key, plan.checkpoint_bytes)
        records = DiskRecords(store, tier) if tier is not None else None
    layer = DraftLayer(model, kv.backend, states, tables) if plan.spec.drafting else None
    runner = TorchRunner(model, kv, states, store, tables, chooser, graphs, records, layer, images)
    if target.has_cards:
        warm_up(runner, plan, partial(tell, WARMING))
        for line in over_plan(plan, taken_bytes() - others):
            log.warning(line)
    return runner


def _loader(
    directory: Path, plan: Plan, dtype: torch.dtype | None, escha_bias: bool, exchange: Exchange = ALONE
) -> Callable[[Progress], HybridModel]:
    """Reads a rank's model, as often as it is called."""
    return partial(
        HybridModel.load,
        directory,
        dtype or DTYPES[plan.target.dtype],
        torch.device(plan.target.kind),
        escha_bias=escha_bias,
        embedding_on_host=plan.embedding == "host",
        exchange=exchange,
        draft=plan.spec.drafting,
        spec=plan.spec if plan.vision is not None else None,
    )


def mapper_for(target: Target) -> MakeMapper | None:
    """By which KV pages can go back to the driver, where they can."""
    return CudaMapper if target.has_cards and maps_pages() else None


def take_memory(plan: Plan) -> None:
    """Cap torch's allocator, and have it grow its segments where that is chosen: so they leave no gaps behind."""
    if (settings := torch_segments().settings) is not None:
        with contextlib.suppress(StopIteration, RuntimeError):  # private names of torch, and drivers that can not
            names = ("_accelerator_setAllocatorSettings", "_cuda_setAllocatorSettings")
            grow = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
            grow(settings)
    cap_allocator(plan)


def cap_allocator(plan: Plan, beside: int = 0) -> None:
    """At what the plan gives torch and at what was to stay free: a request that needs more fails, and the driver never
    moves anything to the host. `beside`: bytes of the plan that are not torch's."""
    capacity = torch.cuda.get_device_properties(0).total_memory
    planned = plan.total("device") + margin(plan.device_bytes[0]) - sum(o.bytes for o in plan.target.overheads)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (planned - beside) / capacity))


def taken_bytes() -> int:
    """Of the card by anybody, with torch's memory as it was at the fullest moment."""
    return torch.cuda.mem_get_info()[1] - free_bytes()


def free_bytes() -> int:
    """Of the card, once torch's memory is again as it was at the fullest moment. Waits for nothing."""
    return torch.cuda.mem_get_info()[0] - torch.cuda.max_memory_reserved() + torch.cuda.memory_reserved()


def lending_rule(plan: Plan, pool: PoolShape) -> LendingRule:
    least = min(plan.pages, pages_for(LEAST_TOKENS))
    return LendingRule(pool, plan.slots, margin(plan.device_bytes[0]), least)


def over_plan(plan: Plan, taken: int) -> list[str]:
    """A warning if more is taken than planned: the promise of the table is broken, and a full card becomes slow."""
    planned = plan.total("device")
    if taken <= planned * (1 + NEAR_PLAN):
        return []
    return [
        f"the card holds {taken / 1e9:.2f} GB after the start where {planned / 1e9:.2f} GB were planned: another "
        "program has taken some, or the plan is wrong here; lower --context or --max-running if it gets slow"
    ]


def scheduler_for(plan: Plan, disk: DiskRecords | None = None, drafts: Drafts | None = None) -> Scheduler:
    """The deciding half, which no device is needed for."""
    return Scheduler(Limits.of(plan), PrefixCache(CacheSizes.of(plan)), time.monotonic, drafts, disk)
