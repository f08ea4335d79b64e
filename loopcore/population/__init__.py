"""Many runs of one shape trained as one batch: seeds, learning rates, weight decays and scaling rules side by side.

    population = Population([spec_of_seed_0, spec_of_seed_1, ...])
    while not population.finished:
        population.advance()
    [member.figures() for member in population.members]

`layout` says where parameters lie, `members` is a run that gave its storage away, `forward` the model with a member axis,
`optimizer` AdamW with hyperparameters by member, `population` the whole, `calibration` whether it is worth it here.
"""

from __future__ import annotations

from loopcore.population.calibration import PackTimes, faster_packed
from loopcore.population.members import Member
from loopcore.population.population import Population

__all__ = ["Member", "PackTimes", "Population", "faster_packed"]
