"""What a trained looped model computes, and when: accuracy by loop, frontier, convergence times (arXiv 2607.20594).

correct = correct_by_loop(model, task, words=512, length=8, loops=12)
measure_frontier(correct).speed.v, measure_tau(correct).speed.v
"""

from loopcore.instruments.accuracy import AccuracyByLoop, correct_by_loop, exact_by_prefix, measure_accuracy
from loopcore.instruments.frontier import FrontierResult, fit_speed, frontier, measure_frontier
from loopcore.instruments.speed import Speed
from loopcore.instruments.tau import TauResult, convergence_times, measure_tau, solved_words

__all__ = [
    "AccuracyByLoop",
    "FrontierResult",
    "Speed",
    "TauResult",
    "convergence_times",
    "correct_by_loop",
    "exact_by_prefix",
    "fit_speed",
    "frontier",
    "measure_accuracy",
    "measure_frontier",
    "measure_tau",
    "solved_words",
]
