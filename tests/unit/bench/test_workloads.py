import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hvd_ray.bench.prompt_rows import MAX_LINE_BYTES
from hvd_ray.bench.workloads import (
    Prompt,
    load_prompts,
    load_shipped,
    select,
    shipped_workloads,
    split_of,
    workload_hash,
)
from hvd_ray.errors import UserError

ASSETS = Path(__file__).parents[3] / "hvd_ray" / "assets" / "workloads"
SHARED_PROMPTS = Path(__file__).parents[4] / "shared" / "data" / "prompts"


def write(path: Path, *rows: dict[str, object] | str | bytes) -> Path:
    lines = [
        row
        if isinstance(row, bytes)
        else (row if isinstance(row, str) else json.dumps(row)).encode()
        for row in rows
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def row(number: int, **more: object) -> dict[str, object]:
    return {"id": f"p{number}", "prompt": f"Question {number}"} | more


def ids(prompts: tuple[Prompt, ...]) -> list[str]:
    return [prompt.id for prompt in prompts]


class TestShipped:
    def test_every_file_has_its_name_in_the_list(self) -> None:
        assert sorted(shipped_workloads()) == sorted(path.stem for path in ASSETS.glob("*.jsonl"))

    @pytest.mark.parametrize("name", shipped_workloads())
    def test_a_workload_has_a_dozen_prompts_in_both_splits(self, name: str) -> None:
        prompts = load_shipped([name]).prompts
        splits = Counter(prompt.split for prompt in prompts)
        assert 12 <= len(prompts) <= 16
        assert splits["test"] >= 5
        assert splits["train"] >= 5
        assert {prompt.workload for prompt in prompts} == {name}
        assert len({prompt.family for prompt in prompts}) == 1

    def test_the_split_is_that_of_the_session(self) -> None:
        for prompt in load_shipped().prompts:
            assert prompt.split == split_of(prompt.session_id or prompt.id), prompt.id

    def test_sessions_are_numbered_in_order_and_stand_together(self) -> None:
        prompts = load_shipped().prompts
        sessions = Counter(p.session_id for p in prompts if p.session_id)
        assert min(sessions.values()) >= 2
        for session, count in sessions.items():
            places = [i for i, p in enumerate(prompts) if p.session_id == session]
            assert places == list(range(places[0], places[0] + count))
            assert [prompts[i].id for i in places] == [f"{session}#{n + 1}" for n in range(count)]

    def test_a_tool_session_carries_its_earlier_steps(self) -> None:
        prompts = load_shipped(["tool_loop"]).prompts
        for earlier, later in pairwise(prompts):
            if earlier.session_id == later.session_id:
                assert later.messages[: len(earlier.messages)] == earlier.messages
                call = json.loads(later.messages[-2].content)
                assert set(call) == {"tool", "arguments"}
                assert f"- {call['tool']}(" in later.messages[0].content

    def test_prompts_are_of_ordinary_size_and_none_comes_twice(self) -> None:
        prompts = load_shipped().prompts
        texts = ["\n".join(message.content for message in p.messages) for p in prompts]
        assert len(set(texts)) == len(texts)
        # Three to five characters a token: about 60 to 900 tokens.
        assert all(200 <= len(text) <= 3600 for text in texts)

    def test_chat_samples_with_a_seed_of_its_own_and_the_rest_is_left_to_the_run(self) -> None:
        chat = load_shipped(["open_chat"]).prompts
        assert all(dict(prompt.sampling)["temperature"] == 0.7 for prompt in chat)
        assert len({dict(prompt.sampling)["seed"] for prompt in chat}) == len(chat)
        others = [name for name in shipped_workloads() if name != "open_chat"]
        assert not any(prompt.sampling for prompt in load_shipped(others).prompts)

    def test_they_name_no_addresses_of_people(self) -> None:
        for path in ASSETS.glob("*.jsonl"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"[\w.]+@[\w.]+", text), path.name
            assert not re.search(r"\+\d[\d ]{7,}", text), path.name

    def test_an_unknown_workload_lists_the_known_ones(self) -> None:
        with pytest.raises(UserError, match="unknown workload 'doc_edits': known are doc_edit, "):
            load_shipped(["open_chat", "doc_edits"])
        with pytest.raises(UserError, match="no workload was named"):
            load_shipped([])

    def test_the_order_named_is_kept_and_a_name_given_twice_counts_once(self) -> None:
        prompts = load_shipped(["open_chat", "doc_edit", "open_chat"]).prompts
        assert list(dict.fromkeys(p.workload for p in prompts)) == ["open_chat", "doc_edit"]


class TestLoad:
    def test_files_are_read_in_order_with_their_origin(self, tmp_path: Path) -> None:
        first = write(tmp_path / "b.jsonl", row(1), "", row(2))
        second = write(tmp_path / "a.jsonl", row(1))
        loaded = load_prompts([first, str(second)])
        assert ids(loaded.prompts) == ["p1", "p2", "p1"]
        assert [p.workload for p in loaded.prompts] == ["b", "b", "a"]
        assert loaded.prompts[1].origin == f"{first}:3"
        assert loaded.bad_lines == ()

    def test_bom_line_ends_and_a_missing_last_one_are_tolerated(self, tmp_path: Path) -> None:
        path = tmp_path / "w.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n  \r\n{"prompt": "b"}')
        loaded = load_prompts([path])
        assert ids(loaded.prompts) == ["w:1", "w:3"]

    def test_a_bad_line_is_fatal_and_named(self, tmp_path: Path) -> None:
        path = write(tmp_path / "w.jsonl", row(1), "{oops", row(3))
        with pytest.raises(UserError) as caught:
            load_prompts([path])
        assert str(caught.value).startswith(f"{path}:2: not one JSON object a line")

    def test_bad_lines_are_skipped_on_demand(self, tmp_path: Path) -> None:
        path = write(tmp_path / "w.jsonl", b"\xff", row(1), row(1), {"prompt": ""}, row(5))
        loaded = load_prompts([path], on_bad_line="skip")
        assert ids(loaded.prompts) == ["p1", "p5"]
        assert loaded.bad_lines == (
            f"{path}:1: not UTF-8 (byte 1 of the line)",
            f"{path}:3: id 'p1' was seen before at {path}:2",
            f"{path}:4: empty prompt: prompt holds no text",
        )

    def test_a_huge_line_is_bounded_and_the_next_one_read(self, tmp_path: Path) -> None:
        huge = b'{"prompt": "' + b"a" * (2 * MAX_LINE_BYTES + 5) + b'"}'
        path = write(tmp_path / "w.jsonl", huge, row(2))
        loaded = load_prompts([path], on_bad_line="skip")
        assert ids(loaded.prompts) == ["p2"]
        assert loaded.bad_lines == (f"{path}:1: line longer than 16 MiB",)
        assert loaded.prompts[0].origin == f"{path}:2"

    def test_a_huge_last_line_without_an_end_is_bad_too(self, tmp_path: Path) -> None:
        path = tmp_path / "w.jsonl"
        path.write_bytes(b'{"prompt": "a"}\n' + b"[" * (MAX_LINE_BYTES + 3))
        assert len(load_prompts([path], on_bad_line="skip").bad_lines) == 1

    @pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
    def test_an_empty_file_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "w.jsonl"
        path.write_bytes(content)
        for on_bad_line in ("fail", "skip"):
            with pytest.raises(UserError, match=r"w\.jsonl is empty: expected one prompt a line"):
                load_prompts([path], on_bad_line=on_bad_line)  # type: ignore[arg-type]

    def test_a_file_without_a_good_line_is_refused_even_when_skipping(self, tmp_path: Path) -> None:
        good = write(tmp_path / "good.jsonl", row(1))
        bad = write(tmp_path / "bad.jsonl", "{", "[]")
        with pytest.raises(
            UserError, match=r"holds no good line; the first bad one: .*bad\.jsonl:1"
        ):
            load_prompts([good, bad], on_bad_line="skip")

    def test_what_cannot_be_opened_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot read .*none\.jsonl: No such file"):
            load_prompts([tmp_path / "none.jsonl"])
        with pytest.raises(UserError, match="Is a directory"):
            load_prompts([tmp_path])

    def test_an_unknown_way_with_bad_lines_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "w.jsonl", row(1))
        with pytest.raises(UserError, match="fail or skip, got 'ignore'"):
            load_prompts([path], on_bad_line="ignore")  # type: ignore[arg-type]

    def test_the_same_prompt_of_a_workload_in_two_files_is_refused(self, tmp_path: Path) -> None:
        first = write(tmp_path / "a.jsonl", row(1, workload="w"))
        second = write(tmp_path / "b.jsonl", row(1, workload="w"))
        with pytest.raises(UserError, match=r"b\.jsonl:1: id 'p1' was seen before at .*a\.jsonl:1"):
            load_prompts([first, second])

    def test_a_file_carries_a_split_on_every_line_or_on_none(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", row(1, split="test"), row(2))
        with pytest.raises(UserError, match=r"a\.jsonl:2: this line has no split"):
            load_prompts([path])
        path = write(tmp_path / "b.jsonl", row(1), row(2, split="test"))
        with pytest.raises(UserError, match=r"b\.jsonl:2: this line has a split"):
            load_prompts([path])

    def test_a_session_in_both_splits_is_refused(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a.jsonl",
            row(1, session_id="s", split="train"),
            row(2, session_id="s", split="test"),
        )
        with pytest.raises(UserError, match="session 's' has other rows in the other split"):
            load_prompts([path])

    @pytest.mark.skipif(not SHARED_PROMPTS.is_dir(), reason="no prompt files beside the checkout")
    def test_real_prompt_files_are_read_without_a_complaint(self) -> None:
        paths = sorted(SHARED_PROMPTS.glob("*.jsonl"))
        prompts = load_prompts(paths).prompts
        num_lines = sum(path.read_bytes().count(b"\n") for path in paths)
        assert len(prompts) == num_lines
        assert {p.workload for p in prompts} == {path.stem for path in paths}
        assert {p.split for p in select(prompts, split="test")} == {"test"}


class TestSelect:
    @pytest.fixture
    def prompts(self, tmp_path: Path) -> tuple[Prompt, ...]:
        split = write(
            tmp_path / "split.jsonl",
            *[
                row(n, session_id=f"s{n // 3}", split=("train", "test")[n // 3 % 2])
                for n in range(9)
            ],
        )
        plain = write(tmp_path / "plain.jsonl", row(1), row(2))
        return load_prompts([split, plain]).prompts

    def test_a_split_holds_for_files_that_carry_one(self, prompts: tuple[Prompt, ...]) -> None:
        assert ids(select(prompts, split="test")) == ["p3", "p4", "p5", "p1", "p2"]
        train = ["p0", "p1", "p2", "p6", "p7", "p8", "p1", "p2"]
        assert ids(select(prompts, split="train")) == train
        assert select(prompts, split="all") == prompts

    def test_the_limit_counts_by_workload_and_keeps_a_sessions_beginning(
        self, prompts: tuple[Prompt, ...]
    ) -> None:
        assert ids(select(prompts, split="train", limit=4)) == ["p0", "p1", "p2", "p6", "p1", "p2"]
        assert ids(select(prompts, split="all", limit=1)) == ["p0", "p1"]

    def test_a_workload_that_would_vanish_is_an_error(self, prompts: tuple[Prompt, ...]) -> None:
        only_train = [prompt for prompt in prompts if prompt.split == "train"]
        with pytest.raises(UserError, match=r"workload 'split' has no test prompt \(6 train\)"):
            select(only_train, split="test")

    def test_nonsense_is_refused(self, prompts: tuple[Prompt, ...]) -> None:
        with pytest.raises(UserError, match=r"limit .* must be 1 or more, got 0"):
            select(prompts, limit=0)
        with pytest.raises(UserError, match="split must be train, test or all, got 'dev'"):
            select(prompts, split="dev")  # type: ignore[arg-type]


def test_the_split_is_a_fixed_function_of_the_key() -> None:
    assert split_of("doc_edit-billing-runbook") == "train"
    assert split_of("doc_edit-label-printer") == "test"
    num_test = sum(split_of(f"session-{n}") == "test" for n in range(1000))
    assert 450 <= num_test <= 550


def test_the_hash_sees_content_and_order_but_not_the_place(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    here = load_prompts([write(tmp_path / "w.jsonl", row(1), row(2))]).prompts
    there = load_prompts([write(tmp_path / "x" / "w.jsonl", "", row(1), row(2))]).prompts
    assert workload_hash(here) == workload_hash(there)
    changed = [
        tuple(reversed(here)),
        here[:1],
        (here[0], replace(here[1], sampling=(("seed", 1),))),
        (here[0], replace(here[1], prompt="Question 2 ")),
        (here[0], replace(here[1], session_id="s")),
        (here[0], replace(here[1], split="test")),
    ]
    hashes = [workload_hash(prompts) for prompts in (here, *changed)]
    assert len(set(hashes)) == len(hashes)
    assert re.fullmatch(r"[0-9a-f]{64}", hashes[0])
