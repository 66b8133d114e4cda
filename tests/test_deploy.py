"""What the dashboard asks for is what /metrics has."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_server import running

BOARD = json.loads((Path(__file__).parents[1] / "deploy" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Names of samples, with their labels."""
    with running(vllm_metric_names=False) as web:
        web.complete()
        text = web.send("GET", "/metrics").body.decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_expression_has_its_metric(panel, exposed):
    assert panel["targets"]
    for target in panel["targets"]:
        names = re.findall(r"jaxllm:\w+", target["expr"])
        assert names and not set(names) - set(exposed), target["expr"]
        for labels in re.findall(r"by \((\w+)\)", target["expr"]):
            assert labels in exposed[names[0]], target["expr"]
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert f"by ({label})" in target["expr"]


def test_the_dashboard_is_whole():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids) and BOARD["uid"] and BOARD["schemaVersion"] >= 36
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= 24
        assert panel["datasource"]["uid"] == "${datasource}"
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "model"}
