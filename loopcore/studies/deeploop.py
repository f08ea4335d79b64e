"""DeepLoop (arXiv 2607.13491): residual scaling of looped models, from one step at initialisation to losses."""

from __future__ import annotations

from loopcore.studies.base import Finding, Study
from loopcore.studies.deeploop_cells import NAME, cells
from loopcore.studies.deeploop_kappa import ALIGNED, BOUND, kappa_findings
from loopcore.studies.deeploop_one_step import CONTROLS, ONE_STEP, one_step_findings
from loopcore.studies.deeploop_runs import GAIN, NEUTRAL, SHARES, runs_findings
from loopcore.studies.deeploop_stream import STREAM, stream_findings
from loopcore.studies.measured import Measured

__all__ = ["DEEPLOOP"]

CLAIMS = (ONE_STEP, CONTROLS, ALIGNED, BOUND, STREAM, SHARES, NEUTRAL, GAIN)


def summary(measured: Measured) -> list[Finding]:
    return [
        *one_step_findings(measured),
        *kappa_findings(measured),
        *stream_findings(measured),
        *runs_findings(measured),
    ]


DEEPLOOP = Study(NAME, "DeepLoop: scaling rules under the microscope", CLAIMS, cells, summary, takes_groups=False)
