"""The layer rule: who may import whom, and where the heavy packages may stand.

Every import counts, also those inside functions. To extend the rule, add a name to a table.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hvd_ray"

# From the bottom up; a unit (module or package of hvd_ray) may import its own layer and those
# below. Within a layer there may be no circle.
_NOUNS = {
    "addresses",
    "errors",
    "home",
    "types",
    "config",
    "context",
    "compiled",
    "text",
    "ending",
    "parquet_file",
    "provenance",
    "randomness",
    "settings_yaml",
    "shipped",
    "versioned_json",
}
_MODELS = {"targets", "fetch"}
LAYERS: tuple[tuple[str, frozenset[str]], ...] = (
    ("nouns", frozenset(_NOUNS | _MODELS)),
    ("engines", frozenset({"engines"})),
    ("parts", frozenset({"drafting", "payoff", "verify", "traces", "tracking"})),
    ("decode", frozenset({"decode"})),
    ("systems", frozenset({"systems"})),
    ("what systems need", frozenset({"parts"})),
    (
        "uses",
        frozenset(
            {
                "advise",
                "bench",
                "doctor",
                "pages",
                "paper",
                "pipelines",
                "scaling",
                "serving",
                "tuning",
                "vllm_plugin",
            }
        ),
    ),
    ("front", frozenset({"commands", "number_options", "cli", "job"})),
)

# A heavy package stands only in these units or modules.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("pipelines", "tuning", "serving"),
    "mlflow": ("tracking",),
    "vllm": ("vllm_plugin", "serving", "pipelines.eagle3_collect", "pipelines.eagle3_vllm"),
}

# A heavy package stands nowhere in these.
NEVER_IN: dict[str, tuple[str, ...]] = {
    "torch": (
        *("types", "config", "context", "errors", "home", "traces"),
        *("payoff.policy", "payoff.cost", "bench.stats"),
        *("commands", "cli", "fetch", "doctor"),
    ),
}


@dataclass(frozen=True)
class Import:
    """One import of one module."""

    importer: str
    """Dotted, without `hvd_ray.`."""
    imported: str
    """Dotted, in full."""
    line: int
    is_for_types: bool
    """Under `if TYPE_CHECKING`: no cost, but the layers hold all the same."""

    @property
    def where(self) -> str:
        return f"hvd_ray/{self.importer.replace('.', '/')}.py:{self.line}"


def imports_of(importer: str, source: str) -> Iterator[Import]:
    """All imports in `source`, the text of module `importer`."""
    tree = ast.parse(source)
    for_types = {id(node) for block in _type_blocks(tree) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{_base(importer, node)}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(importer, name, node.lineno, id(node) in for_types)


def _type_blocks(tree: ast.Module) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield node


def _base(importer: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    above = ["hvd_ray", *importer.split(".")][: -node.level]
    return ".".join([*above, node.module] if node.module else above)


def violations(found: Import) -> Iterator[str]:
    """What is wrong with one import."""
    root, *rest = found.imported.split(".")
    if root == "hvd_ray":
        yield from _layer_violations(found, unit=rest[0] if rest else "")
    elif not found.is_for_types:
        yield from _package_violations(found, package=root)


def _layer_violations(found: Import, *, unit: str) -> Iterator[str]:
    importer = found.importer.split(".")[0]
    if unit.startswith("__") or unit in ("", importer):
        return
    for name in (importer, unit):
        if _layer(name) is None:
            yield f"{found.where}: {name} is in no layer; add it to LAYERS in {Path(__file__).name}"
            return
    own, other = _layer(importer), _layer(unit)
    if other > own:
        above, below = LAYERS[other][0], LAYERS[own][0]
        yield f"{found.where}: {importer} ({below}) may not import {unit} ({above}), a layer above"


def _package_violations(found: Import, *, package: str) -> Iterator[str]:
    places = ONLY_IN.get(package)
    if places is not None and not _stands_in(found.importer, places):
        yield f"{found.where}: {package} is imported only in {', '.join(places)}"
    if _stands_in(found.importer, NEVER_IN.get(package, ())):
        yield f"{found.where}: {package} is never imported in {found.importer}"


def _stands_in(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def _layer(unit: str) -> int | None:
    return next((rank for rank, (_, units) in enumerate(LAYERS) if unit in units), None)


def all_imports() -> list[Import]:
    found: list[Import] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            found += imports_of(".".join(parts), file.read_text(encoding="utf-8"))
    return found


def circle(imports: list[Import]) -> list[str]:
    """Units that import one another in a circle, or none."""
    edges: dict[str, set[str]] = {}
    for found in imports:
        root, *rest = found.imported.split(".")
        importer = found.importer.split(".")[0]
        if root == "hvd_ray" and rest and rest[0] != importer and not found.is_for_types:
            edges.setdefault(importer, set()).add(rest[0])
    return next((path for unit in edges if (path := _way_back(unit, edges))), [])


def _way_back(unit: str, edges: dict[str, set[str]]) -> list[str]:
    ways = [[unit]]
    seen = set()
    while ways:
        way = ways.pop()
        for following in sorted(edges.get(way[-1], ())):
            if following == unit:
                return [*way, unit]
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return []


def test_every_import_keeps_the_rule() -> None:
    broken = [message for found in all_imports() for message in violations(found)]
    assert not broken, "\n" + "\n".join(broken)


def test_no_circle_between_units() -> None:
    way = circle(all_imports())
    assert not way, "circle: " + " -> ".join(way)


@pytest.mark.parametrize(
    ("importer", "source", "rule"),
    [
        ("engines.toy", "from hvd_ray.decode import decode", "a layer above"),
        ("engines.toy", "def f():\n    import hvd_ray.bench.stats", "a layer above"),
        ("engines.toy", "from hvd_ray import decode", "a layer above"),
        ("engines.toy", "from ..decode import decode", "a layer above"),
        ("types", "from .decode import decode", "a layer above"),
        ("bench.measure", "import ray", "only in pipelines"),
        ("bench.measure", "def f():\n    from ray.data import Dataset", "only in pipelines"),
        ("pipelines.collect", "import mlflow.pytorch", "only in tracking"),
        ("pipelines.collect", "import vllm", "only in vllm_plugin"),
        ("traces.replay", "def f():\n    import torch", "never imported in traces.replay"),
        ("payoff.cost", "from torch import Tensor", "never imported in payoff.cost"),
        ("surprise", "from hvd_ray.types import Draft", "in no layer"),
    ],
)
def test_a_broken_rule_is_named_with_its_place(importer: str, source: str, rule: str) -> None:
    messages = [m for found in imports_of(importer, source) for m in violations(found)]
    assert len(messages) == 1
    assert rule in messages[0]
    assert messages[0].startswith(f"hvd_ray/{importer.replace('.', '/')}.py:")


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("decode", "from hvd_ray.payoff.policy import Policy"),
        ("commands.bench", "from hvd_ray.bench import report"),
        ("pipelines.collect", "import ray\nimport raybold"),
        ("payoff.predictor", "import torch"),
        ("traces.schema", "if TYPE_CHECKING:\n    import torch"),
        ("tracking", "import mlflow"),
        ("home", "from hvd_ray import __version__"),
    ],
)
def test_what_the_rule_allows(importer: str, source: str) -> None:
    assert [m for found in imports_of(importer, source) for m in violations(found)] == []


def test_a_circle_is_found() -> None:
    sources = {
        "drafting.a": "from hvd_ray.payoff import b",
        "payoff.b": "import hvd_ray.drafting.a",
        "verify.c": "from hvd_ray.drafting import a",
    }
    imports = [found for name, text in sources.items() for found in imports_of(name, text)]
    assert circle(imports) == ["drafting", "payoff", "drafting"]
