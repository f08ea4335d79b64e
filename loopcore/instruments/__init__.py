"""What a trained looped model computes, and when: accuracy by loop, frontier, convergence times, damage cones, and what the end
of the loop shows (arXiv 2607.20594); and how a model scales with width, blocks and loops: kappa_R, growth of the residual stream,
one-step perturbation, coordinate check (arXiv 2607.13491, 2606.18524), and whether it trains at all.

correct = correct_by_loop(model, task, words=512, length=8, loops=12)
measure_frontier(correct).speed.v, measure_tau(correct).speed.v

sweep_kappa(spec, task, loops=(1, 2, 4, 8)).to_json()
"""

from loopcore.instruments.accuracy import AccuracyByLoop, correct_by_loop, exact_by_prefix, measure_accuracy
from loopcore.instruments.cones import ConeResult, fit_cone, measure_cones
from loopcore.instruments.coordinates import CoordinateCheck, activation_sizes, check_coordinates
from loopcore.instruments.damage import Damage, DamageMap, damage_maps
from loopcore.instruments.depth import Depth, DepthTable, sweep_depths
from loopcore.instruments.fits import PowerFit, fit_power
from loopcore.instruments.frontier import FrontierResult, fit_speed, frontier, measure_frontier
from loopcore.instruments.growth import GrowthCurve, GrowthResult, measure_growth, sweep_displacement, sweep_growth
from loopcore.instruments.kappa import Kappa, KappaResult, KappaSweep, implied_exponent, measure_kappa, sweep_kappa
from loopcore.instruments.perturbation import PerturbationResult, measure_step, predicted_exponent, sweep_perturbation
from loopcore.instruments.plateau import Plateau, measure_plateau
from loopcore.instruments.speed import Speed
from loopcore.instruments.tail import TAIL_METRICS, TailResult, jacobian_alignment, measure_tail
from loopcore.instruments.tau import TauResult, convergence_times, measure_tau, solved_words
from loopcore.instruments.visits import (
    Activation,
    Place,
    cross_entropy,
    run_visits,
    visit_copies,
    visit_gradients,
    watch_calls,
)

__all__ = [
    "TAIL_METRICS",
    "AccuracyByLoop",
    "Activation",
    "ConeResult",
    "CoordinateCheck",
    "Damage",
    "DamageMap",
    "Depth",
    "DepthTable",
    "FrontierResult",
    "GrowthCurve",
    "GrowthResult",
    "Kappa",
    "KappaResult",
    "KappaSweep",
    "PerturbationResult",
    "Place",
    "Plateau",
    "PowerFit",
    "Speed",
    "TailResult",
    "TauResult",
    "activation_sizes",
    "check_coordinates",
    "convergence_times",
    "correct_by_loop",
    "cross_entropy",
    "damage_maps",
    "exact_by_prefix",
    "fit_cone",
    "fit_power",
    "fit_speed",
    "frontier",
    "implied_exponent",
    "jacobian_alignment",
    "measure_accuracy",
    "measure_cones",
    "measure_frontier",
    "measure_growth",
    "measure_kappa",
    "measure_plateau",
    "measure_step",
    "measure_tail",
    "measure_tau",
    "predicted_exponent",
    "run_visits",
    "solved_words",
    "sweep_depths",
    "sweep_displacement",
    "sweep_growth",
    "sweep_kappa",
    "sweep_perturbation",
    "visit_copies",
    "visit_gradients",
    "watch_calls",
]
