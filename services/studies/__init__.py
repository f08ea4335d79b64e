"""Studies between their declaration (`loopcore.studies`) and the registry: from cells to jobs, and from rows to a report."""

from services.studies.findings import KnownFinding, known_findings
from services.studies.plan import plan
from services.studies.report import FindingReport, Report, report_of, trained_by_cell

__all__ = ["FindingReport", "KnownFinding", "Report", "known_findings", "plan", "report_of", "trained_by_cell"]
