"""/metrics as Prometheus reads it, and the routes by which routers look at a worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kakera
from kakera.contract.events import EngineStats
from kakera.run.process.kv_events import KvEvents
from kakera.server.metrics.prometheus import Metrics
from kakera.server.metrics.record import RequestRecord, record_refusal
from kakera.server.metrics.routers import NAMES

ROOT = Path(kakera.__file__).parents[2]


def families(text: str) -> dict:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict, family: str, sample: str = "", **labels: str) -> float:
    (one,) = [s for s in found[family].samples if s.name == (sample or s.name) and labels.items() <= s.labels.items()]
    return one.value


@pytest.fixture
def scraped(serve):
    live = serve([{"text": "Hello."}])
    live.chat()
    live.chat(temperature=-1)  # refused
    text = live.http.get("/metrics").text
    return text, families(text)


def test_prometheus_reads_all_of_it_and_no_family_comes_twice(scraped):
    text, found = scraped
    names = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(names) == len(set(names))
    assert found["kakera_time_to_first_token_seconds"].type == "histogram"
    assert found["kakera_requests"].type == "counter" and found["kakera_running"].type == "gauge"
    assert value(found, "kakera_info", model="mini") == 1
    assert value(found, "kakera_refused", "kakera_refused_total", code="invalid_value") == 1


def test_routers_find_the_names_that_they_know(scraped):
    _, found = scraped
    for ours, theirs in NAMES:
        assert found[ours].type == found[theirs].type
        renamed = {(s.name.removeprefix(theirs), *sorted(s.labels.items())) for s in found[theirs].samples}
        assert renamed and all(("model_name", "mini") in key for key in renamed)
    assert value(found, "vllm:generation_tokens", "vllm:generation_tokens_total") > 0
    assert value(found, "vllm:time_to_first_token_seconds", "vllm:time_to_first_token_seconds_count") == 1
    assert found["vllm:cache_config_info"].samples[0].labels["block_size"] == "64"


def test_engine_figures_become_gauges():
    stats = EngineStats(running=2, waiting=3, pages_free=60, pages_cached=20, pages_total=100)
    stats.host_bytes, stats.counters = {"checkpoint": 70, "page": 5}, {"preemptions": 4}
    found = families(Metrics().render(stats, "m").decode())
    assert value(found, "kakera_pages_used") == 40 and value(found, "kakera_kv_usage_ratio") == 0.4
    assert value(found, "kakera_host_cache_bytes", kind="checkpoint") == 70
    assert value(found, "vllm:gpu_cache_usage_perc") == 0.4
    assert value(found, "vllm:kv_cache_usage_perc") == 0.4 and value(found, "vllm:num_requests_waiting") == 3
    assert value(found, "kakera_engine_counter", name="preemptions") == 4


def test_pages_that_are_lent_are_neither_used_nor_free():
    stats = EngineStats(pages_free=30, pages_total=100, pages_lent=50, slots_total=4, slots_lent=2, held_back=1)
    found = families(Metrics().render(stats, "m").decode())
    assert value(found, "kakera_pages_used") == 20 and value(found, "kakera_kv_usage_ratio") == 0.7
    assert value(found, "kakera_pages_lent") == 50 and value(found, "kakera_slots_lent") == 2
    assert value(found, "kakera_held_back") == 1


def test_a_spill_is_bytes_by_region_until_it_is_over():
    metrics = Metrics()
    for found, weights, pages in (({"weights": 64}, 64, None), ({"KV pages": 7}, 0, 7), ({}, 0, 0)):
        metrics.note_spill(found)
        shown = families(metrics.render(EngineStats(), "m").decode())
        assert value(shown, "kakera_spill_suspected", region="weights") == weights
        assert pages is None or value(shown, "kakera_spill_suspected", region="KV pages") == pages


def test_labels_do_not_grow_with_requests():
    metrics = Metrics()

    def series() -> int:
        return sum(len(family.samples) for family in families(metrics.render(EngineStats(), "m").decode()).values())

    def request(i: int) -> None:
        record = RequestRecord(f"id-{i}", "/v1/chat/completions", i, metrics, began=0.0)
        record.tokens(0, 1)
        record.failed(None if i % 2 else RuntimeError(f"text {i}"))
        record_refusal(metrics, "other", 404, "http_404", f"field{i}")

    request(0), request(1)
    before = series()
    for i in range(2, 50):
        request(i)
    assert series() == before
    assert len(metrics.recent) == 50 and "text" not in str(metrics.recent)


def test_the_guide_has_a_line_for_every_metric(scraped):
    guide = (ROOT / "docs" / "metrics.md").read_text()
    names = {name for name in re.findall(r"^# TYPE (\S+)", scraped[0], re.M) if not name.endswith("_created")}
    assert not {name for name in names if f"`{name}`" not in guide}


def test_routers_learn_model_sizes_and_load(live):
    info = live.http.get("/get_model_info").json()
    assert (info["model_path"], info["is_generation"]) == ("mini", True)
    assert live.http.get("/model_info").json() == info
    server = live.http.get("/get_server_info").json()
    assert (server["served_model_name"], server["dp_size"], server["context_length"]) == ("mini", 1, 4096)
    loads = live.http.get("/v1/loads").json()
    assert loads["dp_rank_count"] == len(loads["loads"]) == 1
    assert loads["aggregate"]["total_running_reqs"] == loads["loads"][0]["num_running_reqs"] == 0
    assert live.http.get("/get_load").json() == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]


def test_routers_learn_where_a_worker_tells_what_is_cached(live, serve):
    assert live.http.get("/kv_event_sources").json() == {}
    told = serve([{"text": "x"}], kv_events=KvEvents("*", 5557, "kv@pod@mini"))
    [(rank, source)] = told.http.get("/kv_event_sources").json().items()
    assert (rank, source["endpoint"], source["replay_endpoint"]) == ("0", "tcp://*:5557", "tcp://*:5558")
    assert (source["topic"], source["publisher"], source["encoding"]) == ("kv@pod@mini", "zmq", "msgpack")


def test_flushing_is_a_post_that_says_what_it_freed(live):
    assert live.http.get("/flush_cache").status_code == 405
    answer = live.http.post("/flush_cache")
    freed = {"success": True, "pages": 3, "checkpoints": 1, "host_bytes": 5, "disk_bytes": 0}
    assert answer.json() == freed
    assert live.http.post("/flush_cache", json={"disk": True}).json() == {**freed, "disk_bytes": 7}
    assert live.http.post("/flush_cache", json={"disk": "yes"}).status_code == 400


def test_a_sweep_is_a_post_that_says_sizes_and_times(live):
    assert live.http.get("/v1/kakera/sweep").status_code == 405
    (read,) = live.http.post("/v1/kakera/sweep").json()["reads"]
    assert read == {"region": "weights", "offset": 0, "bytes": 64 * 2**20, "seconds": [0.001, 0.0001]}


def test_a_key_guards_the_routers_routes_but_not_metrics(serve):
    live = serve([{"text": "x"}], keys=("secret",))
    for path in ("/get_model_info", "/get_server_info", "/v1/loads", "/v1/kakera/status"):
        assert live.http.get(path).status_code == 401
    assert live.http.post("/flush_cache").status_code == live.http.post("/v1/kakera/sweep").status_code == 401
    assert live.http.get("/metrics").status_code == live.http.get("/").status_code == 200
