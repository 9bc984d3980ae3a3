"""Prompts of our own for drafter training: templates and word lists, no outside text.

A drafter learns the target's habits per kind of task, so the kinds are those people run: code,
SQL, JSON, tool calls, agent steps, edits, summaries, translation, questions, chat and maths. All
wording here was written for this project. The same seed gives the same prompts.

Tasks over longer texts (summaries, rewriting, reading) need texts: `second_stage_prompts` makes
them from what the target itself wrote in answer to `article_prompts`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvd_ray.drafting import eagle3_prompt_words as words

Message = Mapping[str, str]
Builder = Callable[[random.Random], list[Message]]


@dataclass(frozen=True, kw_only=True)
class OwnPrompt:
    """A chat prompt and the temperatures at which to sample answers to it."""

    prompt_id: str
    family: str
    workload: str
    messages: tuple[Message, ...]
    temperatures: tuple[float, ...] = (0.0,)


def own_prompts(seed: int, *, num_per_kind: Mapping[str, int] | None = None) -> list[OwnPrompt]:
    """First-stage prompts of every kind; `num_per_kind` defaults to `DEFAULT_COUNTS`."""
    counts = DEFAULT_COUNTS if num_per_kind is None else num_per_kind
    return [prompt for kind, count in counts.items() for prompt in _kind(kind, count, seed)]


def _kind(kind: str, count: int, seed: int) -> Iterator[OwnPrompt]:
    family, build = BUILDERS[kind]
    rng = random.Random(f"{kind}/{seed}")
    seen: set[str] = set()
    for index in range(count):
        messages = build(rng)
        text = messages[-1]["content"]
        if text in seen:
            continue
        seen.add(text)
        temperatures = (0.0, 0.7) if index % 3 == 0 else (0.0,)
        yield OwnPrompt(
            prompt_id=f"own_{kind}/{seed}-{index}",
            family=family,
            workload=f"own_{kind}",
            messages=tuple(messages),
            temperatures=temperatures,
        )


def second_stage_prompts(texts: Sequence[str], *, seed: int) -> list[OwnPrompt]:
    """Summaries, questions, rewrites and edits over `texts` that the target wrote itself."""
    rng = random.Random(f"second/{seed}")
    prompts = []
    for index, text in enumerate(texts):
        kind = rng.choice(("summary", "summary", "reading", "rewrite", "edit_text"))
        family = {"summary": "summarisation", "reading": "qa"}.get(kind, "agentic")
        template = rng.choice(words.SECOND_STAGE[kind])
        content = template.format(text=text, topic=rng.choice(words.TOPICS))
        prompts.append(
            OwnPrompt(
                prompt_id=f"own_{kind}/{seed}-{index}",
                family=family,
                workload=f"own_{kind}",
                messages=({"role": "user", "content": content},),
                temperatures=(0.0, 0.7) if index % 4 == 0 else (0.0,),
            )
        )
    return prompts


def _user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def _chat(rng: random.Random) -> list[Message]:
    template = rng.choice(words.CHAT)
    return _user(
        template.format(
            topic=rng.choice(words.TOPICS),
            other=rng.choice(words.TOPICS),
            person=rng.choice(words.PEOPLE),
            place=rng.choice(words.PLACES),
            tone=rng.choice(words.TONES),
            num=rng.choice((3, 4, 5, 6, 7, 10)),
        )
    )


def _question(rng: random.Random) -> list[Message]:
    template = rng.choice(words.QUESTIONS)
    return _user(
        template.format(
            topic=rng.choice(words.TOPICS),
            place=rng.choice(words.PLACES),
            thing=rng.choice(words.THINGS),
            year=rng.randrange(1820, 2020),
        )
    )


def _article(rng: random.Random) -> list[Message]:
    template = rng.choice(words.ARTICLES)
    return _user(
        template.format(
            topic=rng.choice(words.TOPICS),
            place=rng.choice(words.PLACES),
            person=rng.choice(words.NAMES),
            event=rng.choice(words.EVENTS),
        )
    )


def _code(rng: random.Random) -> list[Message]:
    task = rng.choice(words.CODE_TASKS).format(
        cond=rng.choice(words.CODE_CONDITIONS), num=rng.randrange(2, 12)
    )
    return _user(rng.choice(words.CODE_TEMPLATES).format(task=task))


def _maths(rng: random.Random) -> list[Message]:
    small, large = rng.randrange(2, 12), rng.randrange(12, 90)
    template = rng.choice(words.MATHS)
    return _user(
        template.format(
            name=rng.choice(words.NAMES).split()[0],
            friend=rng.choice(words.NAMES).split()[0],
            item=rng.choice(words.ITEMS),
            other=rng.choice(words.ITEMS),
            a=small,
            b=rng.randrange(2, 9),
            c=large,
            d=rng.randrange(2, 6),
            percent=rng.choice((5, 10, 20, 25, 40, 50)),
        )
    )


def _translation(rng: random.Random) -> list[Message]:
    language = rng.choice(tuple(words.SENTENCES))
    parts = words.SENTENCES[language]
    sentences = [_foreign_sentence(rng, parts) for _ in range(rng.choice((1, 1, 1, 2)))]
    template = rng.choice(words.TRANSLATE)
    return _user(template.format(language=language, text=" ".join(sentences)))


def _foreign_sentence(rng: random.Random, parts: Mapping[str, Sequence[str]]) -> str:
    text = rng.choice(parts["patterns"])
    slots = {name: rng.choice(choices) for name, choices in parts.items() if name != "patterns"}
    sentence = text.format(**slots)
    return sentence[0].upper() + sentence[1:]


def _sql(rng: random.Random) -> list[Message]:
    tables = rng.choice(words.DATABASES)
    chosen = list(tables)[: rng.choice((2, 3, len(tables)))]
    schema = "\n".join(_create_table(name, tables[name]) for name in chosen)
    table = rng.choice(chosen)
    columns = [column for column, _ in tables[table]]
    question = rng.choice(words.SQL_QUESTIONS).format(
        table=table.replace("_", " "),
        col=rng.choice(columns).replace("_", " "),
        col2=rng.choice(columns).replace("_", " "),
        other=rng.choice(chosen).replace("_", " "),
        num=rng.randrange(2, 60),
        value=rng.choice(words.PLACES),
    )
    return _user(rng.choice(words.SQL_TEMPLATES).format(schema=schema, question=question))


def _create_table(name: str, columns: Sequence[tuple[str, str]]) -> str:
    lines = [f"  {column} {kind}" for column, kind in columns]
    lines[0] += " PRIMARY KEY"
    return f"CREATE TABLE {name} (\n" + ",\n".join(lines) + "\n);"


def _json(rng: random.Random) -> list[Message]:
    record = rng.choice(words.RECORDS)
    fields = rng.sample(words.FIELDS, rng.randrange(3, 8))
    properties = dict(fields)
    template = rng.choice(words.JSON_TEMPLATES)
    schema = words.json_text(
        {
            "type": "object",
            "title": record,
            "properties": properties,
            "required": [name for name, _ in fields[: rng.randrange(1, len(fields) + 1)]],
        }
    )
    names = ", ".join(properties)
    return _user(
        template.format(schema=schema, record=record, fields=names, num=rng.choice((1, 2, 3)))
    )


def _tool_call(rng: random.Random) -> list[Message]:
    tools = rng.sample(words.TOOLS, rng.choice((1, 1, 2, 3, 4)))
    tool = rng.choice(tools)
    queries = [_fill(rng, rng.choice(tool.queries)) for _ in range(rng.choice((1, 1, 2)))]
    listing = words.json_text([each.declaration for each in tools])
    system = rng.choice(words.TOOL_SYSTEMS).format(tools=listing)
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": " ".join(queries)},
    ]


def _fill(rng: random.Random, template: str) -> str:
    return template.format(
        place=rng.choice(words.PLACES),
        place2=rng.choice(words.PLACES),
        name=rng.choice(words.NAMES),
        topic=rng.choice(words.TOPICS),
        item=rng.choice(words.ITEMS),
        num=rng.randrange(1, 50),
        num2=rng.randrange(1, 500),
        date=f"{rng.randrange(2021, 2027)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}",
        code=f"{rng.choice('ABCDEFGHKLMNPQ')}{rng.randrange(10000, 99999)}",
    )


def _agent(rng: random.Random) -> list[Message]:
    tools = rng.sample(words.TOOLS, 3)
    shop = rng.choice(words.SHOPS)
    system = words.AGENT_SYSTEM.format(
        shop=shop,
        rules="\n".join(f"- {rule}" for rule in rng.sample(words.RULES, rng.randrange(4, 8))),
        tools=words.json_text([each.declaration for each in tools]),
    )
    messages: list[Message] = [{"role": "system", "content": system}]
    tool = rng.choice(tools)
    messages.append({"role": "user", "content": _fill(rng, rng.choice(tool.queries))})
    if rng.random() < 0.6:
        messages.append({"role": "assistant", "content": _fill(rng, rng.choice(words.AGENT_ASKS))})
        messages.append({"role": "user", "content": _fill(rng, rng.choice(words.USER_REPLIES))})
    if rng.random() < 0.3:
        messages.append({"role": "assistant", "content": _fill(rng, rng.choice(words.AGENT_DONE))})
        messages.append({"role": "user", "content": _fill(rng, rng.choice(words.USER_REPLIES))})
    return messages


def _edit(rng: random.Random) -> list[Message]:
    name, text, edits = rng.choice(words.DOCUMENTS)(rng)
    template = rng.choice(words.EDIT_TEMPLATES)
    return _user(template.format(name=name, text=text, edit=rng.choice(edits)))


def _shell(rng: random.Random) -> list[Message]:
    issue = rng.choice(words.ISSUES).format(
        symbol=rng.choice(words.SYMBOLS), num=rng.randrange(2, 400), cls=rng.choice(words.CLASSES)
    )
    project = rng.choice(words.PROJECTS)
    return _user(rng.choice(words.ISSUE_TEMPLATES).format(project=project, issue=issue))


BUILDERS: Mapping[str, tuple[str, Builder]] = {
    "chat": ("chat", _chat),
    "question": ("qa", _question),
    "article": ("chat", _article),
    "code": ("code", _code),
    "maths": ("maths", _maths),
    "translation": ("translation", _translation),
    "sql": ("structured", _sql),
    "json": ("structured", _json),
    "tool_call": ("structured", _tool_call),
    "agent": ("agentic", _agent),
    "edit": ("agentic", _edit),
    "issue": ("agentic", _shell),
}

DEFAULT_COUNTS: Mapping[str, int] = {
    "chat": 500,
    "question": 350,
    "article": 400,
    "code": 300,
    "maths": 200,
    "translation": 400,
    "sql": 400,
    "json": 220,
    "tool_call": 300,
    "agent": 200,
    "edit": 260,
    "issue": 80,
}
