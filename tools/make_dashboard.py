"""Write `monitoring/grafana/dashboards/distclip.json`: the Grafana dashboard, from code a person can review.

`make dashboard` runs it; a test holds the committed JSON against what it makes. Rules for every query:

- Every node exports the series of the run, so queries say `max by (run)`, never a sum over nodes.
- No query may give nan: a share divides by `(... > 0)`, so that it is absent while no steps run, and the age of the
  last step is absent before the first one.
- Rates use `$__rate_interval`, which spans at least four scrapes at any zoom.
"""

# The SDK types its builders with Self and StrEnum of Python 3.11, which are unknown while mypy checks for 3.10.
# mypy: disable-error-code="no-any-return, arg-type"

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import prometheus, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

TARGET = Path(__file__).resolve().parent.parent / "monitoring" / "grafana" / "dashboards" / "distclip.json"

_DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="$datasource")
_RUN = 'run=~"$run"'

# Where nodes disagree for a moment, the highest code is shown: the state that most wants to be seen.
_STATES = {
    "initializing": (1, "light-blue"),
    "rendezvous": (2, "blue"),
    "running": (3, "green"),
    "restarting": (4, "orange"),
    "succeeded": (5, "dark-green"),
    "stopped": (6, "purple"),
    "failed": (7, "red"),
}


def build() -> dashboard.Dashboard:
    """Return the dashboard: a row about the run and a row about its gradients."""
    builder = (
        dashboard_builders.Dashboard("distclip")
        .uid("distclip")
        .description(
            "Gradients of training runs: norm and limit, what was clipped or skipped, and whether steps go on."
        )
        .tags(["distclip", "training"])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard_builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard_builders.QueryVariable("run")
            .label("Run")
            .datasource(_DATASOURCE)
            .query("label_values(distclip_run_start_timestamp_seconds, run)")
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
        )
        .annotation(
            dashboard_builders.AnnotationQuery()
            .name("Alerts")
            .datasource(_DATASOURCE)
            .enable(True)
            .icon_color("red")
            .expr(f'ALERTS{{alertname=~"Distclip.+", alertstate="firing", {_RUN}}}')
        )
    )
    ids = itertools.count(1)
    builder.with_row(dashboard_builders.Row("Run").id(next(ids)))
    for panel in (_state(), _age(), _speed()):
        builder.with_panel(panel.id(next(ids)))
    builder.with_row(dashboard_builders.Row("Gradients").id(next(ids)))
    for panel in (_norm(), _events(), _clipped(), _loss()):
        builder.with_panel(panel.id(next(ids)))
    return builder.build()


def _state() -> statetimeline.Panel:
    arms = [f'{code} * distclip_run_state{{{_RUN}, state="{state}"}}' for state, (code, _) in _STATES.items()]
    mapping = dashboard.ValueMap(
        options={
            str(code): dashboard.ValueMappingResult(text=state, color=color, index=code)
            for state, (code, color) in _STATES.items()
        }
    )
    return (
        statetimeline.Panel()
        .title("State")
        .description("What the run is doing, by what its nodes say.")
        .datasource(_DATASOURCE)
        .height(7)
        .span(12)
        .mappings([mapping])
        .show_value(common.VisibilityMode.AUTO)
        .with_target(_query("max by (run) (\n  " + "\n  or ".join(arms) + "\n)", "{{run}}"))
    )


def _age() -> timeseries.Panel:
    return (
        _timeseries("Age of the last step", "Time since the newest step. A slope means that no steps are made.")
        .span(6)
        .unit("s")
        .min(0)
        .with_target(_query(f"time() - (max by (run) (distclip_last_step_timestamp_seconds{{{_RUN}}}) > 0)", "{{run}}"))
    )


def _speed() -> timeseries.Panel:
    return (
        _timeseries("Steps per second", "Measured optimizer steps, skipped ones included.")
        .span(6)
        .unit("ops")
        .min(0)
        .with_target(_query(_rate("distclip_steps_total"), "{{run}}"))
    )


def _norm() -> timeseries.Panel:
    return (
        _timeseries(
            "Gradient norm and limit",
            "Norm over all gradients before clipping, at the last finite step, and the limit (dashed). "
            "A norm of exactly 0 has no place on a logarithmic axis: see the events.",
        )
        .height(10)
        .span(24)
        .scale_distribution(common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
        .with_target(_query(f"max by (run) (distclip_gradient_norm{{{_RUN}}})", "{{run}} norm"))
        .with_target(_query(f"max by (run) (distclip_gradient_norm_limit{{{_RUN}}})", "{{run}} limit", ref_id="B"))
        .override_by_regexp(
            "/ limit$/",
            [dashboard.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]})],
        )
    )


def _events() -> timeseries.Panel:
    panel = (
        _timeseries(
            "Events",
            "Steps per interval whose gradient was nonfinite, zero or tiny, or differed between ranks, and what became "
            "of them.",
        )
        .span(12)
        .min(0)
        .draw_style(common.GraphDrawStyle.BARS)
        .fill_opacity(80)
    )
    for ref_id, metric, name in (
        ("A", "distclip_nonfinite_steps_total", "nonfinite"),
        ("B", "distclip_nonfinite_steps_applied_total", "nonfinite and applied"),
        ("C", "distclip_zero_gradient_steps_total", "zero"),
        ("D", "distclip_tiny_gradient_steps_total", "tiny"),
        ("E", "distclip_replica_divergences_total", "different between ranks"),
    ):
        panel.with_target(_query(_increase(metric), f"{{{{run}}}} {name}", ref_id=ref_id))
    skipped = _increase("distclip_skipped_steps_total", by="run, reason")
    return panel.with_target(_query(skipped, "{{run}} skipped: {{reason}}", ref_id="F"))


def _clipped() -> timeseries.Panel:
    share = f"{_rate('distclip_clipped_steps_total')}\n/\n({_rate('distclip_steps_total')} > 0)"
    return (
        _timeseries("Clipped share", "Share of steps whose norm was above the limit.")
        .span(6)
        .unit("percentunit")
        .min(0)
        .max(1)
        .with_target(_query(share, "{{run}}"))
    )


def _loss() -> timeseries.Panel:
    return (
        _timeseries("Loss", "Where the training loop hands it to distclip.")
        .span(6)
        .with_target(_query(f"max by (run) (distclip_loss{{{_RUN}}})", "{{run}}"))
    )


def _timeseries(title: str, description: str) -> timeseries.Panel:
    legend = (
        common_builders.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
    )
    tooltip = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    return (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(_DATASOURCE)
        .height(7)
        .legend(legend)
        .tooltip(tooltip)
    )


def _query(expression: str, legend: str, *, ref_id: str = "A") -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(ref_id)


def _rate(metric: str) -> str:
    return f"max by (run) (rate({metric}{{{_RUN}}}[$__rate_interval]))"


def _increase(metric: str, *, by: str = "run") -> str:
    return f"max by ({by}) (increase({metric}{{{_RUN}}}[$__rate_interval]))"


def render() -> str:
    """Return the dashboard as JSON text, the same for the same SDK version."""
    return JSONEncoder(sort_keys=True, indent=2).encode(build()) + "\n"


def main() -> int:
    """Write the file."""
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
