"""Plans edited by hand."""

from __future__ import annotations

import json

from lightning_autotp.layouts.plan import Plan


def without_an_mlp(plan: Plan) -> Plan:
    """The first layer's MLP whole again, edited in the JSON by hand: its parameters, layers and change of layout."""
    data = json.loads(plan.to_json())
    mlp = "model.layers.0.mlp"
    for parameter in data["parameters"]:
        if parameter["names"][0].startswith(mlp):
            parameter["layout"] = "I"
    for entries in ("implementations", "conversions"):
        data[entries] = [entry for entry in data[entries] if not entry["module"].startswith(mlp)]
    return Plan.from_json(json.dumps(data))
