"""The dashboard docs/grafana.json: Grafana can import it, and its queries use only series that the server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server.metrics import COUNTERS, GAUGES, HISTOGRAMS
from tests.server.rig import FAKE, serving

BOARD = Path(__file__).parents[2] / "docs/grafana.json"
COMMON = {"model_name", "engine"}
SELECTOR = re.compile(r"quire:(\w+)(?:\{([^}]*)\})?")


def board() -> dict[str, Any]:
    found = json.loads(BOARD.read_text())
    assert isinstance(found, dict)
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def labels_of(series: str) -> set[str] | None:
    """The labels of a series besides the common ones; None if there is no such series."""
    known = {name: set(spec.labels) for name, spec in GAUGES.items()}
    known |= {f"{name}_total": set(spec.labels) for name, spec in COUNTERS.items()}
    for name, spec in HISTOGRAMS.items():
        known |= {f"{name}_{part}": set(spec.labels) for part in ("sum", "count")}
        known[f"{name}_bucket"] = {*spec.labels, "le"}
    return known.get(series)


def problems(expression: str) -> Iterator[str]:
    found = SELECTOR.findall(expression)
    if not found:
        yield f"{expression}: asks for nothing"
    grouped = {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",") if label
    }
    for series, matchers in found:
        labels = labels_of(series)
        if labels is None:
            yield f"{series}: there is no such series"
            continue
        used = grouped | set(re.findall(r"(\w+)=", matchers))
        yield from (f"{series}: has no label {label}" for label in used - labels - COMMON)
        if 'model_name=~"$model_name"' not in matchers:
            yield f"{series}: of all models, whatever is chosen"
        is_counted = series.endswith(("_total", "_sum", "_count", "_bucket"))
        is_rated = re.search(rf"(rate|increase)\(quire:{series}\b", expression) is not None
        if is_counted != is_rated:
            yield f"{series}: a rate of a gauge, or a counter without one"
    if "histogram_quantile" in expression and "le" not in grouped:
        yield f"{expression}: a quantile over buckets that were added up"


def test_every_expression_uses_existing_series() -> None:
    assert len(expressions()) >= 40
    assert [problem for expression in expressions() for problem in problems(expression)] == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(up)", "asks for nothing"),
        ('sum(rate(quire:nothing_total{model_name=~"$model_name"}[1m]))', "no such series"),
        ('sum(quire:prompt_tokens{model_name=~"$model_name"})', "no such series"),  # its name ends in _total
        ('sum(quire:prompt_tokens_total{model_name=~"$model_name"})', "a counter without one"),
        ('rate(quire:queue_requests{model_name=~"$model_name"}[1m])', "a rate of a gauge"),
        ('sum by (colour) (quire:queue_requests{model_name=~"$model_name"})', "no label colour"),
        ("sum(quire:num_requests_running)", "whatever is chosen"),
        (
            'histogram_quantile(0.5, sum(rate(quire:step_seconds_bucket{model_name=~"$model_name"}[1m])))',
            "buckets that were added up",
        ),
    ],
)
def test_the_check_itself_can_fail(expression: str, problem: str) -> None:
    assert any(problem in found for found in problems(expression))


def test_grafana_can_import_it() -> None:
    found = board()
    assert found["title"] == "quire"
    assert found["schemaVersion"] >= 36  # since this version, data sources are objects
    assert "id" not in found  # Grafana assigns one
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert cells
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_variables() -> None:
    datasource, model = board()["templating"]["list"]
    assert (datasource["name"], datasource["type"], datasource["query"]) == ("datasource", "datasource", "prometheus")
    assert (model["name"], model["type"]) == ("model_name", "query")
    name, label = re.fullmatch(r"label_values\(quire:(\w+), (\w+)\)", model["query"]["query"]).groups()  # type: ignore[union-attr]
    assert name in GAUGES
    assert label == "model_name"


def test_a_server_exports_every_series(default_model: Path) -> None:
    """Every series of every panel, with the labels that select it, is in the first scrape."""
    del default_model  # is here now
    with serving(*FAKE) as server:
        assert server.chat().status == 200
        families = text_string_to_metric_families(server.get("/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples]
    assert samples
    for expression in expressions():
        for series, matchers in SELECTOR.findall(expression):
            wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
            assert any(one.name == f"quire:{series}" and wanted.items() <= one.labels.items() for one in samples), (
                series
            )
