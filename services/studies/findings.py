"""Every published finding that a study is about, with the newest verdict that this registry has on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopcore.errors import InputError
from loopcore.studies import INSIDE_THE_LOOP, Finding, find_study, study_names
from services.registry import Study
from services.studies.report import CURVE, findings_of

if TYPE_CHECKING:
    from services.registry import MemoryRegistry, Registry

__all__ = ["KnownFinding", "known_findings"]

LOOKED_AT = 200  # newest studies in which a verdict is looked for


@dataclass(frozen=True)
class KnownFinding:
    """A finding, the study that is about it, and what the study started last says."""

    id: str
    title: str
    study: str
    statement: str
    published: str
    unit: str
    started: int | None
    """The number of the study that the rest is from; empty where none was started."""
    scale: str | None
    verdict: str | None
    measured: float | None
    low: float | None
    high: float | None
    seeds: int | None


def known_findings(registry: Registry | MemoryRegistry) -> list[KnownFinding]:
    """All findings in the order of their studies."""
    started = sorted(registry.studies.studies(limit=LOOKED_AT), key=lambda study: -study.started_at)
    said = _said(registry, started)
    found: list[KnownFinding] = []
    for name in study_names():
        if name == INSIDE_THE_LOOP.name:  # the sum of others
            continue
        for claim in find_study(name).claims:
            study, finding = said.get(claim.id, (None, None))
            found.append(
                KnownFinding(
                    id=claim.id,
                    title=claim.title,
                    study=name,
                    statement=claim.statement,
                    published=claim.published,
                    unit=claim.unit,
                    started=study.id if study else None,
                    scale=study.scale if study else None,
                    verdict=finding.verdict.value if finding else None,
                    measured=finding.measured if finding else None,
                    low=finding.low if finding else None,
                    high=finding.high if finding else None,
                    seeds=finding.seeds if finding else None,
                )
            )
    return found


def _said(registry: Registry | MemoryRegistry, started: Sequence[Study]) -> dict[str, tuple[Study, Finding]]:
    """Finding to what the newest study says of it: only studies that add something are worked out."""
    said: dict[str, tuple[Study, Finding]] = {}
    for study in started:
        try:
            claims = find_study(study.name).claims
            if all(claim.id in said for claim in claims):
                continue
            findings = findings_of(study, registry.studies.works(study.id, curve=CURVE))
        except InputError:  # a study of a package that is not installed any more, or asked in a way it no longer takes
            continue
        for finding in findings:
            said.setdefault(finding.id, (study, finding))
    return said
