"""Pictures of the pages, from real runs of the default model: `make screens`.

    python -m scripts.screens                            # all of them
    python -m scripts.screens --folder /tmp/hvd mlflow   # a group, on what was run there before

A Ray cluster, `hvd serve`, `hvd ui` and a Chromium are started on loopback and ended again; what
they make lies in a folder of its own, which is deleted unless --folder names it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from scripts.conformance import BIN, free_port, served
from tests.browser import BROWSER, Page, opened
from tests.e2e.job_cluster import JobCluster, job_cluster

REPO = Path(__file__).parents[1]
SCREENS = REPO / "docs" / "screens"
WIDTH, HEIGHT = 1200, 900
MOST_BYTES = 200_000
COMMAND_S = 600
"""Seconds after which a command is given up."""
ASKED, TOKENS = "code_edit-cart-totals#1", 154
"""The prompt of the serving page, and where the function in its answer ends."""
WIDE = 1440
"""For pages whose tables do not fit into less."""
THREADS = "1"
"""Everywhere: a cost table holds for as many threads as it was measured with."""
PASS_BY = """
const heads = [...document.querySelectorAll('th')];
const after = heads.findIndex((head) => head.innerText.startsWith('PID'));
for (const row of document.querySelectorAll('tr'))
  for (const cell of [...row.cells].slice(after)) cell.style.display = 'none';
heads.find((head) => head.innerText.startsWith('Class'))
  .scrollIntoView({inline: 'start', block: 'nearest'});
"""
SYSTEMS = "ngram,suffix,hvd_tau,hvd_cost"


@dataclass(frozen=True)
class Shot:
    """A picture that is kept as `docs/screens/NAME.png`, `WIDTH` pixels wide."""

    name: str
    url: str
    shown: str
    """A JavaScript expression that holds once the page shows what it is for."""
    height: int | None = HEIGHT
    """Of the window, in CSS pixels; None: of the whole page."""
    width: int = WIDTH
    """Of the window: a wider one is drawn smaller."""
    act: Callable[[Page], Awaitable[None]] | None = None
    """What is done on the page before."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """What a visitor who was here before has in local storage."""


# -- a browser ---------------------------------------------------------------------------------


def take(*shots: Shot) -> None:
    """Open each page in turn and keep what it shows."""
    with tempfile.TemporaryDirectory(prefix="hvd-", ignore_cleanup_errors=True) as profile:
        asyncio.run(_take(shots, Path(profile)))


async def _take(shots: tuple[Shot, ...], profile: Path) -> None:
    async with opened("about:blank", profile) as page:
        for shot in shots:
            await page.remember(shot.stored)
            await page.go("about:blank")  # else an address that differs in its # is no new page
            await _show(page, shot, shot.height or HEIGHT)
            await page.go(shot.url)
            await page.until(shot.shown)
            if shot.act is not None:
                await shot.act(page)
            if shot.height is None:
                whole = await page.value("document.documentElement.scrollHeight")
                await _show(page, shot, int(whole))
            keep(shot.name, await page.picture())


async def _show(page: Page, shot: Shot, height: int) -> None:
    await page.show(width=shot.width, height=height, scale=WIDTH / shot.width)


def keep(name: str, png: bytes) -> None:
    """Write a picture; one that would be too large for the docs gets fewer colours."""
    path = SCREENS / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(REPO)}: {size / 1000:.0f} kB", flush=True)
    if size > MOST_BYTES:
        sys.exit(f"{path} has {size} bytes, of {MOST_BYTES}: take less of the page")


def says(*words: str) -> str:
    """That the page's text holds all of these."""
    return " && ".join(f"document.body.innerText.includes({json.dumps(word)})" for word in words)


# -- commands ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """The folder in which everything is run."""

    folder: Path

    def hvd(self, *words: str, makes: str | None = None) -> None:
        """Run `hvd WORDS` there, unless what it makes (a pattern) is there."""
        if makes is None or not any(self.folder.glob(makes)):
            self.run([str(BIN / "hvd"), *words])

    def run(
        self,
        command: list[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Run a command to its end; what it prints is shown where it fails."""
        print(f"$ {' '.join([Path(command[0]).name, *command[1:]])}", flush=True)
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=environment,
            timeout=COMMAND_S,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"it ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")

    def job(self, cluster: JobCluster, name: str, *words: str) -> None:
        """Hand a file of jobs/ in, and wait for its end."""
        variables = ("HVD_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
        env = {"env_vars": {variable: os.environ[variable] for variable in variables}}
        submit = [str(BIN / "ray"), "job", "submit", "--submission-id", name]
        submit += ["--working-dir", ".", "--runtime-env-json", json.dumps(env)]
        job = ["--", "python", f"jobs/{name}.py", *words]
        self.run([*submit, *job], environment=cluster.environment, cwd=REPO)

    def place(self, name: str) -> str:
        """An absolute path, as a job needs it."""
        return str(self.folder / name)


@contextmanager
def mlflow_pages() -> Iterator[tuple[str, str]]:
    """Addresses that an `hvd ui` prints, of its pages and of our runs; it ends with the block."""
    command = [str(BIN / "hvd"), "ui", "--port", str(free_port())]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = server.stdout.readline() + server.stdout.readline()
        addresses = re.findall(r"http://\S+", lines)
        if len(addresses) != 2:
            sys.exit(f"hvd ui did not start: {lines}")
        yield addresses[0], addresses[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


# -- what is shown -----------------------------------------------------------------------------


def ray_pages(site: Site) -> None:
    """Two jobs on a cluster, and a model that is served on it."""
    with job_cluster(has_auth=False) as cluster:
        collected = ("--limit", "6", "--max-tokens", "64", "--policy", "suffix", "--workers", "2")
        site.job(cluster, "collect_traces", "--out", site.place("traces"), *collected)
        labels = (site.place("traces"), "--out", site.place("labels"), "--workers", "2")
        site.job(cluster, "label_traces", *labels)
        jobs = says("collect_traces", "label_traces")
        take(Shot("ray-jobs", f"{cluster.url}/#/jobs", jobs, height=760, width=WIDE))
        environment = cluster.environment | {"RAY_ADDRESS": cluster.gcs_address}
        with served(["dtype=float32", f"num_threads={THREADS}"], environment=environment) as base:
            has_modes = "document.getElementById('mode').options.length"
            serve, actors = f"{cluster.url}/#/serve", f"{cluster.url}/#/actors"
            take(
                Shot("serve", f"{base}/ui", has_modes, height=None, act=ask_twice),
                Shot("ray-serve", serve, says("RUNNING", "Replica"), height=690, width=WIDE),
                Shot("ray-actors", actors, says("ALIVE"), width=WIDE, act=pass_by_the_ids),
            )


async def pass_by_the_ids(page: Page) -> None:
    """Show the states, which stand far to the right, without this machine's address behind them."""
    await page.value(PASS_BY)


async def ask_twice(page: Page) -> None:
    """The second time the cache knows the answer; then point at a token that it drafted."""
    from hvd_ray.bench.workloads import load_shipped

    prompts = {prompt.id: prompt for prompt in load_shipped().prompts}
    question = prompts[ASKED].messages[-1].content
    await page.value(f"document.getElementById('prompt').value = {json.dumps(question)}")
    await page.value(f"document.getElementById('tokens').value = {TOKENS}")
    for _ in range(2):
        await page.value("document.getElementById('go').click()")
        idle = "document.getElementById('go').textContent === 'Send'"
        told = "document.getElementById('gain').textContent.includes('answer')"
        await page.until(f"{idle} && {told}", within_s=120)
    await page.value(
        "document.querySelector('#answer .cache').dispatchEvent("
        "new PointerEvent('pointerover', {bubbles: true}))"
    )


def mlflow_shots(site: Site) -> None:
    """A training, a sweep and a measurement as runs."""
    learn(site)
    measure(site)
    run_id = json.loads((site.folder / "sweep" / "sweep.json").read_text())["run_id"]
    with mlflow_pages() as (url, runs):
        models = f"{url}/#/models/hvd-payoff-smollm2-135m?workflowType=machine_learning"
        look = {"width": WIDE, "height": 760, "stored": seen_before(run_id)}
        take(
            Shot("mlflow-runs", runs, says("tune-sweep", "trial-", "emitted_per_pass"), **look),
            Shot("mlflow-models", models, says("Version 1"), **look),
        )


def seen_before(run_id: str) -> dict[str, str]:
    """What MLflow's pages keep: its assistant closed, some columns, a sweep's trials unfolded."""
    names = ("metrics.`emitted_per_pass`", "metrics.`speed`", "params.`policy`", "params.`kind`",
             "params.`depth`", "params.`width`")  # fmt: skip
    columns = {"selectedColumns": names, "runsExpanded": {run_id: True}}
    page = 'MLflowLocalStorage-1.1-ExperimentPage-["1"]-ReactComponentState'
    return {
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
        "mlflow.assistant.panelOpen_v1": "false",
        page: json.dumps(columns),
    }


def file_shots(site: Site) -> None:
    """The pages that commands write beside their results."""
    learn(site)
    measure(site)
    site.hvd("advise", "traces", "--out", "advice.html", makes="advice.html")
    site.hvd("report", "bench.json", "--out", "report", makes="report")
    pages = {"sweep": "sweep/sweep.html", "advise": "advice.html", "report": "report/report.html"}
    take(
        *(
            Shot(name, (site.folder / page).as_uri(), "!!document.querySelector('svg')", 1100)
            for name, page in pages.items()
        )
    )


def learn(site: Site) -> None:
    """A predictor, and a sweep for a better one."""
    site.hvd("train", "labels", "--kind", "survival", "--out", "payoff", makes="payoff")
    config = ("--config", str(REPO / "tune_configs" / "quick.yaml"), "trials=8")
    data = ("--labels", "labels", "--traces", "traces", "--out", "sweep")
    site.hvd("tune", *config, *data, makes="sweep/sweep.html")


def measure(site: Site) -> None:
    sizes = ("--systems", SYSTEMS, "--limit", "3", "--max-tokens", "48")
    site.hvd("bench", *sizes, "--track", "--out", "bench.json", makes="bench.json")


GROUPS: dict[str, Callable[[Site], None]] = {
    "ray": ray_pages,
    "mlflow": mlflow_shots,
    "files": file_shots,
}


def prepare(folder: Path) -> Site:
    """A home of its own, with the default model of the user's."""
    from hvd_ray.config import DEFAULT_MODEL
    from hvd_ray.fetch import fetch_model
    from hvd_ray.home import models_dir

    fetch_model(DEFAULT_MODEL)
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "models").exists():
        (home / "models").symlink_to(models_dir())
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    os.environ |= {"HVD_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": THREADS}
    site = Site(folder)
    for dtype in ("bfloat16", "float32"):
        made = f"home/calibration/torch-{dtype}-*.json"
        site.hvd("calibrate", "--repeats", "3", f"dtype={dtype}", makes=made)
    return site


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures in docs/screens anew.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--folder", type=Path, help="run there, keep it, use what is there")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}; known are {', '.join(GROUPS)}")
    if BROWSER is None:
        sys.exit("a Chromium is needed: apt install chromium")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="hvd-", dir="/tmp"))
    try:
        site = prepare(folder.absolute())
        for name in args.groups or GROUPS:
            GROUPS[name](site)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
