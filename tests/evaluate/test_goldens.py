"""The reference model against values that transformers computed. Needs --reference DIR: the weights are 190 MB."""

from pathlib import Path

import pytest
from golden_values import GoldenReport, check_goldens

GOLDENS = Path(__file__).parent.parent / "data" / "goldens"


@pytest.fixture(scope="module")
def reports(reference):
    return {r.name: r for r in check_goldens(reference, GOLDENS / "goldens.json", GOLDENS / "logits.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat32", "text63", "chat64", "text130", "text700"])
def test_the_reference_model_gives_the_golden_values(reports, name):
    report: GoldenReport = reports[name]
    assert report.logit_difference < 2e-3
    assert report.nll_difference < 2e-3
    assert (report.greedy_equal, report.margin) == (report.greedy_total, None)
    assert report.drafts_equal == report.drafts_total > 0
