"""Samples on disk, one file a prompt: a suite that is killed goes on after its last prompt.

No text is kept: token ids, cycles and times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hvd_ray.bench.cells import Arm, Sample
from hvd_ray.bench.plan import Question
from hvd_ray.bench.result import Difference
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.types import Completion, Source, Step

_STEP_FIELDS = tuple(field.name for field in fields(Step))


@dataclass(frozen=True, slots=True)
class SampleFolder:
    """A `SampleStore` in a folder: `cells/WORKLOAD/PROMPT.json`."""

    path: Path

    def stored(self, question: Question) -> list[Sample] | None:
        """
        Raises:
            UserError: the file is there and cannot be read.
        """
        file = self._file(question.prompt.workload, question.prompt.id)
        if not file.exists():
            return None
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))
            return [_sample(row, question) for row in rows["samples"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{file}: cannot be read ({error}); remove it and its prompt is measured again"
            ) from None

    def keep(self, samples: Sequence[Sample]) -> None:
        """Write the samples of one prompt, whole or not at all."""
        prompt = samples[0].prompt
        rows = [_row(sample) for sample in samples]
        tree = {"workload": prompt.workload, "prompt_id": prompt.id, "samples": rows}
        with atomic_path(self._file(prompt.workload, prompt.id)) as draft:
            draft.write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")

    def num_kept(self) -> int:
        """Prompts that are measured."""
        return sum(1 for file in self.path.glob("cells/*/*.json") if not file.name.startswith("."))

    def _file(self, workload: str, prompt_id: str) -> Path:
        names = [hashlib.sha256(name.encode()).hexdigest()[:16] for name in (workload, prompt_id)]
        readable = "".join(c if c.isalnum() else "_" for c in workload)[:40]
        return self.path / "cells" / f"{readable}-{names[0][:6]}" / f"{names[1]}.json"


def _row(sample: Sample) -> dict[str, Any]:
    completion = sample.completion
    return {
        "system": sample.arm.system,
        "cache": sample.arm.cache,
        "seconds": sample.seconds,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "steps": [[getattr(step, name) for name in _STEP_FIELDS] for step in completion.steps],
        "difference": asdict(sample.difference) if sample.difference is not None else None,
        "is_identical_in_one_pass": sample.is_identical_in_one_pass,
        "agreement": sample.agreement,
        "quality": sample.quality,
        "wave": sample.wave,
    }


def _sample(row: Mapping[str, Any], question: Question) -> Sample:
    completion = Completion(
        question.request.request_id,
        tuple(row["token_ids"]),
        "",
        row["finish_reason"],
        row["stop_reason"],
        steps=tuple(map(_step, row["steps"])),
    )
    return Sample(
        question.prompt,
        Arm(row["system"], row["cache"]),
        question.request,
        completion,
        row["seconds"],
        None if row["difference"] is None else Difference(**row["difference"]),
        row["is_identical_in_one_pass"],
        agreement=row.get("agreement", 1.0),
        quality=row.get("quality"),
        wave=row.get("wave"),
    )


def _step(values: Sequence[Any]) -> Step:
    named = dict(zip(_STEP_FIELDS, values, strict=False))  # an earlier version has fewer
    named["source"] = Source(named["source"])
    return Step(**named)
