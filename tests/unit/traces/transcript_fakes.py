"""Chat templates of several kinds, and a tokenizer of characters that takes any of them."""

import re
from collections.abc import Sequence

import jinja2
import numpy as np

from hvd_ray.errors import UserError

SPECIAL = ("<|s|>", "<|e|>")
MERGES = ("\n\n", "ab", " a", "\n ")

TURN = "<|s|>{{ m['role'] }}\n{{ m['content'] }}<|e|>\n"
OPENING = "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
TEMPLATES = {
    "plain": "{% for m in messages %}" + TURN + "{% endfor %}" + OPENING,
    "own system": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "<|s|>system\nBe kind.<|e|>\n{% endif %}" + TURN + "{% endfor %}" + OPENING
    ),
    "trimming": (
        "{% for m in messages %}<|s|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|e|>{% endfor %}"
        "{% if add_generation_prompt %}<|s|>assistant\n\n{% endif %}"
    ),
    "no specials": (
        "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    ),
    "last turn thinks": (
        "{% for m in messages %}{% if loop.last and m['role'] == 'assistant' %}"
        "<|s|>assistant\n<think></think>{{ m['content'] }}<|e|>\n"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + OPENING
    ),
    "opening thinks": (
        "{% for m in messages %}" + TURN + "{% endfor %}"
        "{% if add_generation_prompt %}<|s|>assistant\n<think>\n{% endif %}"
    ),
    "system last": (
        "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
        "{% for m in messages if m['role'] != 'system' %}<|s|>{{ m['role'] }}\n"
        "{% if loop.last and m['role'] == 'user' %}{{ system }}\n{% endif %}{{ m['content'] }}<|e|>"
        "{% endfor %}" + OPENING
    ),
    "native tools": (
        "{% if tools %}<|s|>tools\n{{ tools | tojson }}<|e|>\n{% endif %}"
        "{% for m in messages %}<|s|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}"
        "[{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}<|e|>\n"
        "{% endfor %}" + OPENING
    ),
    "grouped results": (
        "{% for m in messages %}{% if m['role'] == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|s|>user{% endif %}\n"
        "<r>{{ m['content'] }}</r>"
        "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|e|>\n{% endif %}"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + OPENING
    ),
    "strict": (
        "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
        "{{ raise_exception('no such role') }}{% endif %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + OPENING
    ),
}


class FakeTokenizer:
    """Characters, a few merges over two characters, and two special tokens.

    `num_renders` and `num_chars` count what it was asked for.
    """

    end_texts: Sequence[str] = SPECIAL
    special_tokens: Sequence[str] = SPECIAL
    eos_token_id: int | None = 1

    def __init__(self, template: str = TEMPLATES["plain"]) -> None:
        env = jinja2.Environment()
        env.globals["raise_exception"] = self._refuse
        self._template = env.from_string(template)
        self.num_renders = 0
        self.num_chars = 0

    def render(self, messages, *, tools=(), with_opening=False):
        self.num_renders += 1
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=with_opening,
            )
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses the dialogue: {error}") from None

    def encode(self, texts):
        self.num_chars += sum(map(len, texts))
        return [np.array(self._ids(text), dtype=np.int32) for text in texts]

    def encode_plain(self, texts):
        return self.encode(texts)

    def encode_prompt(self, text):
        return self._ids(text)

    def decode(self, ids) -> str:
        texts = [*SPECIAL, *MERGES]
        return "".join(texts[i] if i < len(texts) else chr(i - 100) for i in map(int, ids))

    def _ids(self, text: str) -> list[int]:
        pieces = re.findall("|".join(map(re.escape, [*SPECIAL, *MERGES])) + "|.", text, re.DOTALL)
        known = {piece: index for index, piece in enumerate([*SPECIAL, *MERGES])}
        return [known.get(piece, ord(piece[0]) + 100) for piece in pieces]

    @staticmethod
    def _refuse(message: str) -> None:
        raise jinja2.TemplateError(message)


class GreedyTokenizer(FakeTokenizer):
    """One whose special tokens swallow the white space after them: cutting changes the ids."""

    def _ids(self, text):
        for special in SPECIAL:
            text = re.sub(re.escape(special) + r"\s+", special, text)
        return super()._ids(text)
