"""The command line as a user meets it: by its output and its exit status."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from in_process import run

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 1e7,
}
TIGHT = ["qwen3.8-27b", "--gpus", "8GB"]
FITTING = ["qwen3.8-27b", "--gpus", "12GB,12GB", "--context", "256k"]


def kakera(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run(*arguments, **{"COLUMNS": "120", **more})


def apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    environment = {**os.environ, "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kakera.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the right files but hardly any tensors."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    tensors = {"model.norm.weight": np.ones(128, np.float16), "lm_head.weight": np.ones((512, 128), np.float16)}
    tensors |= {f"model.layers.{i}.mlp.up_proj.weight": np.ones((256, 128), np.float16) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_version() -> None:
    import kakera as package

    assert apart("--version").stdout == f"kakera {package.__version__}\n"


def test_plan_that_fits_prints_a_table() -> None:
    done = apart("plan", *FITTING)
    assert done.returncode == 0
    for words in ("weights", "KV pages, one full request", "CUDA graphs", "prefix cache store", "262144", "estimate"):
        assert words in done.stdout
    assert done.stderr == ""


def test_plan_that_does_not_fit_says_what_would() -> None:
    done = apart("plan", *TIGHT)
    assert done.returncode == 1
    assert "does not fit on 8GB" in done.stdout and "--gpus 8GB,8GB" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "fits"), [(FITTING, True), (TIGHT, False)])
def test_plan_json_is_one_document(arguments: list[str], fits: bool) -> None:
    done = kakera("plan", *arguments, "--json")
    data = json.loads(done.stdout)
    assert data["fits"] is fits and done.returncode == (0 if fits else 1)
    assert done.stderr == ""
    assert sum(row["bytes"] for row in data["rows"] if row["place"] == "device") == data["totals"]["device"]


def test_plan_of_a_directory_reads_its_headers(model: Path) -> None:
    data = json.loads(kakera("plan", str(model), "--gpus", "12GB", "--json").stdout)
    weights = next(row["bytes"] for row in data["rows"] if row["name"] == "weights")
    assert weights == 2 * (128 + 512 * 128 + 4 * 256 * 128)
    assert data["context"] == 8192


def test_plan_of_a_config_alone_computes_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert json.loads(kakera("plan", str(tmp_path), "--gpus", "cpu", "--json").stdout)["fits"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "no-such-thing"], "not a Hugging Face repo id"),
        (["plan", "qwen3.8-9b"], "knows the shapes qwen3.8-27b, "),
        (["plan", *FITTING, "--gpus", "12GB,12GB,12GB"], "can not share 4 KV heads"),
        (["plan", "qwen3.8-27b", "--gpus", "gtx99"], "not a known card"),
        (["plan", "--host-cache", "much"], "--host-cache 'much' is not a size"),
        (["plan", "--gpus", "cpu:"], "--gpus cpu:'' is not a size"),
        (["plan", "--rotation", "nowhere"], "--rotation nowhere: no such directory"),
        (["plan", "--context", "many"], "write 131072 or 128k"),
        (["plan", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
        (["info", "scripted:/no/such/file"], "no file"),
        (["eval", "ppl", "qwen3.8-27b"], "a shape without weights"),
        (["eval", "json", "mini", "--limit", "1", "--out", "no-such-directory/answers.jsonl"], "no directory"),
    ],
)
def test_wrong_usage_is_two_and_says_why(arguments: list[str], words: str) -> None:
    for done in (kakera(*arguments), *([apart(*arguments)] if words == "no-such-command" else ())):
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stdout == "" and "Traceback" not in done.stderr


def test_unreachable_repository_is_one_clear_line() -> None:
    done = apart("plan", "owner/name")
    assert done.returncode == 1
    assert done.stderr.startswith("kakera: owner/name could not be fetched") and done.stderr.count("\n") == 1


def test_quantize_of_nothing_says_that_there_is_no_directory() -> None:
    done = kakera("quantize", "nosuch", "out")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "kakera: nosuch: no such directory\n")


def test_missing_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    done = kakera("info", str(model))
    assert done.returncode == 1
    assert "lacks tokenizer.json" in done.stderr


def test_info_groups_layers_and_adds_up(model: Path) -> None:
    data = json.loads(kakera("info", str(model), "--json").stdout)
    groups = {group["role"]: group for group in data["groups"]}
    assert groups["layers.*.mlp.up_proj"]["count"] == 4
    assert groups["layers.*.mlp.up_proj"]["bits_per_weight"] == 16
    assert data["bytes"] == sum(group["bytes"] for group in data["groups"])
    assert data["kv_bytes_per_token"]["bf16"] == 2 * 1 * 2 * 64 * 2  # K and V, one full layer, two heads of 64


def test_plan_says_what_it_chose_and_hears_what_was_asked():
    def planned(*options: str) -> str:
        return kakera("plan", "qwen3.8-27b", "--gpus", "rtx5070", *options).stdout

    text = planned()
    assert "--embedding host: +" in text and "left over" in text
    assert "Under WSL2, where 1.0 GB more stay free" in text or "On Linux it is" in text
    asked = ("--embedding", "host", "--staging", "2", "--chunk", "512", "--max-running", "1", "--reserve", "500MB")
    data = json.loads(planned(*asked, "--context", "64k", "--pool", "70000", "--json"))
    found = (data["embedding"], data["staging"], data["chunk"], data["max_running"], data["reserve_bytes"])
    assert found == ("host", 2, 512, 1, 500_000_000) and data["choices"] == [] and data["elsewhere"] is None
    assert data["fits"] and data["context"] == 65_536 and data["pool_tokens"] == 70_016 and data["rows"]
    assert json.loads(planned("--pool", "all", "--json"))["fits"]


def test_info_shows_whole_names_and_breaks_no_word_on_a_narrow_terminal() -> None:
    groups = json.loads(kakera("info", "mini", "--json").stdout)["groups"]
    for columns, lines_a_name in (("80", 1.0), ("66", 1.7)):
        head, rule, *table = kakera("info", "mini", COLUMNS=columns).stdout.splitlines()
        width = head.index("kind")
        table = table[: next(i for i, line in enumerate(table) if line.startswith("mini: "))]
        pieces = [line[:width].strip() for line in table]
        assert set(rule.strip()) == {"─"} and max(map(len, table)) <= int(columns)
        assert "".join(pieces) == "".join(group["role"] for group in groups)
        ends = ("".join(pieces[: i + 1]) for i in range(len(pieces)))
        names = {"".join(group["role"] for group in groups[: i + 1]) for i in range(len(groups))}
        assert all(end in names or end.endswith((".", "_")) for end in ends)
        assert len(pieces) <= lines_a_name * len(groups)


def test_doctor_json_matches_its_exit_status() -> None:
    done = kakera("doctor", "--json")
    data = json.loads(done.stdout)
    broken = [finding for finding in data["findings"] if finding["status"] == "broken"]
    assert done.returncode == (1 if broken else 0) and data["ok"] is not bool(broken)
    assert {"python", "torch", "gpu", "memory", "disk", "port", "bundled model"} <= {
        f["name"] for f in data["findings"]
    }
    assert all(finding["fix"] for finding in data["findings"] if finding["status"] != "ok")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", *FITTING]])
def test_light_commands_start_fast_and_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys; sys.argv[0] = 'kakera'\n"
        "from kakera.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'fastapi', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # processor time, not the clock: 0.2-0.4 s on a free core, up to twice that beside other busy processes
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_server_process_holds_no_torch(tiny_model: Path) -> None:
    """Everything that `serve` does in its own process before it answers, but the engine process it starts."""
    code = (
        "import sys\n"
        "from kakera.cli.engine import recipe_for, served_model\n"
        "from kakera.cli.model import resolve_model\n"
        "from kakera.plan.plan import Wishes\n"
        "import kakera.cli.serve, kakera.run.process.client, kakera.server.run\n"
        "model = resolve_model(sys.argv[1])\n"
        "served_model(model, None), recipe_for(model, Wishes(gpus='cpu'), print)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_model)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
