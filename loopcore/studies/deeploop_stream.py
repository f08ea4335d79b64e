"""D5: how far the residual stream goes at initialisation, over visits and over loops (nearest text: arXiv 2606.18524)."""

from __future__ import annotations

from typing import Any

from loopcore.studies.base import Claim, Finding
from loopcore.studies.deeploop_cells import NAME, RULES
from loopcore.studies.deeploop_shared import NEAR, absent, by_loops, less, mean_series, seconds_of, slope
from loopcore.studies.drawings import XY
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, judge, mean_of

__all__ = ["STREAM", "stream_findings"]

STREAM = Claim(
    id="D5",
    title="Growth of the residual stream",
    statement="At initialisation distinct layers add nearly uncorrelated increments (norm ~ sqrt(L)), a shared one correlated "
    "ones (norm ~ T): (L T)^(-1/2) over-counts loops, 1/(T sqrt(L)) does not.",
    published="1/2 and 1 [A]; .59-.60 and 1.06-1.08 over 32 visits, final norm .52 and .001 at T^(-1/2) and 1/T [M]",
    unit="exponent less the predicted one: the farthest of the four",
    rule=f"the 95 % intervals of four exponents lie within {NEAR}: over visits 1 shared and 1/2 distinct under standard scaling, "
    "of the stream's end over T 1/2 under depth_mup and 0 under loop_mup, shared",
)

# Rule, tied, what is fitted, and the exponent predicted; the first four carry the verdict.
GROWTHS: tuple[tuple[str, bool, str, float | None], ...] = (
    ("standard", True, "visits", 1.0),
    ("standard", False, "visits", 0.5),
    ("depth_mup", True, "loops", 0.5),
    ("loop_mup", True, "loops", 0.0),
    ("standard", True, "loops", None),
    *((rule, tied, "loops", None) for rule in ("deepnorm", "deeploop") for tied in (True, False)),
)


def stream_findings(measured: Measured) -> list[Finding]:
    runs = measured.runs(NAME, family="loops")
    return [_stream([run for run in runs if any("growth" in probe.name for probe in run.cell.probes)])]


def _stream(runs: list[Run]) -> Finding:
    parts: list[Verdict] = []
    off: list[Estimate] = []
    samples: list[Sample] = []
    rows: list[dict[str, Any]] = []
    for rule, tied, along, predicted in GROWTHS:
        own = [run for run in runs if run.axes["rule"] == rule]
        found = sample(own, lambda run, tied=tied, along=along: _grows(run, tied, along))
        samples.append(found)
        mean = mean_of(found.estimates) if found.used else None
        if predicted is not None:
            gap = None if mean is None else less(mean, predicted)
            off += [] if gap is None else [gap]
            parts.append(judge(gap, -NEAR, NEAR))
        rows.append(
            {"rule": rule, "weights": "shared" if tied else "distinct", "over": along, "predicted": predicted}
            | {"exponent": mean and mean.value, "low": mean and mean.low, "high": mean and mean.high, "seeds": found.seeds}
        )
    spoken = [_spoken(row) for row in rows]
    return STREAM.finding(
        all_of(parts),
        f"Exponents: {'; '.join(spoken)}.{absent(samples)}",
        estimate=max(off, key=lambda one: abs(one.value), default=None),
        seeds=min((found.seeds for found in samples if found.used), default=0),
        seconds=seconds_of(samples),
        detail={"exponents": rows, "plots": _stream_plots(runs)},
    )


def _grows(run: Run, tied: bool, along: str) -> Estimate:
    if along == "visits":
        return Estimate(run.figure("growth", of="exponent", tied=tied).value)
    return slope(run.over_loops("growth", of="final_displacement", tied=tied))


def _spoken(row: dict[str, Any]) -> str:
    found = "not measured" if row["exponent"] is None else str(Estimate(row["exponent"], row["low"], row["high"]))
    predicted = "" if row["predicted"] is None else f" for {row['predicted']:g}"
    return f"{row['rule']}, {row['weights']}, over {row['over']} {found}{predicted}"


def _stream_plots(runs: list[Run]) -> list[XY]:
    plots = []
    for tied in (True, False):
        series = []
        for rule in RULES:
            own = [run for run in runs if run.axes["rule"] == rule]
            if found := by_loops(own, "growth", of="final_displacement", tied=tied):
                series.append(mean_series(rule, found))
        if series:
            kind = "one shared block" if tied else "distinct blocks"
            plots.append(XY(f"Where the stream ends, {kind}", "loops T", "distance from its start", series, log=True))
    return plots
