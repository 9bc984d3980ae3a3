"""A run that is killed goes on from what is stored, and ends as if it had never been killed."""

from dataclasses import replace

import pytest

from hvd_ray.bench.measure import measure
from hvd_ray.errors import UserError
from hvd_ray.paper.samples import SampleFolder
from tests.unit.bench.conftest import builder, plan, prompt

TEXTS = ("abcabcabcab", "stustustust", "abcstuabcst", "mnomnomnomn")


def the_plan():
    prompts = [prompt(text, workload="ab"[i % 2]) for i, text in enumerate(TEXTS)]
    return plan(prompts, systems=("greedy", "suffix", "ngram"))


def outcome(samples):
    """All but the times."""

    def steps(completion):
        return [replace(s, draft_us=0, verify_us=0) for s in completion.steps]

    return [
        (s.prompt.id, s.arm, s.completion.token_ids, s.completion.finish_reason, s.difference,
         s.is_identical_in_one_pass, steps(s.completion))
        for s in samples
    ]  # fmt: skip


class KilledError(Exception):
    pass


def test_a_killed_run_goes_on_and_ends_the_same(tmp_path):
    whole = measure(the_plan(), build=builder())
    asked = []

    def dies_at_the_eighth(text):
        asked.append(text)
        if len(asked) == 8:
            raise KilledError

    folder = SampleFolder(tmp_path)
    with pytest.raises(KilledError):
        measure(the_plan(), build=builder(), on_request=dies_at_the_eighth, store=folder)
    assert folder.num_kept() == 2, "the prompt that was being measured is lost, no other"
    again = []
    resumed = measure(the_plan(), build=builder(), on_request=again.append, store=folder)
    assert outcome(resumed) == outcome(whole)
    assert len(again) == 2 * 3
    assert folder.num_kept() == len(TEXTS)
    third = []
    assert outcome(
        measure(the_plan(), build=builder(), on_request=third.append, store=folder)
    ) == outcome(whole)
    assert third == []


def test_stored_samples_read_back_to_the_last_field(tmp_path):
    folder = SampleFolder(tmp_path)
    questions = [q for asked in the_plan().measured.values() for q in asked]
    assert folder.stored(questions[0]) is None
    samples = measure(the_plan(), build=builder(), store=folder)
    mine = [s for s in samples if s.prompt == questions[0].prompt]
    found = folder.stored(questions[0])
    for ours, theirs in zip(mine, found, strict=True):
        assert replace(ours, completion=replace(ours.completion, text="")) == theirs


def test_a_damaged_file_is_named(tmp_path):
    folder = SampleFolder(tmp_path)
    measure(the_plan(), build=builder(), store=folder)
    file = next(tmp_path.glob("cells/*/*.json"))
    file.write_text("{")
    with pytest.raises(UserError, match=file.name):
        measure(the_plan(), build=builder(), store=folder)
