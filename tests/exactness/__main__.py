"""Exactness at scale: `make exactness`.

    make exactness                                   # 100,000 tokens and 50,000 draws a cell
    python -m tests.exactness --tokens 5000 --draws 2000 --out out/try --report out/try.md

Compares the tokens of every lossless system with plain decoding's in float32, and what is emitted
under every sampling parameter with the target's law. May be ended and started again: what stands
in --out is not done twice. The exit code is 1 where a token differs or a law is not followed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from hvd_ray.bench.stored_report import report_place
from hvd_ray.commands.traces_progress import shown_progress
from hvd_ray.home import atomic_path
from hvd_ray.provenance import provenance
from tests.exactness.draws import Cell, cells, named_cell
from tests.exactness.greedy import Row, compare, read_rows
from tests.exactness.report import LEAST_PVALUE, page

ASKED, DRAWS = 100_000, 50_000
"""Tokens, and draws of a cell, where nothing else is said; less needs a report of its own."""
REPORT = Path(__file__).parents[2] / "docs" / "reports" / "exactness.md"


def read_cells(file: Path) -> list[Cell]:
    if not file.exists():
        return []
    return [Cell(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def draw(file: Path, *, num_draws: int, num_workers: int) -> list[Cell]:
    """The cells that are not in the file yet, several at once."""
    done = read_cells(file)
    known = {(cell.parameter, cell.way, cell.draws) for cell in done}
    missing = [(p, w) for p, w in cells() if (p, w, num_draws) not in known]
    file.parent.mkdir(parents=True, exist_ok=True)
    with (
        shown_progress("cells") as progress,
        ProcessPoolExecutor(num_workers, get_context("spawn")) as pool,
    ):
        progress.stage("drawing")
        progress.expect(len(missing))
        futures = [pool.submit(named_cell, *names, num_draws) for names in missing]
        for number, future in enumerate(as_completed(futures), 1):
            cell = future.result()
            done.append(cell)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(cell)) + "\n")
            progress.advance(number, f"{cell.parameter}, {cell.way}: p = {cell.pvalue:.3f}")
    return [cell for cell in done if cell.draws == num_draws]


def greedy(file: Path, args: argparse.Namespace, commit: str) -> list[Row]:
    with shown_progress("tokens") as progress:
        progress.stage("loading the model")
        return compare(
            file,
            num_tokens=args.tokens,
            max_tokens=args.max_tokens,
            num_workers=args.workers,
            commit=commit,
            progress=progress,
        )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare every lossless system, at scale.")
    parser.add_argument("--tokens", type=int, default=ASKED, help="0: none, but for those kept")
    parser.add_argument("--max-tokens", type=int, default=64, help="of one answer")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each cell; 0: none anew")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("out/exactness"))
    parser.add_argument("--report", type=Path, help="needed for less than a whole run")
    args = parser.parse_args(words)
    report = report_place(
        parser,
        args.report,
        stored=REPORT,
        asked={"--tokens": args.tokens, "--draws": args.draws},
        full={"--tokens": ASKED, "--draws": DRAWS},
    )
    facts = provenance()
    greedy_file, draws_file = args.out / "greedy.jsonl", args.out / "draws.jsonl"
    found, rows = read_cells(draws_file), read_rows(greedy_file)
    if args.draws:
        found = draw(draws_file, num_draws=args.draws, num_workers=max(1, args.workers))
    if args.tokens:
        rows = greedy(greedy_file, args, facts["commit"])
    report.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(report) as path:
        path.write_text(page(rows, found, facts, args.tokens or ASKED), encoding="utf-8")
    num_bad = sum(row.differing for row in rows)
    least = min((cell.pvalue for cell in found), default=1.0)
    print(f"{num_bad} of {sum(row.tokens for row in rows):,} tokens differ; least p {least:.2g}")
    print(f"written: {report}")
    return 1 if num_bad or least < LEAST_PVALUE else 0


if __name__ == "__main__":
    sys.exit(main())
