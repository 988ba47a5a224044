"""From a plan and a place to a disk tier: under a key that names everything that changes a bit of a page or a state."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from kakera.disk.home import Directory, DiskCache, check_home, digest_of, directories
from kakera.disk.log import COPIED_SHARE, SEGMENT_BYTES, DiskLog
from kakera.disk.record import VERSION
from kakera.disk.tier import QUEUE_BYTES, DiskTier
from kakera.plan.plan import Plan
from kakera.weights.fingerprint import fingerprint

log = logging.getLogger(__name__)
# To be raised when kernels or rounding change what a page or a state holds: a hit must equal a cold computation.
NUMERICS = 1


def disk_key(directory: Path, plan: Plan, activation: str, escha_bias: bool) -> Mapping[str, str]:
    """In words. Not in it: chunk, rows, context, sampling, driver. Raises OSError."""
    rotation = hashlib.blake2b(Path(plan.rotation).read_bytes(), digest_size=16).hexdigest() if plan.rotation else ""
    kv, tower = plan.kv, plan.vision_tower
    codec = f"{kv.codec}, group {kv.group}, window {kv.window_pages} pages" if kv.windowed else kv.codec
    return {
        "model": directory.name,
        "weights": fingerprint(directory),
        "biases of Escha files": str(escha_bias),
        "KV codec": codec,
        "rotation": rotation,
        "states": plan.state_dtype,
        "activations": activation,
        "device": plan.target.kind,
        "cards": str(len(plan.device_bytes) if plan.target.has_cards else 1),
        "numerics": str(NUMERICS),
        "file format": str(VERSION),
        **({"draft layer": "computed"} if plan.spec.drafting else {}),
        **({} if tower is None else {"vision tower": fingerprint(Path(tower))}),
    }


def open_disk(wanted: DiskCache, key: Mapping[str, str], record_bytes: int) -> DiskTier | None:
    """None, and a line in the log says why, if it can not be used: the engine goes on without it. `record_bytes`: of
    the largest record. Raises UsageError if the home is not private."""
    check_home(wanted.home)
    name = digest_of(key)
    segment = max(SEGMENT_BYTES, (COPIED_SHARE + 1) * record_bytes)  # a used checkpoint can be written again
    try:
        disk = DiskLog(wanted.home, name, key, wanted.limit, segment)
    except BlockingIOError:
        log.warning("another kakera writes to the disk cache in %s/%s: this one goes without", wanted.home, name)
        return None
    except OSError as error:
        log.warning("no disk cache in %s (%s): this server goes without", wanted.home, error.strerror)
        return None
    if len(disk) == 0:
        _tell_why_empty(key, [each for each in directories(wanted.home) if each.path.name != name])
    return DiskTier(disk, wanted.daily, max(QUEUE_BYTES, 4 * record_bytes))


def _tell_why_empty(key: Mapping[str, str], others: list[Directory]) -> None:
    """One line if there are records of this model that something makes unusable: else a cache goes dark unnoticed."""
    alike = [each for each in others if each.key.get("model") == key["model"] and each.bytes]
    if not alike:
        return
    nearest = min(alike, key=lambda each: len(differences(each.key, key)))
    log.warning(
        "the disk cache holds %.2f GB of %s that can not be used now, because %s; it goes when room is needed",
        sum(each.bytes for each in alike) / 1e9,
        key["model"],
        " and ".join(differences(nearest.key, key)),
    )


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Never empty for keys that differ: one that is not always there (a borrowed tower) may be missing in either."""
    changed = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    return [
        f"{name} changed"
        if name in ("weights", "rotation", "vision tower")
        else f"{name} changed from {old.get(name)} to {new.get(name)}"
        for name in changed
    ]
