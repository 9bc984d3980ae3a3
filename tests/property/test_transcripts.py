"""Imported prompts and answers are what template and tokenizer give for each turn by itself."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hvd_ray.traces.transcripts_entries import ChatMessage, Dialogue
from hvd_ray.traces.transcripts_render import DialogueRenderer
from hvd_ray.traces.transcripts_tokens import SegmentTokenizer
from hvd_ray.traces.transcripts_words import WordEncoder, word_pattern
from tests.unit.traces.transcript_fakes import SPECIAL, TEMPLATES, FakeTokenizer

TEXT = st.text(alphabet="ab \n<|e>é", max_size=12) | st.sampled_from(["<|s|>", "a<|e|>b", "\n\n"])
TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXT),
    min_size=2,
    max_size=8,
)


@given(turns=TURNS, name=st.sampled_from([name for name in TEMPLATES if name != "strict"]))
def test_any_dialogue_in_any_template(turns, name):
    tokenizer = FakeTokenizer(TEMPLATES[name])
    talk = Dialogue(tuple(ChatMessage(r, t, is_answer=r == "assistant") for r, t in turns))
    if not talk.answers:
        return
    messages = [{"role": role, "content": text} for role, text in turns]
    segments = SegmentTokenizer(tokenizer)
    for answer in DialogueRenderer(tokenizer, SPECIAL).answers(talk):
        prompt = tokenizer.render(messages[: answer.place], with_opening=True)
        whole = tokenizer.render(messages[: answer.place + 1])
        assert answer.text[: answer.start] == prompt
        if whole.startswith(prompt):
            assert whole.startswith(answer.text[: answer.end])
        prompt_ids, output_ids = segments.cut(answer.text, answer.start, answer.end)
        assert prompt_ids.tolist() == tokenizer.encode([prompt])[0].tolist()
        said = answer.text[answer.start : answer.end]
        assert tokenizer.decode(output_ids) == said


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            behavior="isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
CORPUS = [
    "the name of the rose's petals, and 12345 more; don't {\"a\": [1, 2]}\n\n    return x"
] * 3


def trained(cutting) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = cutting
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return core


CORES = {"gpt2": trained(GPT2), "llama3": trained(LLAMA3)}
WORDS = {name: WordEncoder(core, word_pattern(core)) for name, core in CORES.items()}


@pytest.mark.parametrize("name", CORES)
@given(
    text=st.text(max_size=60)
    | st.text(alphabet=string.printable, max_size=60)
    | st.text(alphabet="ths name 12'\n\r\t\u00a0\u2028{", max_size=40)
)
def test_words_have_the_ids_of_the_whole_text(name, text):
    (found,) = WORDS[name].encode([text])
    assert found.tolist() == CORES[name].encode(text, add_special_tokens=False).ids


def test_the_word_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("hvd_ray.traces.transcripts_words.MAX_WORDS", 10)
    words = WordEncoder(CORES["gpt2"], word_pattern(CORES["gpt2"]))
    texts = [" ".join(f"w{k}{j}" for j in range(8)) for k in range(10)]
    found = words.encode(texts)
    assert len(words._memo) <= 30
    expected = [CORES["gpt2"].encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in found] == expected


def test_other_kinds_of_tokenizers_are_left_alone():
    assert word_pattern(trained(pre_tokenizers.ByteLevel(add_prefix_space=True))) is None
    assert word_pattern(trained(pre_tokenizers.Metaspace())) is None
    merged = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s"), behavior="merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert word_pattern(trained(merged)) is None
    with_normalizer = trained(GPT2)
    from tokenizers import normalizers

    with_normalizer.normalizer = normalizers.Lowercase()
    assert word_pattern(with_normalizer) is None
    with_special = trained(GPT2)
    with_special.add_special_tokens([AddedToken("<|x|>", special=True)])
    assert word_pattern(with_special) == word_pattern(CORES["gpt2"])
