"""Ask a served model what nobody would: `make fuzz`.

    make fuzz                                        # 150 requests of each kind
    python -m tests.fuzz --examples 2000 --seed 7    # docs/reports/fuzz.md is replaced
    python -m tests.fuzz --examples 20 --report out/fuzz.md

Bodies are made from the served OpenAPI description, right and wrong ones, from values that no
description thinks of, and from bytes. No answer may be a fault of the server, every refusal must
have OpenAI's shape, no request may hang or stay behind. Prints the seed that repeats a run.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_ray.bench.stored_report import report_place
from hvd_ray.commands.traces_progress import shown_progress
from hvd_ray.home import atomic_path
from hvd_ray.provenance import provenance
from tests.conftest import save_tiny_llama
from tests.fuzz.asking import Amount, Run, runs
from tests.fuzz.served import served

EXAMPLES = 150
"""Requests of each kind, where nothing else is said; less needs a report of its own."""
REPORT = Path(__file__).parents[2] / "docs" / "reports" / "fuzz.md"
HANG_S = 600
"""A run of one kind that takes longer is a hang: every thread's stack is shown."""


@dataclass(frozen=True)
class Kind:
    """What came of one kind of requests."""

    name: str
    seconds: float
    found: str
    """The first answer that should not be; empty: all held."""


def ask_all(runs: Sequence[tuple[str, Run]], check_idle: Run) -> Iterator[Kind]:
    """Run after run; what one finds stops none of the others."""
    for name, run in runs:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        started, told = time.monotonic(), ""
        try:
            run()
            check_idle()
        except AssertionError as found:
            told = f"{found}\n{''.join(getattr(found, '__notes__', []))}".strip()
        yield Kind(name, time.monotonic() - started, told)
    faulthandler.cancel_dump_traceback_later()


def page(kinds: Sequence[Kind], *, examples: int, seed: int) -> str:
    """The stored report."""
    facts = provenance()
    bad = [kind for kind in kinds if kind.found]
    total = f"{len(kinds) * examples:,} requests, {examples} of each of {len(kinds)} kinds"
    lines = [
        "# Fuzzing the endpoints",
        "",
        f"Written by `make fuzz` on {facts['created_at'][:10]}, commit {facts['commit'][:12]}, "
        f"{facts['cpu']}; `--examples {examples} --seed {seed}` repeats it.",
        "",
        f"**{len(bad) or 'No'} failures in {total}.** Asked of the front and a replica of the "
        "torch engine with a tiny model, in one process; a failure is an answer of 500 or above, "
        "a refusal or an answer of another shape than `/openapi.json` says, a hang, or a request "
        "that is left running. `positive` and `negative` are bodies that fit the description and "
        "that do not.",
        "",
        "| kind | seconds | outcome |",
        "| :-- | --: | :-- |",
        *(f"| {k.name} | {k.seconds:.1f} | {'failed' if k.found else 'held'} |" for k in kinds),
        "",
    ]
    for kind in bad:
        lines += [f"## {kind.name}", "", *(f"    {line}" for line in kind.found.splitlines()), ""]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask a served model what nobody would.")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="requests of each kind")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--report", type=Path, help="needed for fewer examples than usual")
    args = parser.parse_args(words)
    length, full = {"--examples": args.examples}, {"--examples": EXAMPLES}
    report = report_place(parser, args.report, stored=REPORT, asked=length, full=full)
    seed = random.randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}, {args.examples} requests of each kind", flush=True)
    kinds = []
    with tempfile.TemporaryDirectory() as folder, shown_progress("kinds") as progress:
        save_tiny_llama(Path(folder) / "tiny")
        with served(Path(folder) / "tiny") as target:
            named = list(runs(target, Amount(args.examples, seed)))
            progress.expect(len(named))
            for kind in ask_all(named, target.check_idle):
                kinds.append(kind)
                told = f"FAILED {kind.name}: {kind.found}" if kind.found else f"held   {kind.name}"
                print(f"{told} ({kind.seconds:.1f} s)", flush=True)
                progress.advance(len(kinds), kind.name)
    report.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(report) as path:
        path.write_text(page(kinds, examples=args.examples, seed=seed), encoding="utf-8")
    num_failed = sum(bool(kind.found) for kind in kinds)
    print(f"{len(kinds)} kinds, {num_failed} failed; --seed {seed} repeats this")
    print(f"written: {report}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
