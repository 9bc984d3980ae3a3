"""Label tables made up in the process: a payoff that features foretell better than the score."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.traces.schema import labels_schema
from hvd_ray.traces.store import write_table

WORKLOADS = ("chat", "tools")


def label_table(num_rows: int = 3000, *, seed: int = 0, **changes: Any) -> Any:
    """Rows of the label schema; `changes` replaces whole columns.

    On `tools` the payoff follows the recent accepted length, on `chat` it is mostly nothing; the
    score says little in both.
    """
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {name: np.zeros(num_rows, dtype=np.float32) for name in FEATURE_NAMES}
    workload = rng.integers(0, 2, num_rows)
    draft_len = rng.integers(0, 33, num_rows)
    recent = rng.uniform(0, 32, num_rows)
    accepted = np.where(workload == 1, recent + rng.normal(0, 1, num_rows), 0.3 * recent - 4)
    accepted = accepted.round().clip(0, draft_len)
    columns |= {
        "trace_id": [f"trace{i // 100}" for i in range(num_rows)],
        "session_id": [f"session{i // 100}" for i in range(num_rows)],
        "workload": [WORKLOADS[w] for w in workload],
        "position": np.arange(num_rows, dtype=np.int32) % 100,
        "is_visited": rng.uniform(size=num_rows) < 0.5,
        "draft_len": draft_len.astype(np.int32),
        "accepted_len": accepted.astype(np.int32),
        "eagle3_accepted_len": pa.nulls(num_rows, pa.int32()),
        "split": ["test" if (i // 100) % 3 == 0 else "train" for i in range(num_rows)],
        "cache_draft_len": draft_len.astype(np.float32),
        "cache_match_len": (draft_len + 1).astype(np.float32),
        "cache_score": (0.2 * accepted + rng.uniform(0, 8, num_rows)).astype(np.float32),
        "state_log_prompt_len": (workload + rng.uniform(0, 0.5, num_rows)).astype(np.float32),
        "recent_accepted_1": recent.astype(np.float32),
        "recent_selection_rate": np.ones(num_rows, dtype=np.float32),
    }
    return pa.table(columns | changes, schema=labels_schema(FEATURE_NAMES, FEATURE_VERSION))


def write_labels(folder: Path, table: Any) -> Path:
    """The table as one part under `folder/labels`."""
    path = folder / "labels" / "part-0.parquet"
    path.parent.mkdir(parents=True)
    write_table(table, path)
    return folder
