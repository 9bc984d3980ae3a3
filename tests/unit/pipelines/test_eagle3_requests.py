"""User turns that the target writes, and the prompts that are made of them."""

import pytest

from hvd_ray.errors import UserError
from hvd_ray.pipelines import eagle3_requests
from hvd_ray.pipelines.eagle3_collect import CollectedRow, write_shard
from hvd_ray.pipelines.eagle3_requests import (
    MAX_QUESTION_TOKENS,
    PromptMix,
    ask_requests,
    build_requests,
)

END = 2
"""The special token that ends a turn."""


class LetterCodec:
    """A token a letter, from 3 up; a chat is `0 text 2 1`."""

    def __init__(self, _model) -> None: ...

    def encode_chat(self, messages) -> list[int]:
        return [0, *(ord(letter) for letter in messages[-1]["content"]), END, 1]

    def decode(self, token_ids) -> str:
        return "".join(map(chr, token_ids))


@pytest.fixture(autouse=True)
def letters(monkeypatch) -> None:
    monkeypatch.setattr(eagle3_requests, "HFTextCodec", LetterCodec)


def collection(folder, *texts: str):
    folder.mkdir()
    asked = ask_requests(len(texts), model=folder, seed=0)
    rows = [
        CollectedRow(request=request, output_token_ids=(*map(ord, text), END), finish_reason="stop")
        for request, text in zip(asked, texts, strict=True)
    ]
    write_shard(folder, rows)
    return folder


def answered(folder) -> dict[str, str]:
    requests = build_requests(
        PromptMix(questions=folder), model=folder, max_tokens=9, max_prompt_tokens=1000
    )
    return {
        request.prompt_id: LetterCodec(None).decode(request.prompt_token_ids[1:-2])
        for request in requests
    }


def test_a_user_turn_is_sampled_from_what_every_chat_begins_with(tmp_path) -> None:
    first, second = ask_requests(2, model=tmp_path, seed=5)
    assert first.prompt_token_ids == (0,)
    assert first.temperature == 1.0
    assert first.request_id != second.request_id


def test_each_question_is_answered_once_without_the_end_of_its_turn(tmp_path) -> None:
    folder = collection(
        tmp_path / "asked", "What is a monad?", "Name three rivers.", "What is a monad?"
    )
    assert sorted(answered(folder).values()) == ["Name three rivers.", "What is a monad?"]


def test_scraps_and_questions_that_never_ended_are_left_out(tmp_path) -> None:
    folder = collection(tmp_path / "asked", "Hm?", "x" * MAX_QUESTION_TOKENS)
    assert answered(folder) == {}


def test_a_question_keeps_its_name_when_more_are_asked(tmp_path) -> None:
    few = answered(collection(tmp_path / "few", "What is a monad?"))
    more = answered(collection(tmp_path / "more", "Name three rivers.", "What is a monad?"))
    assert few.items() <= more.items()


def test_longer_answers_to_questions_are_texts_for_further_tasks(tmp_path) -> None:
    asked = collection(tmp_path / "asked", "What is a monad?", "Name three rivers.")
    requests = build_requests(
        PromptMix(questions=asked), model=asked, max_tokens=9, max_prompt_tokens=1000
    )
    answers = tmp_path / "answers"
    answers.mkdir()
    texts = ("A monad is a way to chain steps. " * 9, "Rhine.")
    rows = [
        CollectedRow(request=request, output_token_ids=(*map(ord, text), END), finish_reason="stop")
        for request, text in zip(requests, texts, strict=True)
    ]
    write_shard(answers, rows)
    tasks = build_requests(
        PromptMix(texts=answers), model=answers, max_tokens=9, max_prompt_tokens=1000
    )
    told = {LetterCodec(None).decode(task.prompt_token_ids) for task in tasks}
    assert told, "the long answer made no task"
    assert all("A monad is a way" in text and "Rhine" not in text for text in told)


def test_own_prompts_are_of_the_kinds_that_are_named(tmp_path) -> None:
    mix = PromptMix(own_seed=1, own_kinds=("translation", "question"))
    requests = build_requests(mix, model=tmp_path, max_tokens=9, max_prompt_tokens=1000)
    assert {each.workload for each in requests} == {"own_question", "own_translation"}
    with pytest.raises(UserError, match="no own prompts of the kind 'poems'; there are chat, "):
        build_requests(
            PromptMix(own_seed=1, own_kinds=("poems",)),
            model=tmp_path,
            max_tokens=9,
            max_prompt_tokens=1000,
        )
