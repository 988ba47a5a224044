"""A checkpoint's template comes to an end in bounded steps and memory, and says why; ordinary ones notice nothing."""

import time

import jinja2
import pytest

from kakera.chat import sandbox
from kakera.chat.sandbox import Sandbox

R = "range(100000)"
ENDLESS = {
    "loops in loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "items left out": f"{{% for a in {R} %}}{{% for b in {R} if false %}}{{% endfor %}}{{% endfor %}}",
    "a macro": f"{{% macro m() %}}{{% for b in {R} %}}{{% endfor %}}{{% endmacro %}}"
    f"{{% for a in {R} %}}{{{{ m() }}}}{{% endfor %}}",
    "with its own step": f"{{% set step = 1 %}}{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers that grow": "{% set ns = namespace(x=7) %}{% for a in range(100) %}{% set ns.x = ns.x ** 9 %}{% endfor %}",
    "a product": "{% set ns = namespace(x=7) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a text": "{{ 'a' * 10000000000 }}",
    "a list": "{{ (10000000000 * [1])|length }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_ended(name, monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS", 200_000)
    began = time.process_time()
    with pytest.raises(jinja2.TemplateError, match=r"steps|too large"):
        Sandbox().from_string(ENDLESS[name]).render(messages=[])
    assert time.process_time() - began < 20


def test_each_rendering_has_all_its_steps(monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS", 1_000)
    template = Sandbox().from_string("{% for m in messages if m %}{{ m }}{% endfor %}")
    for _ in range(5):
        assert template.render(messages=["a", ""] * 300) == "a" * 300


def test_ordinary_templates_are_as_before():
    text = "{% for i in [1, 2] %}{{ '-' * 3 }}{{ 2 ** 3 }}{{ i * 2 }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}"
    assert Sandbox().from_string(text).render() == "---82---84"
    text = "{% macro f(x) %}<{{ caller() if caller else x }}>{% endmacro %}{{ f(1) }}{% call f(2) %}3{% endcall %}"
    assert Sandbox().from_string(text).render() == "<1><3>"
    assert (
        Sandbox()
        .from_string("{% for k, v in d|items recursive %}{{ k }}{{ v }}{% else %}none{% endfor %}")
        .render(d={})
        == "none"
    )
