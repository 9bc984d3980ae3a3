"""The folder of a labelling that is refused on its way."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.config import Config
from hvd_ray.engines.toy import ToyCodec
from hvd_ray.errors import UserError
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines import label as label_module
from hvd_ray.pipelines.label import LabelOptions, is_unfinished, label
from hvd_ray.pipelines.output import MANIFEST
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.store import write_traces


class NoProgress:
    def stage(self, text: str) -> None: ...

    def expect(self, total: int, *, unit: str | None = None) -> None: ...

    def advance(self, done: int, text: str) -> None: ...


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LabelOptions:
    """Traces of 24 letters, and of token 24 in the last output."""
    named: dict[str, Any] = dict.fromkeys(("workload", "family", "scope", "session_id"), "x")
    trace = Trace(
        **named,
        trace_id="t0",
        prompt_id="p",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        model="toy",
        tokenizer_sha="letters",
        prompt_token_ids=(1,),
        output_token_ids=(2, 24),
    )
    write_traces([trace], tmp_path / "traces" / "a.parquet")
    classes = TokenClasses.from_codec(ToyCodec(), 24)
    monkeypatch.setattr(label_module, "token_classes_of", lambda _model, _sha: classes)
    return LabelOptions(tmp_path / "traces", tmp_path / "labels")


def test_a_token_beyond_the_vocabulary_is_refused_before_anything_is_made(
    options: LabelOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_module, "_num_token_ids", lambda _model, _classes: 24)
    with pytest.raises(UserError, match=r"a\.parquet: trace t0: output_token_ids holds 24"):
        label(options, Config(), progress=NoProgress())
    assert not options.out.exists()


def test_several_collections_are_labelled_as_one(tmp_path: Path) -> None:
    for name, is_complete in (("monday", True), ("tuesday", False)):
        (tmp_path / name / "traces").mkdir(parents=True)
        manifest = json.dumps({"settings": {}, "complete": is_complete})
        (tmp_path / name / MANIFEST).write_text(manifest)
    assert [is_unfinished(tmp_path / name) for name in ("monday", "tuesday")] == [False, True]
    assert is_unfinished(tmp_path)


def test_a_refusal_before_the_first_part_leaves_no_claim(
    options: LabelOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        assert (options.out / MANIFEST).exists()
        raise UserError("a worker met a prompt that is none")

    monkeypatch.setattr(label_module, "_num_token_ids", lambda _model, _classes: 25)
    monkeypatch.setattr(label_module, "_run", refuse)
    with pytest.raises(UserError, match="a prompt that is none"):
        label(options, Config(), progress=NoProgress())
    assert not (options.out / MANIFEST).exists()
