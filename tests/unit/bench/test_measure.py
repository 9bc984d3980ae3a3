"""The order of asking, the caches' states, the comparison with greedy, and the plan's refusals."""

import gc
from dataclasses import replace
from time import sleep

import pytest

from hvd_ray.bench import measure as measuring
from hvd_ray.bench.cells import Arm, workload_rows
from hvd_ray.bench.measure import measure
from hvd_ray.bench.plan import DEFAULT_MAX_TOKENS, Sampling, ask, choose_arms, choose_filling
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.errors import UserError
from tests.property.toy_requests import HEADLESS_SYSTEMS


@pytest.fixture
def letters(toy):
    return [toy.prompt(text) for text in ("abc", "bcd", "cde", "abcabc", "efg", "hij")]


def _letters_in(order, samples):
    return [sample.arm.system for sample in samples if sample.prompt.id == order]


# -- order -------------------------------------------------------------------------------------


def test_systems_take_turns_prompt_by_prompt_and_the_first_one_changes(toy, letters):
    plan = toy.plan(letters[:3], systems=("greedy", "ngram", "suffix"))
    samples = measure(plan, build=toy.builder())
    assert _letters_in("abc", samples) == ["greedy", "ngram", "suffix"]
    assert _letters_in("bcd", samples) == ["ngram", "suffix", "greedy"]
    assert _letters_in("cde", samples) == ["suffix", "greedy", "ngram"]
    assert [sample.prompt.id for sample in samples] == ["abc"] * 3 + ["bcd"] * 3 + ["cde"] * 3


def test_the_order_goes_on_turning_across_workloads(toy):
    prompts = [toy.prompt("abc", workload="a"), toy.prompt("bcd", workload="b")]
    samples = measure(toy.plan(prompts), build=toy.builder())
    assert _letters_in("bcd", samples) == ["suffix", "greedy"]


def test_greedy_is_measured_even_if_not_asked_for():
    assert choose_arms(["suffix"], ["cold"]) == (Arm("greedy", "none"), Arm("suffix", "cold"))


def test_every_request_is_told_of(toy, letters):
    plan = toy.plan([*letters, toy.prompt("stu", split="train")], caches=("cold", "warm"))
    told = []
    measure(plan, build=toy.builder(), on_request=told.append)
    assert len(told) == plan.num_requests == len(letters) * 3 + 1


# -- caches ------------------------------------------------------------------------------------


def _drafted_first(samples, prompt_id, arm):
    """Tokens drafted from other requests' outputs show at the very start of an output."""
    (sample,) = [s for s in samples if s.prompt.id == prompt_id and s.arm == arm]
    return sum(step.accepted for step in sample.completion.steps)


def test_a_cold_cache_fills_within_a_workload_and_is_empty_at_the_next(toy):
    prompts = [
        toy.prompt("qabcde", prompt_id="one", workload="a"),
        toy.prompt("rabcde", prompt_id="two", workload="a"),
        toy.prompt("rabcde", prompt_id="again", workload="b"),
    ]
    samples = measure(toy.plan(prompts), build=toy.builder())
    cold = Arm("suffix", "cold")
    assert _drafted_first(samples, "two", cold) > _drafted_first(samples, "again", cold)
    assert _drafted_first(samples, "one", cold) == _drafted_first(samples, "again", cold)


def test_a_warm_cache_knows_the_train_outputs_and_a_cold_one_does_not(toy):
    prompts = [
        toy.prompt("qabcde", prompt_id="train", split="train"),
        toy.prompt("rabcde", prompt_id="test"),
    ]
    samples = measure(toy.plan(prompts, caches=("cold", "warm")), build=toy.builder())
    assert {sample.prompt.id for sample in samples} == {"test"}
    warm = _drafted_first(samples, "test", Arm("suffix", "warm"))
    assert warm > _drafted_first(samples, "test", Arm("suffix", "cold"))


def test_systems_without_memory_are_measured_once_for_both_states():
    arms = choose_arms(["ngram", "suffix"], ["cold", "warm"])
    assert arms == (
        Arm("greedy", "none"),
        Arm("ngram", "none"),
        Arm("suffix", "cold"),
        Arm("suffix", "warm"),
    )


def test_no_measured_prompt_nor_its_session_nor_its_text_fills_the_warm_cache(toy):
    measured = [
        toy.prompt("abc", prompt_id="m", session="s", split="train"),
        toy.prompt("stu", prompt_id="n"),
    ]
    others = [
        toy.prompt("bcd", prompt_id="same session", session="s", split="train"),
        toy.prompt("abc", prompt_id="same text", split="train"),
        toy.prompt("cde", prompt_id="other split"),
        toy.prompt("def", prompt_id="other workload", workload="w", split="train"),
        toy.prompt("def", prompt_id="good", split="train"),
    ]
    filling = choose_filling([*measured, *others], measured)
    assert [prompt.id for prompt in filling["letters"]] == ["good"]


def test_a_warm_cache_with_nothing_to_fill_it_is_refused(letters):
    with pytest.raises(UserError, match=r"'letters' has no train prompts.*--cache cold"):
        choose_filling(letters, letters)


# -- exactness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_system_gives_greedys_tokens_also_when_sampling(temperature, toy, letters):
    sampling = Sampling(max_tokens=60, temperature=temperature, seed=5)
    plan = toy.plan(
        [*letters, toy.prompt("stu", split="train")],
        systems=HEADLESS_SYSTEMS,
        caches=("cold", "warm"),
        sampling=sampling,
    )
    samples = measure(plan, build=toy.builder())
    assert all(sample.difference is None for sample in samples)
    assert len({sample.completion.token_ids for sample in samples}) > 1
    assert sum(s.accepted for sample in samples for s in sample.completion.steps) > 0


def test_a_sampled_prompt_has_a_seed_of_its_own(toy):
    one, two = Sampling().of(toy.prompt("abc")), Sampling().of(toy.prompt("bcd"))
    assert one.seed is not None
    assert one.seed != two.seed
    assert one == Sampling().of(toy.prompt("abc"))


def test_what_a_prompt_asks_for_beats_the_default_and_a_flag_beats_both(toy):
    prompt = toy.prompt("abc", sampling={"temperature": 0.7, "seed": 11, "max_tokens": 9})
    own = Sampling().of(prompt)
    assert (own.temperature, own.seed, own.max_tokens) == (0.7, 11, 9)
    given = Sampling(max_tokens=5, temperature=0.0).of(prompt)
    assert (given.temperature, given.seed, given.max_tokens) == (0.0, 11, 5)


def test_a_workloads_own_limit_stands_where_neither_flag_nor_prompt_says(toy):
    limits, silent = {"letters": 7}, toy.prompt("abc")
    assert Sampling(max_tokens_of=limits).of(silent).max_tokens == 7
    assert Sampling(max_tokens_of={"other": 7}).of(silent).max_tokens == DEFAULT_MAX_TOKENS
    assert Sampling(max_tokens=5, max_tokens_of=limits).of(silent).max_tokens == 5
    own = toy.prompt("abc", sampling={"max_tokens": 9})
    assert Sampling(max_tokens_of=limits).of(own).max_tokens == 9


def test_a_differing_output_is_found_with_position_and_margin(toy, letters):
    greedy, other = measure(toy.plan(letters[:1]), build=toy.builder())
    right = greedy.completion.token_ids
    wrong = (*right[:5], 7, *right[6:])
    assert wrong != right
    altered = replace(other, completion=replace(other.completion, token_ids=wrong))
    compared = measuring.compare([greedy, altered], ToyEngine())
    logits_V = ToyEngine().logits_after([*greedy.request.prompt_token_ids, *right[:5]])
    assert compared[0].difference is None
    assert compared[1].difference is not None
    assert compared[1].difference.position == 5
    assert compared[1].difference.margin == pytest.approx(float(logits_V.max() - logits_V[7]))


def test_an_output_that_ends_earlier_differs_at_its_end_without_a_margin(toy, letters):
    plan = toy.plan(letters[:1])
    (greedy, other) = measure(plan, build=toy.builder())
    cut = replace(other.completion, token_ids=other.completion.token_ids[:7])
    compared = measuring.compare([greedy, replace(other, completion=cut)], ToyEngine())
    assert compared[1].difference is not None
    assert compared[1].difference.position == 7
    assert compared[1].difference.margin is None


def test_reading_the_output_in_one_pass_is_the_control_for_greedy_alone(toy, letters):
    greedy, other = measure(toy.plan(letters[:1]), build=toy.builder())
    assert greedy.is_identical_in_one_pass is True
    assert other.is_identical_in_one_pass is None
    changed = (*greedy.completion.token_ids[:-1], 9)
    altered = replace(greedy, completion=replace(greedy.completion, token_ids=changed))
    assert measuring.compare([altered], ToyEngine())[0].is_identical_in_one_pass is False


# -- timing ------------------------------------------------------------------------------------


def test_no_garbage_is_collected_while_the_clock_runs(toy, letters):
    seen = []

    def build(system):
        decoder = toy.builder()(system)
        generate = decoder.generate

        class Watched:
            engine, policy, cache_drafter = decoder.engine, decoder.policy, decoder.cache_drafter

            def generate(self, request):
                seen.append(gc.isenabled())
                return generate(request)

        return Watched()

    measure(toy.plan(letters[:2]), build=build)
    assert seen[-4:] == [False] * 4
    assert gc.isenabled()


def test_the_warm_up_is_not_counted(toy, letters):
    plan = toy.plan(letters[:2])
    samples = measure(plan, build=toy.builder())
    assert len(samples) == 4
    first = samples[1]
    assert first.arm == Arm("suffix", "cold")
    alone = toy.builder()("suffix").generate(first.request)
    assert [s.drafted for s in first.completion.steps] == [s.drafted for s in alone.steps]


# -- refusals ----------------------------------------------------------------------------------


def test_an_unknown_system_lists_the_known_ones():
    with pytest.raises(UserError, match=r"'warp'.*greedy, ngram, suffix"):
        choose_arms(["greedy", "warp"], ["cold"])


def test_a_system_named_twice_is_refused():
    with pytest.raises(UserError, match="'suffix' is named twice"):
        choose_arms(["suffix", "greedy", "suffix"], ["cold"])


def _ask(prompt):
    capabilities = ToyEngine(context_length=8).capabilities
    return ask([prompt], codec=ToyCodec(), capabilities=capabilities, sampling=Sampling())


def test_a_prompt_over_the_context_names_file_and_line(toy):
    with pytest.raises(UserError, match=r"toy.jsonl:9.*8 tokens.*context of 8"):
        _ask(toy.prompt("abcdefgh", prompt_id="9"))
    assert _ask(toy.prompt("abcdefg"))


def test_an_empty_prompt_is_refused(toy):
    with pytest.raises(UserError, match="is empty"):
        _ask(toy.prompt("", prompt_id="9"))


def test_a_token_of_another_vocabulary_is_refused(toy):
    prompt = replace(toy.prompt("abc"), prompt=None, prompt_token_ids=(1, 24))
    with pytest.raises(UserError, match=r"token 24.*vocabulary has 24"):
        _ask(prompt)


def test_the_rows_keep_the_order_of_the_systems_though_the_measuring_turns(toy):
    prompts = [toy.prompt("abc", workload="a"), toy.prompt("bcd", workload="b")]
    samples = measure(toy.plan(prompts, systems=("suffix", "ngram")), build=toy.builder())
    rows = workload_rows(samples, engine="toy", dtype="float32", seed=0)
    assert [row.system for row in rows] == ["greedy", "suffix", "ngram"] * 2


def test_the_time_of_a_cycles_drafting_includes_the_decision(toy, letters):
    """Features and predictor are paid for in every cycle: a slow one must show."""
    decoder = toy.builder()("hvd_tau")

    class Slow:
        def expected_length(self, draft, context):  # noqa: ARG002
            sleep(0.002)
            return 0.0

    decoder.policy = replace(decoder.policy, estimator=Slow())
    (question, *_) = toy.plan(letters[3:4]).measured["letters"]
    steps = decoder.generate(question.request).steps
    asked = [step for step in steps if step.cache_draft_len]
    assert asked
    assert all(step.draft_us > 2000 for step in asked)
