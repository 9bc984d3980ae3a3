"""Which requests belong together."""

from typing import Any

from hvd_ray.serving.protocol import ChatRequest, CompletionRequest
from hvd_ray.serving.sessions import session_of


def chat(*turns: str, **extra: Any) -> ChatRequest:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    return ChatRequest(messages=messages, **extra)


def session(body: Any, *, tenant: str = "t", header: str | None = None) -> str:
    return session_of(vars(body), tenant=tenant, header=header)


def test_later_turns_stay_with_the_conversation() -> None:
    first = session(chat("be kind", "hello"))
    assert session(chat("be kind", "hello", "hi", "and now?")) == first
    assert session(chat("be kind", "goodbye")) != first


def test_what_is_named_wins_over_the_text() -> None:
    named = session(chat("a", "b", user="u1"))
    assert session(chat("c", "d", user="u1")) == named
    assert session(chat("a", "b", session_id="s", user="u1")) != named
    assert session(chat("a", "b", user="u1"), header="s") == session(chat("x", "y"), header="s")


def test_tenants_are_apart() -> None:
    body = CompletionRequest(prompt="abc")
    assert session(body) != session(body, tenant="other")


def test_prompts_with_one_head_belong_together() -> None:
    head = list(range(200))
    one, two = (CompletionRequest(prompt=[*head, last]) for last in (1, 2))
    assert session(one) == session(two)
    assert session(CompletionRequest(prompt=[5, *head])) != session(one)
