"""Who may call: keys, and without keys this machine alone."""

import hmac
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hvd_ray.errors import UserError
from hvd_ray.serving.api_error import ApiError
from hvd_ray.serving.auth import ApiKeys, KeyFile, is_loopback_host, load_keys
from hvd_ray.types import scope_key
from tests.unit.serving.conftest import make_replica

KEY, OTHER = "k" * 32, "o" * 32
KEYS = ApiKeys(((KEY.encode(), "alice"), (OTHER.encode(), "bob")))
BODY = {"prompt": "badge", "max_tokens": 24, "temperature": 0, "return_metrics": True}


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\nalice {KEY}\n\nbob {OTHER}  # contractor\n")
    assert load_keys(file, {}).tenant_of == KEYS.tenant_of
    assert load_keys(None, {"HVD_API_KEYS": f"alice {KEY}\nbob {OTHER}"}) == KEYS
    assert load_keys(None, {}).is_open


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"alice {KEY} more", "line 1: expected NAME KEY"),
        (KEY, "line 1: expected NAME KEY"),
        (f"\nal/ice {KEY}", "line 2: expected NAME KEY"),
        ("alice short", "shorter than 16"),
        (
            "alice schlüssel-mit-umlauten-äöü",
            "line 1: the key of alice has characters beyond ASCII",
        ),
        (f"alice {KEY}\nbob {OTHER}\x01", "line 2: the key of bob has characters"),
        (f"alice {KEY}\nbob {KEY}", "another name's key"),
        ("# nothing", "holds no key"),
    ],
)
def test_a_key_file_that_cannot_be_used(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UserError, match=word) as caught:
        load_keys(file, {})
    assert KEY not in str(caught.value)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_keys(tmp_path / "none", {})


def test_keys_are_never_shown() -> None:
    assert KEY not in repr(KEYS)


@pytest.mark.parametrize("given", [KEY, OTHER, "w" * 32])
def test_every_key_is_compared_in_constant_time(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither how much of a key was right nor which key fits shows in the time."""
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    header = f"Bearer {given}"
    if given in (KEY, OTHER):
        assert KEYS.tenant(authorization=header, peer=None, host=None)
    else:
        with pytest.raises(ApiError):
            KEYS.tenant(authorization=header, peer=None, host=None)
    assert compared == [KEY.encode(), OTHER.encode()]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/toy", "/v1/completions", "/v1/chat/completions", "/ui/state"]
)
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", "Bearer", KEY])
def test_without_a_valid_key_401(
    open_client: Callable[..., TestClient], path: str, header: str | None
) -> None:
    client = open_client(keys=KEYS)
    headers = {"Authorization": header} if header else {}
    method = "POST" if "completions" in path else "GET"
    answer = client.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_with_keys_others_may_call_and_health_is_open(
    open_client: Callable[..., TestClient],
) -> None:
    client = open_client(keys=KEYS, peer="203.0.113.9")
    headers = {"Authorization": f"Bearer {KEY}", "Host": "models.example"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("peer", "host", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "localhost:8000", 200),
        ("::1", "[::1]:8000", 200),
        ("203.0.113.9", "127.0.0.1", 401),
        ("127.0.0.1", "rebound.example:8000", 401),
    ],
)
def test_without_keys_this_machine_alone(
    open_client: Callable[..., TestClient], peer: str, host: str, status: int
) -> None:
    client = open_client(peer=peer)
    assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_no_tenant_drafts_from_anothers_outputs(open_client: Callable[..., TestClient]) -> None:
    """The scope comes from the key, whatever else a caller says; within it reuse does happen."""
    client = open_client(make_replica(), keys=KEYS)

    def accepted(key: str, **extra: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        answer = client.post("/v1/completions", json={**BODY, **extra}, headers=headers).json()
        return int(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])

    cold = accepted(KEY)
    warm = accepted(KEY)
    assert warm > cold
    assert accepted(OTHER, user="alice") == cold
    assert accepted(KEY, cache_salt="one") == cold
    assert accepted(KEY, cache_salt="one") == warm
    assert accepted(KEY, cache_salt="two") == cold
    scope = scope_key(tenant="alice", model="toy")
    for salt in ("alice", scope, f"{scope}/one", f"../{scope}", "one"):
        assert accepted(OTHER, cache_salt=salt) == cold, "a salt is a word, never a whole scope"


def test_the_caches_room_is_shared_out_by_key() -> None:
    """Parts by `cache_salt` are their tenant's: nobody gets more room by making many."""
    replica = make_replica()
    try:
        owner_of = replica._stage.cache.owner_of
        scopes = [replica._admission.scope(name, salt) for name in ("alice", "bob")
                  for salt in (None, "one", "bob/x")]  # fmt: skip
        assert [owner_of(scope) for scope in scopes] == ["alice"] * 3 + ["bob"] * 3
    finally:
        replica.end()


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_which_hosts_are_loopback(host: str, is_loopback: bool) -> None:
    assert is_loopback_host(host) == is_loopback


def test_a_changed_file_of_keys_is_read_again_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice {'a' * 20}\n")
    file = KeyFile(path)
    assert file.changed() is None
    path.write_text(f"alice {'b' * 20}\nbob {'c' * 20}\n")
    found = file.changed()
    assert found is not None
    assert [tenant for _, tenant in found.tenant_of] == ["alice", "bob"]
    assert file.changed() is None
    for damage in ("alice short\n", ""):
        path.write_text(damage)
        with pytest.raises(UserError):
            file.changed()
        assert file.changed() is None, "said once"
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        file.changed()
