"""How tokens fall to shards: all of them, evenly by session, unevenly by tenant."""

from dataclasses import replace

import pytest

from hvd_ray.errors import UserError
from hvd_ray.scaling.load import Load

LOAD = Load(10_000_000, largest_tenant=0.5)


@pytest.mark.parametrize("dealt_by", ["session", "tenant"])
def test_every_token_falls_to_a_shard(dealt_by: str) -> None:
    tokens = LOAD.shard_tokens(64, dealt_by=dealt_by)
    assert tokens.sum() == pytest.approx(LOAD.num_tokens)
    assert (tokens[:-1] >= tokens[1:]).all()
    assert tokens.min() > 0


def test_a_large_tenant_is_spread_by_sessions_and_heaps_up_by_tenants() -> None:
    by_session = LOAD.shard_tokens(64)[0] / LOAD.num_tokens
    by_tenant = LOAD.shard_tokens(64, dealt_by="tenant")[0] / LOAD.num_tokens
    assert by_session < 1.5 / 64
    assert by_tenant > 0.5


def test_many_sessions_are_summed_as_few_are() -> None:
    """The normal law takes over from drawing one by one without a jump."""
    drawn, summed = Load(900 * 512), Load(1100 * 512)
    spread = [
        load.shard_tokens(8).std() / load.shard_tokens(8).mean() * load.num_sessions**0.5
        for load in (drawn, summed)
    ]
    assert spread[0] == pytest.approx(spread[1], rel=0.8)


def test_it_is_the_same_each_time_and_another_with_another_seed() -> None:
    assert (LOAD.shard_tokens(16) == LOAD.shard_tokens(16)).all()
    assert (LOAD.shard_tokens(16) != replace(LOAD, seed=1).shard_tokens(16)).any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_tokens": 0}, "--tokens must be 1"),
        ({"trace_tokens": 0}, "--trace-tokens"),
        ({"num_tokens": 100}, "--trace-tokens must be from 1 to --tokens"),
        ({"largest_tenant": 1.0}, "--largest-tenant"),
    ],
)
def test_bad_sizes_are_refused(change: dict, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        replace(LOAD, **change)
