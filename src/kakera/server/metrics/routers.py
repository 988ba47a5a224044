"""Our metrics once more under the names that routers and dashboards for vLLM read.

The endpoint picker of llm-d (Gateway API inference extension), the production-stack router and the usual Grafana
dashboards look for these. The meanings are the same; only names and the label `model_name` are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

NAMES = (
    ("kakera_running", "vllm:num_requests_running"),
    ("kakera_waiting", "vllm:num_requests_waiting"),
    ("kakera_kv_usage_ratio", "vllm:kv_cache_usage_perc"),
    ("kakera_kv_usage_ratio", "vllm:gpu_cache_usage_perc"),  # gpu_: as the production-stack still reads them
    ("kakera_prompt_tokens", "vllm:gpu_prefix_cache_queries"),
    ("kakera_cached_tokens", "vllm:gpu_prefix_cache_hits"),
    ("kakera_prompt_tokens", "vllm:prompt_tokens"),
    ("kakera_generated_tokens", "vllm:generation_tokens"),
    ("kakera_prompt_tokens", "vllm:prefix_cache_queries"),  # vLLM counts both in tokens, too
    ("kakera_cached_tokens", "vllm:prefix_cache_hits"),
    ("kakera_drafted_tokens", "vllm:spec_decode_num_draft_tokens"),
    ("kakera_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
    ("kakera_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ("kakera_inter_token_seconds", "vllm:inter_token_latency_seconds"),
    ("kakera_request_seconds", "vllm:e2e_request_latency_seconds"),
    ("kakera_queue_seconds", "vllm:request_queue_time_seconds"),
    ("kakera_request_prompt_tokens", "vllm:request_prompt_tokens"),
    ("kakera_request_generated_tokens", "vllm:request_generation_tokens"),
)


def known_to_routers(ours: Iterable[Metric], model: str, block_size: int, blocks: int) -> Iterator[Metric]:
    found = {family.name: family for family in ours}
    for name, other in NAMES:
        yield _renamed(found[name], other, model)
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "1; sizes of the KV cache", labels=["model_name", "block_size", "num_gpu_blocks"]
    )
    info.add_metric([model, str(block_size), str(blocks)], 1)
    yield info


def _renamed(family: Metric, name: str, model: str) -> Metric:
    metric = Metric(name, f"{family.name}: {family.documentation}", family.type)
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        suffix = sample.name.removeprefix(family.name)
        metric.samples.append(Sample(name + suffix, {"model_name": model, **sample.labels}, sample.value))
    return metric
