"""A model directory's fingerprint: any weight of a small one changes it, and nothing that does not matter."""

from __future__ import annotations

import shutil
from pathlib import Path

from kakera.weights.fingerprint import fingerprint


def test_one_bit_of_one_weight_or_of_the_config_changes_it_and_a_name_or_a_date_do_not(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(3 * 2**20))
    known = {fingerprint(model)}
    shutil.copytree(model, tmp_path / "elsewhere")
    assert fingerprint(tmp_path / "elsewhere") in known
    for name, place in (("config.json", 0), ("model.safetensors", 0), ("model.safetensors", 2**21 + 1)):
        data = bytearray((model / name).read_bytes())
        data[place] ^= 1
        (model / name).write_bytes(data)
        found = fingerprint(model)
        assert found not in known, (name, place)
        known.add(found)
    (model / "more.safetensors").touch()
    assert fingerprint(model) not in known
