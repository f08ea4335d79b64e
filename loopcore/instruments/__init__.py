"""What a trained looped model computes, and when: accuracy by loop, frontier, convergence times, damage cones, and what the end
of the loop shows (arXiv 2607.20594). Instruments of scaling are modules of their own beside these.

correct = correct_by_loop(model, task, words=512, length=8, loops=12)
measure_frontier(correct).speed.v, measure_tau(correct).speed.v
"""

from loopcore.instruments.accuracy import AccuracyByLoop, correct_by_loop, exact_by_prefix, measure_accuracy
from loopcore.instruments.cones import ConeResult, fit_cone, measure_cones
from loopcore.instruments.damage import Damage, DamageMap, damage_maps
from loopcore.instruments.frontier import FrontierResult, fit_speed, frontier, measure_frontier
from loopcore.instruments.speed import Speed
from loopcore.instruments.tail import TAIL_METRICS, TailResult, jacobian_alignment, measure_tail
from loopcore.instruments.tau import TauResult, convergence_times, measure_tau, solved_words

__all__ = [
    "TAIL_METRICS",
    "AccuracyByLoop",
    "ConeResult",
    "Damage",
    "DamageMap",
    "FrontierResult",
    "Speed",
    "TailResult",
    "TauResult",
    "convergence_times",
    "correct_by_loop",
    "damage_maps",
    "exact_by_prefix",
    "fit_cone",
    "fit_speed",
    "frontier",
    "jacobian_alignment",
    "measure_accuracy",
    "measure_cones",
    "measure_frontier",
    "measure_tail",
    "measure_tau",
    "solved_words",
]
