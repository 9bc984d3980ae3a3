"""Ask a served model what nobody would: `make fuzz`.

    make fuzz                                        # 200 requests of each kind
    python -m tests.fuzz --examples 2000 --seed 7

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
from collections.abc import Sequence
from pathlib import Path

from hvd_ray.commands.traces_progress import shown_progress
from tests.conftest import save_tiny_llama
from tests.fuzz.asking import Amount, runs
from tests.fuzz.served import served

HANG_S = 600
"""A run of one kind that takes longer is a hang: every thread's stack is shown."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask a served model what nobody would.")
    parser.add_argument("--examples", type=int, default=200, help="requests of each kind")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args(words)
    seed = random.randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}, {args.examples} requests of each kind", flush=True)
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder, shown_progress("kinds") as progress:
        save_tiny_llama(Path(folder) / "tiny")
        with served(Path(folder) / "tiny") as target:
            kinds = list(runs(target, Amount(args.examples, seed)))
            progress.expect(len(kinds))
            for number, (name, run) in enumerate(kinds, 1):
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                started = time.monotonic()
                try:
                    run()
                    target.check_idle()
                except AssertionError as found:
                    num_failed += 1
                    print(f"FAILED {name}: {found}\n{''.join(getattr(found, '__notes__', []))}")
                else:
                    print(f"held   {name} ({time.monotonic() - started:.1f} s)", flush=True)
                progress.advance(number, name)
            faulthandler.cancel_dump_traceback_later()
    print(f"{len(kinds)} kinds, {num_failed} failed; --seed {seed} repeats this")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
