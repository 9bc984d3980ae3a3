"""`hvd train`: learn from labels what a cache draft is worth."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_ray.commands.train_finished import keep_answer, kept_answer, training_key
from hvd_ray.commands.train_labels import noted, read_labels_dir
from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from hvd_ray.commands.train_registration import Registration
    from hvd_ray.config import Config
    from hvd_ray.payoff.dataset import LabelSet
    from hvd_ray.payoff.quality import QualityRow
    from hvd_ray.payoff.training import TrainedPredictor
    from hvd_ray.payoff.training_settings import TrainConfig, TrainingSettings
    from hvd_ray.tracking import Tracker

EXAMPLE = "Example: `hvd train labels --epochs 20 train.batch_size=2048`"


def register(app: typer.Typer) -> None:
    app.command("train", epilog=EXAMPLE)(train)


def train(
    labels: Annotated[
        Path,
        typer.Argument(
            metavar="LABELS_DIR", help="What `hvd traces label` has written, or folders of it."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="E.g. seed=7, train.batch_size=2048."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="survival: P(accepted >= k), which hvd_cost needs; mlp: the expected accepted "
            "length alone, as in the paper."
        ),
    ] = "survival",
    epochs: Annotated[int, typer.Option(metavar="N", help="Passes over the labels.")] = 20,
    tau: Annotated[
        str | None,
        typer.Option(metavar="X", help="Threshold that quality is reported at. Default: 6."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The predictor. Default: under HVD_HOME.")
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Only show what each feature group adds; keep nothing.")
    ] = False,
    rivals: Annotated[
        bool,
        typer.Option("--rivals", help="Only compare predictors and boosted trees; keep nothing."),
    ] = False,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --ablate: the labelled traces, to replay as well."),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(metavar="FILE|pass", help="With --traces: as in `hvd tune`. Default: pass."),
    ] = None,
    no_register: Annotated[
        bool, typer.Option("--no-register", help="Do not put it into the model registry.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Train a payoff predictor, judge it on held-out sessions and register it.

    It is registered as a challenger of the model's champion, which everything uses. Where there is
    none it becomes champion itself; but if a predictor ships for the model, only if it is no worse
    on the same held-out positions, and these are enough. What `hvd tune` searches can be set here:
    train.depth, train.width, train.learning_rate, train.batch_size, train.without (feature groups
    joined by `+`), beside train.members (networks of which the mean is kept), train.dropout and
    train.weight_decay. Default: as suits the kind.
    """
    from hvd_ray.config import load_config_as
    from hvd_ray.home import file_lock
    from hvd_ray.payoff.predictor import check_replaceable
    from hvd_ray.payoff.training_settings import LISTED_IN, TrainConfig

    given = load_config_as(
        TrainConfig, config, settings or (), policies=["hvd_tau"], where=LISTED_IN
    )
    loaded = _for_model_of(labels, given)
    training = _training_settings(kind, epochs, tau, loaded)
    if ablate:
        from hvd_ray.commands.train_ablation import show_ablation

        show_ablation(labels, loaded, training, traces=traces, costs=costs, as_json=as_json)
        return
    if rivals:
        from hvd_ray.commands.train_rivals import show_rivals

        show_rivals(labels, training, as_json=as_json)
        return
    for name, value in (("--traces", traces), ("--costs", costs)):
        if value is not None:
            raise UserError(f"{name} goes with --ablate only")
    folder = _folder(kind) if out is None else out
    check_replaceable(folder)
    alone = nullcontext() if out is None else file_lock(out, on_wait=lambda: _refuse_second(folder))
    with alone:
        answer, rows, registration = _train(
            labels, loaded, training, folder, wants_registration=not no_register
        )
    if as_json:
        print(json.dumps(answer, allow_nan=False))
    else:
        _show(answer, rows, registration)


def _refuse_second(folder: Path) -> None:
    raise UserError(f"{folder}: another training is writing there; wait, or choose another --out")


def _train(
    labels: Path,
    config: Config,
    settings: TrainingSettings,
    folder: Path,
    *,
    wants_registration: bool,
) -> tuple[dict[str, Any], Sequence[QualityRow], Registration | None]:
    """All that the command does, and what it answers."""
    from hvd_ray.payoff.training import train_predictor
    from hvd_ray.provenance import provenance
    from hvd_ray.tracking import tracked

    note = folder.with_name(f".{folder.name}.run")
    key = training_key(labels, config, settings, wants_registration=wants_registration)
    if (found := kept_answer(folder, key)) is not None:
        if note.exists():  # killed before its run could end
            with tracked(config, run_name=f"train-{settings.kind}", note=note):
                pass
        return found, (), None
    with _shown_epochs(settings.epochs) as progress:
        progress.stage("reading labels")
        data = read_labels_dir(labels)
        progress.stage("opening the tracking store")
        with tracked(config, run_name=f"train-{settings.kind}", note=note) as tracker:
            progress.stage("training")
            about = provenance(config=config, labels=str(labels))
            trained = train_predictor(
                data,
                settings,
                model=config.model,
                tokenizer_sha=noted(labels).get("tokenizer_sha"),
                provenance=about,
                log_metrics=_to_both(tracker.log_metrics, progress.advance),
            )
            trained.predictor.save(folder)
            progress.stage("registering")
            with _still_saved(folder):
                _log(tracker, trained, labels)
                is_registered = wants_registration and tracker.run_id is not None
                registration = _kept(
                    tracker, trained, folder, data.test, config, is_registered=is_registered
                )
            answer = {
                "predictor": str(folder),
                **(_UNREGISTERED if registration is None else registration.as_json()),
                "run_id": tracker.run_id,
                "training": trained.predictor.card.training,
                "rows": [
                    {"workload": r.workload, "judge": r.judge, **r.quality.as_dict()}
                    for r in trained.rows
                ],
            }
            if tracker.run_id is not None:
                keep_answer(folder, key, answer)
    return answer, trained.rows, registration


# -- what it starts from -----------------------------------------------------------------------


def _training_settings(
    kind: str, epochs: int, tau: str | None, config: TrainConfig
) -> TrainingSettings:
    try:
        threshold = config.policy.tau if tau is None else float(tau)
    except ValueError:
        raise UserError(f"--tau {tau!r}: expected a number of tokens, e.g. --tau 6") from None
    return config.train.settings(
        kind,  # type: ignore[arg-type]  # checked there
        epochs=epochs,
        seed=config.seed,
        tau=threshold,
    )


def _for_model_of(labels: Path, config: TrainConfig) -> TrainConfig:
    """The predictor belongs to the model whose traces were labelled, unless told otherwise."""
    from hvd_ray.config import DEFAULT_MODEL

    model = noted(labels).get("model")
    if model and config.model == DEFAULT_MODEL:
        return config.model_copy(update={"model": model})
    return config


def _folder(kind: str) -> Path:
    from hvd_ray.home import runs_dir

    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    return runs_dir() / "predictors" / f"{now}-{kind}"


# -- what it leaves behind ---------------------------------------------------------------------


_UNREGISTERED = {"registered": None, "alias": None, "beside_shipped": None}


def _log(tracker: Tracker, trained: TrainedPredictor, labels: Path) -> None:
    about = {"labels": str(labels.absolute())}  # where `hvd promote` finds them again
    tracker.log_params({**trained.predictor.card.training, **about})
    for row in trained.rows:
        figures = row.quality.as_dict().items()
        tracker.log_metrics(
            {f"{row.workload}/{row.judge}/{k}": v for k, v in figures if v is not None}
        )


def _kept(
    tracker: Tracker,
    trained: TrainedPredictor,
    folder: Path,
    held_out: LabelSet,
    config: Config,
    *,
    is_registered: bool,
) -> Registration | None:
    from hvd_ray.commands.train_registration import register_trained

    if not is_registered:
        tracker.log_artifacts(folder, "predictor")
        return None
    return register_trained(tracker, trained.predictor, folder, held_out=held_out, config=config)


@contextmanager
def _still_saved(folder: Path) -> Iterator[None]:
    """A store that fails now must not hide that the work is done."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; the predictor itself is saved: {folder}") from error


# -- what it shows -----------------------------------------------------------------------------


class _Epochs:
    """A bar over the epochs; without a terminal, a line for each stage."""

    def __init__(self, bars: Progress, num_epochs: int) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=num_epochs)

    def stage(self, text: str) -> None:
        self._bars.update(self._task, description=text)
        if not self._bars.console.is_terminal:
            self._bars.console.print(text, markup=False, highlight=False)

    def advance(self, figures: Mapping[str, float], epoch: int) -> None:
        text = f"training, loss {figures['train_loss']:.3f}"
        self._bars.update(self._task, completed=epoch, description=text)


def _to_both(
    log: Callable[[Mapping[str, float], int], None],
    show: Callable[[Mapping[str, float], int], None],
) -> Callable[[Mapping[str, float], int], None]:
    def call(figures: Mapping[str, float], epoch: int) -> None:
        log(figures, epoch)
        show(figures, epoch)

    return call


@contextmanager
def _shown_epochs(num_epochs: int) -> Iterator[_Epochs]:
    """A bar over the epochs on stderr, gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    bars = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )
    with bars:
        yield _Epochs(bars, num_epochs)


def _show(
    answer: Mapping[str, Any], rows: Sequence[QualityRow], registration: Registration | None
) -> None:
    from rich.console import Console

    if rows:
        Console().print(_table(answer["training"], rows))
    print(f"predictor: {answer['predictor']}")
    if registration is not None:
        print("\n".join(registration.lines()))
    elif not rows:
        if answer["registered"] is not None:
            print(f"registered: {answer['registered']} as {answer['alias']}")
        print("made before by the same command from the same labels; to train anew, another --out")


def _table(training: Mapping[str, Any], rows: Sequence[QualityRow]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = (
        f"Accepted length >= 6, called at an estimate > {training['tau']:g}: held-out sessions, "
        f"every position with a draft ({training['num_train_positions']:,} to learn from). "
        "chance: by P(accepted >= 6) > 0.5; p@r.80: precision at the best threshold of recall "
        ">= 0.80"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", overflow="fold", max_width=20)
    table.add_column("judge", no_wrap=True)
    for heading in ("positions", ">= 6", "prec.", "recall", "p@r.80", "AP"):
        table.add_column(heading, justify="right", no_wrap=True)
    num_workloads = len({row.workload for row in rows}) - 1
    for row in rows if num_workloads > 1 else [row for row in rows if row.workload == "all"]:
        q = row.quality
        is_first = row.judge == "predictor"
        shared = (f"{q.num_positions:,}", f"{q.base_rate:.1%}") if is_first else ("", "")
        found = (q.precision, q.recall, q.precision_at_recall, q.average_precision)
        figures = [_figure(f) for f in found]
        workload = Text(row.workload if is_first else "")
        table.add_row(workload, row.judge, *shared, *figures)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
