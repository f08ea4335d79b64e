"""A report on made-up measurements: every finding of Inside the Loop, with everything that it can say."""

from __future__ import annotations

import math
from typing import Any

from loopcore.specs.probe import SPEED_LEVEL
from loopcore.studies import Cell, CellResult, Measured, Row, find_study
from tests.unit.made_up import SECONDS, accuracy_rows, result, speed_rows, tail_rows, tau_rows

WOBBLE = (1.0, 0.97, 1.02)  # of the speed, by seed


def come_to(cell: Cell) -> CellResult:
    """A run that goes as published: tied models serial, untied ones scanning, direct S5 stuck, late loops hurting."""
    train, family = cell.train, str(cell.axes["family"])
    length, loops, tied = train.contract.longest, int(train.contract.loops.loops(train.contract.longest)), train.model.tied
    v = length / loops * WOBBLE[cell.seed % len(WOBBLE)]
    accuracy = {"direct": 0.18, "untied": 0.99}.get(family, 1.0)
    rows = speed_rows(v, 0.02 * v, tau_mean=1.2 * v, tau_p90=1.03 * v, r2_frontier=0.97 + 0.01 * (cell.seed % 3), cone=1.1 * v)
    rows += tau_rows(cell, (lambda n: n / v) if tied else (lambda n: 1 + math.log2(n)))
    hard = int(cell.axes.get("hard", length))
    for words in sorted({length, math.ceil(1.25 * length), math.ceil(1.5 * length), 2 * length, 4 * length, hard}):
        best = math.ceil(words / v)

        def by_loop(t: int, best: int = best, words: int = words) -> float:
            solved = min(1.0, v * t / words)
            fall = 0.012 * max(0, t - 2 * best) if family != "extra" else 0.001 * max(0, t - 2 * best)
            return max(0.0, (solved - fall) * (accuracy if words == length else 0.9 ** (words / length - 1)))

        rows += accuracy_rows(words, math.ceil(3.5 * best) if tied else loops, by_loop)
    watched = math.ceil(1.5 * loops)
    rows += [
        Row("accuracy", {"of": "position", "loop": t, "position": i}, 1 / (1 + math.exp(-2.5 * (v * t - i))))
        for t in range(1, watched + 1)
        for i in range(length)
    ]
    rows += [Row("frontier", {"q": SPEED_LEVEL, "loop": t}, min(length, math.floor(v * t))) for t in range(1, watched + 1)]
    rows += [Row("cone_ratio", {"against": "tau_mean"}, 1.05, 1.01, 1.09)]
    rows += [Row("damage_onset", {"patched": p, "distance": d}, (d + 0.1 * (p % 2)) / v) for p in (1, 4, 7) for d in range(1, 5)]
    rows += tail_rows(one_step_skip=0.995, adjacent_cosine=0.99, asymptotic_alignment=0.98, jacobian_alignment=0.96)
    rows += [
        Row("schedules", {"schedule": kind, "of": "token", "loop": loops}, value, value - 0.02, value + 0.02)
        for kind, value in (("streaming", 0.8), ("all", 0.3))
    ]
    curve = [(step, accuracy * min(1.0, 0.1 + step / 1500 * (1 + 0.1 * cell.seed))) for step in range(0, 2001, 50)]
    found = result(cell, accuracy, rows, steps=9000 if not tied else 2000 + 100 * cell.seed)
    return CellResult(found.state, SECONDS, found.figures, {"held_out_token_accuracy": curve}, found.rows)


def report(study: str = "inside-the-loop", scale: str = "cpu", measured: bool = True, **ask: Any) -> dict[str, Any]:
    """The report of a study of which everything, or nothing, was measured."""
    found = find_study(study)
    cells = found.cells(scale, **ask)
    results = {cell.name: come_to(cell) for cell in cells} if measured else {}
    findings = [finding.to_json() for finding in found.summarize(Measured(cells, results))]
    return {
        "study": study,
        "id": 7,
        "scale": scale,
        "title": found.title,
        "asked": {"seeds": ask.get("seeds"), "groups": ask.get("groups"), "demands": ask.get("demands")},
        "created_at": "2026-11-30T09:12:44+00:00",
        "provenance": {
            "commit": "4f2e57d0c1",
            "platform": "Linux-6.1-x86_64",
            "python": "3.12.4",
            "packages": {"torch": "2.9.1", "numpy": "2.3.5", "matplotlib": "3.11.2"},
        },
        "command": f"loop study {study} --scale {scale}",
        "machine": "2 cores, 8 GiB, no GPU",
        "cost": {
            "jobs": len(cells),
            "succeeded": len(results),
            "failed": 0,
            "cancelled": 0,
            "waiting": len(cells) - len(results),
            "seconds": SECONDS * len(results),
        },
        "findings": findings,
    }
