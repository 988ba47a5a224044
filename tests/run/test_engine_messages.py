"""What crosses between the processes: long prompts as packed bytes."""

from kakera.contract.request import Boundary, Constraint, Request, Sampling, packed
from kakera.run.process.messages import Submit, decode_to_engine, encode

SAMPLING = Sampling(max_tokens=5, seed=1, constraint=Constraint("start: /a/"), loop_guard=True)


def crossed(request: Request) -> Request:
    message = decode_to_engine(encode(Submit.of(request)))
    assert isinstance(message, Submit)
    return message.request


def test_a_request_arrives_as_it_was_sent():
    request = Request("one", packed([1, 70_000, 0]), SAMPLING, (Boundary(2, "system"), Boundary(3, "prompt")), b"salt")
    assert crossed(request) == request


def test_tokens_may_be_any_sequence_and_arrive_packed():
    for tokens in ((), (5,), [3, 2**31 - 1]):
        assert crossed(Request("one", tokens, SAMPLING)).tokens == packed(tokens)


def test_a_long_prompt_takes_four_bytes_a_token():
    request = Request("one", packed(range(192_000)), SAMPLING)
    assert len(encode(Submit.of(request))) < 4 * 192_000 + 1000
