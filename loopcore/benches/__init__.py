"""Timing of this code against what one would do without it: `loop bench NAME`. Never a test: timing decides nothing here.

A ratio is taken pair by pair: both sides do equal work in turns within one run, so that what else the machine does meets both.
"""

from loopcore.benches.figures import BenchAsk, Figure, machine

__all__ = ["BenchAsk", "Figure", "machine"]
