import pytest

from kakera.errors import UsageError
from kakera.evaluate.scoring import contains_all, exact_calls, exact_json, json_equal, score


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("The code is 7204.", ["7204"], True),
        ("7204", ["7204"], True),
        ("72045", ["7204"], False),
        ("17204", ["7204"], False),
        ("x7204", ["7204"], False),
        ("It is 72045, no, 7204", ["7204"], True),
        ("A CRIMSON lizard", ["a crimson lizard"], True),
        ("a crimson lizards", ["a crimson lizard"], False),
        ("_7204_", ["7204"], True),  # an underscore is neither letter nor digit
        ("été", ["t"], False),  # letters beyond ASCII are letters
        ("alpha and beta", ["alpha", "beta"], True),
        ("alpha and bet", ["alpha", "beta"], False),
        ("it is -10 degrees", ["-10"], True),
        ("costs 1.5", ["1.5"], True),
        ("costs 135", ["1.5"], False),  # the dot is a dot
        ("", ["x"], False),
        ("anything", [], True),
    ],
)
def test_contains_all_keeps_word_borders(answer, expected, right):
    assert contains_all(answer, expected) is right


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (214, 214.0, True),
        (True, 1, False),
        (1, True, False),
        (False, 0, False),
        (True, True, True),
        ("1", 1, False),
        (None, False, False),
        (None, None, True),
        ([1, 2], [1, 2.0], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": 1, "b": [True]}, {"b": [True], "a": 1.0}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ({"a": {"b": 1}}, {"a": {"b": True}}, False),
    ],
)
def test_json_values_compare_by_type_and_number_value(a, b, equal):
    assert json_equal(a, b) is equal


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("calls", "expected", "right"),
    [
        ([call("f", x=1)], [call("f", x=1.0)], True),
        ([call("f", x="1")], [call("f", x=1)], False),
        ([call("g", x=1)], [call("f", x=1)], False),
        ([call("f", x=1, y=2)], [call("f", x=1)], False),
        ([call("f"), call("g")], [call("g"), call("f")], False),
        ([call("f"), call("f")], [call("f")], False),
        ([], [call("f")], False),
        ([], [], True),
    ],
)
def test_exact_calls_compare_number_order_names_and_arguments(calls, expected, right):
    assert exact_calls(calls, expected) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ('{"a": 1, "b": "x"}', True),
        ('{\n  "b": "x",\n  "a": 1.0\n}', True),
        ('{"a": true, "b": "x"}', False),
        ('Here: {"a": 1, "b": "x"}', False),
        ('{"a": 1, "b": "x"} ', True),
        ('{"a": 1}', False),
        ('{"a": NaN, "b": "x"}', False),
        ("", False),
    ],
)
def test_exact_json_needs_the_whole_answer(answer, right):
    assert exact_json(answer, {"a": 1, "b": "x"}) is right


def test_score_applies_the_rule_of_the_case():
    none = {"id": "a", "score": "no_calls"}
    assert score(none, "Which file?", "Which file?", [])
    assert not score(none, "", " ", [])
    assert not score(none, "Sure.", "Sure.", [call("f")])
    after = {"id": "b", "score": "no_calls_contains_all", "contains_all": ["-10", "snowy"]}
    assert score(after, "", "It is snowy, -10.", [])
    assert not score(after, "", "It is snowy, -100.", [])
    assert not score(after, "", "It is snowy, -10.", [call("f")])
    assert score({"id": "c", "score": "exact_calls", "expected": [call("f")]}, "", "Let me look.", [call("f")])
    assert score({"id": "d", "score": "exact_json", "expected": [1]}, "[1]", "[1]", [])
    assert score({"id": "e", "score": "contains_all", "expected": ["x"]}, "x", "x", [])
    with pytest.raises(UsageError, match="unknown scoring rule 'vibes'"):
        score({"id": "f", "score": "vibes"}, "", "", [])
