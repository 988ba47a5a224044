"""A proof as a record that its owner can post: sizes, times and readings. No names of hosts, files or users, no serial
numbers, no prompts, and no words of a server that might hold one."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

from kakera import __version__
from kakera.plan.plan import Plan
from kakera.prove.trace import Trace
from kakera.prove.verdict import Verdict, least_free, peak_bytes
from kakera.run.spilled import usual_rate
from kakera.target.devices import host_memory
from kakera.target.wsl import under_wsl

FORMAT = 1
FIGURES = 6  # significant ones of a time


def summary(verdict: Verdict, trace: Trace, plan: Plan) -> dict[str, Any]:
    """The verdict and the figures that a person looks for."""
    card, filled, resent = trace.card, trace.filled, trace.resent
    usual = usual_rate(trace.sweeps[0]) if trace.sweeps else 0.0
    decode = {"at_little_context": trace.calm_decoding, "at_the_end": trace.decoding}
    return {
        "proven": verdict.proven,
        "findings": [asdict(finding) for finding in verdict.findings],
        "not_watched": list(verdict.unwatched),
        "context": plan.context,
        "max_running": plan.slots,
        "planned_bytes": plan.total("device"),
        "peak_bytes": peak_bytes(trace.samples, card) if card else None,
        "least_free_bytes": least_free(trace.samples),
        "prefill_tokens_per_second": filled.prompt_tokens / filled.first_token if filled else None,
        "decode_seconds": {name: found.seconds if found else None for name, found in decode.items()},
        "second_turn": asdict(resent) if resent else None,
        "read_bytes_per_second": usual or None,
    }


def record(verdict: Verdict, trace: Trace, plan: Plan) -> dict[str, Any]:
    """All of it."""
    found = summary(verdict, trace, plan)
    if trace.failure is not None:
        found["findings"] = [{**f, "text": "" if f["kind"] == "wrong" else f["text"]} for f in found["findings"]]
    spec, total = plan.spec, host_memory()[0]
    whole: dict[str, Any] = _short(
        {
            "format": FORMAT,
            "kakera": __version__,
            "system": {
                "system": platform.system(),
                "machine": platform.machine(),
                "wsl2": under_wsl(),
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "memory_gb": round(total / 1e9),
            },
            "model": {
                "type": spec.model_type,
                "layers": len(spec.layers),
                "hidden": spec.hidden,
                "vocab": spec.vocab,
            },
            "plan": {
                "device_bytes": list(plan.device_bytes),
                "chunk": plan.chunk,
                "pages": plan.pages,
                "kv": asdict(plan.kv),
                "state_dtype": plan.state_dtype,
                "host_cache": plan.host_cache,
                "staging": plan.staged,
                "embedding": plan.embedding,
                "reserve": plan.reserve,
                "rotated": plan.rotation is not None,
                "rows": [{"name": row.name, "place": row.place, "bytes": row.bytes} for row in plan.rows],
            },
            "verdict": found,
            "trace": {**asdict(trace), "failure": trace.failure is not None},
        }
    )
    return whole


def _short(value: Any) -> Any:
    """Times without digits that nobody measured: a third of the file."""
    if isinstance(value, float):
        return float(f"{value:.{FIGURES}g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
