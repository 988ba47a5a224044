"""Whose a request is: by its key, without keys by address and program; the engine learns a name that says nothing. And
whether it gives way."""

import pytest
from test_enforced import BODIES, CHAT

from kakera.errors import UsageError
from kakera.server.http.access import Access


def client_of(live, route=CHAT, **headers) -> str:
    assert live.http.post(route, json=BODIES[route], headers=headers).status_code == 200
    return live.engine.requests[-1].client


def test_with_keys_the_key_is_the_client(serve):
    live = serve([{"text": "x"}], keys=("one", "two"))
    names = {
        client_of(live, Authorization=f"Bearer {key}", **{"User-Agent": agent})
        for key in ("one", "two")
        for agent in "ab"
    }
    assert len(names) == 2 and not any(key in name for key in ("one", "two") for name in names)


def test_a_valid_key_is_the_client_whatever_is_sent_beside_it(serve):
    live = serve([{"text": "x"}], keys=("one", "two"))
    assert len({client_of(live, Authorization=f"Bearer {i}", **{"x-api-key": "one"}) for i in range(3)}) == 1


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_prefix_cache_per_key_is_asked_for(serve, route, apart):
    live = serve([{"text": "x"}], keys=("one", "two"), cache_per_key=apart)
    salts = []
    for key in ("one", "two", "one"):
        client_of(live, route, Authorization=f"Bearer {key}")
        salts.append(live.engine.requests[-1].salt)
    assert salts[0] == salts[2] and (salts[0] != salts[1]) == apart == (b"" not in salts)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_request_may_bring_a_salt_of_its_own(serve, route, apart):
    live = serve([{"text": "x"}], keys=("one", "two"), cache_per_key=apart)
    salts = []
    for key, salt in (("one", None), ("one", "a"), ("one", "b"), ("two", "a"), ("one", "a")):
        headers = {"Authorization": f"Bearer {key}"}
        assert live.http.post(route, json={**BODIES[route], "cache_salt": salt}, headers=headers).status_code == 200
        salts.append(live.engine.requests[-1].salt)
    assert salts[1] == salts[4] and len(set(salts)) == (4 if apart else 3) and (salts[0] == b"") != apart
    for wrong in ("", 5):
        refused = live.http.post(route, json={**BODIES[route], "cache_salt": wrong}, headers=headers)
        assert refused.status_code == 400 and "cache_salt" in refused.text


def test_a_prefix_cache_per_key_needs_keys():
    with pytest.raises(UsageError, match="--api-key-file"):
        Access.when_bound("127.0.0.1", cache_per_key=True)


def test_without_keys_programs_of_one_machine_are_told_apart(serve):
    live = serve([{"text": "x"}])
    names = [client_of(live, **{"User-Agent": agent}) for agent in ("claude-cli/2.1", "curl/8", "claude-cli/2.1")]
    assert names[0] == names[2] != names[1] and all(names)
    assert client_of(live, Authorization="Bearer a") != client_of(live, Authorization="Bearer b")


@pytest.mark.parametrize("route", BODIES)
def test_every_dialect_names_its_client(serve, route):
    live = serve([{"text": "x"}])
    assert len({client_of(live, route), client_of(live, route), client_of(live, **{"User-Agent": "other"})}) == 2


@pytest.mark.parametrize("route", BODIES)
def test_every_dialect_has_the_background_by_a_header(serve, route):
    live = serve([{"text": "x"}])
    for priority, background in ((None, False), ("normal", False), ("Background", True)):
        headers = {} if priority is None else {"X-Kakera-Priority": priority}
        assert live.http.post(route, json=BODIES[route], headers=headers).status_code == 200
        assert live.engine.requests[-1].background is background
    refused = live.http.post(route, json=BODIES[route], headers={"X-Kakera-Priority": "high"})
    assert refused.status_code == 400 and "normal or background" in refused.text
