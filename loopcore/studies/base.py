"""What a study is: cells to run, probes of each, and arithmetic that turns what they measured into verdicts.

A study is data. `Study.cells` says what work a scale needs; whoever runs it (a queue, a notebook) trains each cell, makes its
probes, and hands the measurements to `Study.summarize`, which computes and never runs anything. Cells of different studies
that are the same work have the same name and the same key, so that a population trained once serves every study.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, model_validator

from loopcore.errors import InputError, UnknownGroup
from loopcore.specs import ProbeSpec, ResourceSpec, Spec, TrainSpec
from loopcore.specs.task import group_order
from loopcore.studies.verdicts import Estimate, Verdict

if TYPE_CHECKING:
    from loopcore.studies.measured import Measured

__all__ = ["MOST_SEEDS", "SCALES", "Ask", "Cell", "Claim", "Finding", "ProbeRequest", "Scale", "Study", "cell_keys", "merged"]

Scale = Literal["smoke", "cpu", "gpu"]
SCALES: tuple[Scale, ...] = get_args(Scale)
MOST_SEEDS = 64  # of one cell; the published populations have 16

AxisValue = str | int | float | bool


class ProbeRequest(Spec):
    """A probe of a cell: a `ProbeSpec` whose job is not known yet."""

    name: str
    """The same name asks for the same measurements, in every study."""
    content: dict[str, Any]
    """The fields of `ProbeSpec` that are not at their default, without `job`, as JSON has them (lists, no tuples)."""

    @model_validator(mode="after")
    def _is_a_probe(self) -> ProbeRequest:
        self.spec(job=1)
        return self

    def spec(self, job: int) -> ProbeSpec:
        """The probe of the run of `train` job number `job`."""
        return ProbeSpec.model_validate({**self.content, "job": job})


class Cell(Spec):
    """One training run of a study, with what is measured on it."""

    name: str
    """Unique in its plan, and the same wherever the same work is asked for."""
    train: TrainSpec
    start_from: str | None = None
    """The cell whose checkpoint this one starts from; the number of its job takes the place of `train.start_from`."""
    probes: tuple[ProbeRequest, ...] = ()
    axes: dict[str, AxisValue] = Field(default_factory=dict)
    """Where the run stands: family, group, length, demand, seed and what else tells it from others."""
    roles: tuple[str, ...] = ()
    """Studies that read it."""
    resources: ResourceSpec = ResourceSpec()
    """Of the training, and of all that share its process."""
    pack: int = 1
    """Most trainings in one process, as `TrainJob.pack`."""
    probe_resources: ResourceSpec | None = None
    """Of each probe; empty: the training's."""
    expected_s: float | None = None
    """CPU seconds of one thread that the training takes, from RECIPES.md; None where nobody measured it."""

    @model_validator(mode="after")
    def _job_comes_later(self) -> Cell:
        if self.train.start_from is not None:
            raise ValueError("a cell names the cell it starts from in start_from; train.start_from is a job, known only later")
        return self

    @property
    def seed(self) -> int:
        return self.train.seed


def cell_keys(cells: Iterable[Cell]) -> dict[str, str]:
    """Cell name to the digest (hex) of the work it is: its resolved spec and, of a warm start, that of where it starts.

    Parents stand before their children.
    """
    keys: dict[str, str] = {}
    for cell in cells:
        parent = None if cell.start_from is None else keys[cell.start_from]
        text = json.dumps({"train": cell.train.digest(), "start_from": parent}, sort_keys=True)
        keys[cell.name] = hashlib.sha256(text.encode()).hexdigest()
    return keys


def merged(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Each piece of work once, with all of its probes and roles, parents before their children."""
    found: dict[str, Cell] = {}
    for cell in cells:
        known = found.get(cell.name)
        if known is None:
            assert cell.start_from is None or cell.start_from in found, f"{cell.name} stands before {cell.start_from}"
            found[cell.name] = cell
            continue
        assert (known.train, known.start_from, known.axes) == (cell.train, cell.start_from, cell.axes), (
            f"two kinds of work are called {cell.name}"
        )
        probes = {probe.name: probe for probe in known.probes}
        for probe in cell.probes:
            assert probes.setdefault(probe.name, probe) == probe, f"two probes of {cell.name} are called {probe.name}"
        roles = tuple(dict.fromkeys((*known.roles, *cell.roles)))
        found[cell.name] = known.model_copy(update={"probes": tuple(probes.values()), "roles": roles})
    return tuple(found.values())


@dataclass(frozen=True)
class Ask:
    """What a user asked of a study, checked. None: the study's own choice for the scale."""

    scale: Scale
    seeds: int | None = None
    groups: tuple[str, ...] | None = None
    demands: tuple[float, ...] | None = None

    def seed_range(self, smoke: int = 1, cpu: int = 3, gpu: int = 16) -> range:
        """Seeds of a cell: as many as were asked for, else the scale's own number."""
        return range(self.seeds or {"smoke": smoke, "cpu": cpu, "gpu": gpu}[self.scale])

    def groups_or(self, smoke: Sequence[str], cpu: Sequence[str], gpu: Sequence[str]) -> tuple[str, ...]:
        return self.groups or tuple({"smoke": smoke, "cpu": cpu, "gpu": gpu}[self.scale])


@dataclass(frozen=True)
class Claim:
    """One row of the table in PAPERS.md, and what it takes to show it."""

    id: str
    title: str
    statement: str
    published: str
    """The published figures, with their source marks."""
    unit: str
    """Of the figure measured here."""
    rule: str
    """When the verdict is `shown`; written down before anything ran."""

    def finding(
        self,
        verdict: Verdict,
        reason: str,
        *,
        estimate: Estimate | None = None,
        seeds: int = 0,
        seconds: float = 0.0,
        detail: Mapping[str, Any] | None = None,
    ) -> Finding:
        """The finding of this claim; `reason` says in one or two sentences what was seen."""
        return Finding(
            id=self.id,
            title=self.title,
            measured=None if estimate is None else estimate.value,
            low=None if estimate is None else estimate.low,
            high=None if estimate is None else estimate.high,
            unit=self.unit,
            published=self.published,
            verdict=verdict,
            reason=reason,
            seeds=seeds,
            seconds=seconds,
            detail={"statement": self.statement, "rule": self.rule, **(detail or {})},
        )


@dataclass(frozen=True)
class Finding:
    """What a study says about one claim."""

    id: str
    """As in PAPERS.md: `1a` to `6`."""
    title: str
    measured: float | None
    low: float | None
    high: float | None
    unit: str
    published: str
    verdict: Verdict
    reason: str
    seeds: int
    """Different seeds behind the figure."""
    seconds: float
    """Seconds of all jobs behind it, those that gave no figure too; what studies share counts in each."""
    detail: dict[str, Any] = field(default_factory=dict)
    """`plots` (see `drawings`), `rows` (one a run), and what else explains the figure."""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data: what is no number is None."""
        return plain(self)


def plain(value: Any) -> Any:
    """JSON-compatible data of dataclasses, sequences and numbers; NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, Verdict):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    assert value is None or isinstance(value, str | int), f"no JSON of {type(value).__name__}"
    return value


@dataclass(frozen=True)
class Study:
    """A named set of claims, the work that decides them, and the arithmetic."""

    name: str
    title: str
    claims: tuple[Claim, ...]
    work: Callable[[Ask], Iterable[Cell]]
    """Cells of a checked ask, before equal ones are put together."""
    summary: Callable[[Measured], list[Finding]]
    takes_groups: bool = True
    """Whether a user may choose the groups; a claim about A5 is about A5."""
    takes_demands: bool = False

    def cells(
        self,
        scale: str,
        seeds: int | None = None,
        groups: Sequence[str] | None = None,
        demands: Sequence[float] | None = None,
    ) -> tuple[Cell, ...]:
        """The work, each piece once, parents before their children. The same ask gives the same cells, names and keys.

        Raises InputError for an unknown scale or group, for counts that cannot be, for choices that the study does not offer, and
        for a demand that no loop count meets.
        """
        return merged(self.work(self._checked(scale, seeds, groups, demands)))

    def summarize(self, measured: Measured) -> list[Finding]:
        """A finding a claim, in their order, from whatever is there."""
        found = self.summary(measured)
        assert [finding.id for finding in found] == [claim.id for claim in self.claims]
        return found

    def _checked(self, scale: str, seeds: int | None, groups: Sequence[str] | None, demands: Sequence[float] | None) -> Ask:
        known: Scale | None = next((one for one in SCALES if one == scale), None)
        if known is None:
            raise InputError(f"expected a scale of {', '.join(SCALES)}, got {scale!r}")
        if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
            raise InputError(f"expected 1 to {MOST_SEEDS} seeds, got {seeds}")
        if groups is not None:
            if not self.takes_groups:
                raise InputError(f"the study {self.name} is about groups of its own; leave the groups out")
            _distinct("groups", groups)
            for group in groups:
                try:
                    group_order(group)
                except ValueError as problem:
                    raise UnknownGroup(str(problem)) from None
        if demands is not None:
            if not self.takes_demands:
                raise InputError(f"the study {self.name} has demands of its own; leave the demands out")
            _distinct("demands", demands)
        return Ask(known, seeds, None if groups is None else tuple(groups), None if demands is None else tuple(demands))


def _distinct(what: str, values: Sequence[Any]) -> None:
    if not values or len(set(values)) < len(values):
        raise InputError(f"expected at least one of the {what} and each once, got {list(values)}")
