"""Finite groups, built from generators: cyclic Z_m, dihedral D_m (2m elements), S_m, A_m, and direct products such as A4xZ5.

Every group is a permutation group, so one closure builds them all. A product g h means g first, then h, as in a word read from
left to right. Shapes: G elements, X points.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from loopcore.errors import UnknownGroup, UnknownSymbol
from loopcore.specs.task import group_order

__all__ = ["Group", "Permutation", "closure", "cycles", "finite_group", "then"]

Permutation = tuple[int, ...]
"""Image of each of the points 0 .. X-1."""

IDENTITY = "e"
SHOWN = 12  # symbols an error message lists before it says how many more there are
CYCLES = re.compile(r"(?:\([0-9]{1,3}(?:,[0-9]{1,3})*\))+")


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """A finite group. An element is its number, 0 .. order - 1, and 0 is the identity. Its tensors are not to be written to."""

    name: str
    table_GG: Tensor
    """int64: table[g, h] = g h."""
    inverse_G: Tensor
    """int64: inverse[g] g = 0."""
    symbols: tuple[str, ...]
    """One symbol an element, without spaces, as a person types it: cycles such as (1,2)(3,4); 0 .. m-1 for Z_m; e, r, r2, s,
    sr, sr2 for D_3; parts joined by | for a product."""
    read: Callable[[str], str] = str
    """Brings another way to write an element into the form of `symbols`; ValueError where it cannot."""

    identity: ClassVar[int] = 0

    def __repr__(self) -> str:
        return f"Group({self.name!r}, order={self.order})"

    @property
    def order(self) -> int:
        return len(self.symbols)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {symbol: g for g, symbol in enumerate(self.symbols)}

    def parse(self, symbol: str) -> int:
        """The element that `symbol` stands for: one of `symbols`, cycles written from any of their points, or a number below the
        order. Raises UnknownSymbol, which lists what was expected."""
        try:
            if (g := self._numbers.get(self.read(symbol))) is not None:
                return g
        except ValueError:
            pass
        if re.fullmatch("[0-9]{1,6}", symbol) and int(symbol) < self.order:
            return int(symbol)
        shown = symbol if len(symbol) <= 40 else f"{symbol[:37]}..."
        more = f" and {self.order - SHOWN} more" if self.order > SHOWN else ""
        numbers = "" if self.symbols[-1] == str(self.order - 1) else f", or a number from 0 to {self.order - 1}"
        raise UnknownSymbol(
            f"{shown!r} is no element of {self.name}; expected one of {' '.join(self.symbols[:SHOWN])}{more}{numbers}"
        )


class _Factor(NamedTuple):
    """One group of a product, on points of its own."""

    generators: tuple[Permutation, ...]
    points: int
    write: Callable[[Permutation], str]
    read: Callable[[str], str]
    """Brings what a person typed into the form that `write` gives; ValueError where it cannot."""


def then(g: Permutation, h: Permutation) -> Permutation:
    """The permutation g h: g first, then h."""
    return tuple(h[x] for x in g)


def closure(generators: Sequence[Permutation], points: int) -> list[Permutation]:
    """Every product of `generators`, in lexicographic order, so that the identity comes first whatever the generators are."""
    identity = tuple(range(points))
    found, newest = {identity}, [identity]
    while newest:
        newest = list({then(g, s) for g in newest for s in generators} - found)
        found.update(newest)
    return sorted(found)


def cycles(g: Permutation) -> str:
    """Disjoint cycles with points counted from 1, each from its smallest point, fixed points left out; e for the identity."""
    written, seen = [], set()
    for start in range(len(g)):
        cycle, x = [], start
        while x not in seen:
            seen.add(x)
            cycle.append(x + 1)
            x = g[x]
        if len(cycle) > 1:
            written.append(f"({','.join(map(str, cycle))})")
    return "".join(written) or IDENTITY


@functools.cache
def finite_group(name: str) -> Group:
    """The group called `name`, built once a process. Raises UnknownGroup for a name that is none, and above 5040 elements."""
    try:
        order = group_order(name)
    except ValueError as problem:
        raise UnknownGroup(str(problem)) from None
    factors = [_factor(part[0], int(part[1:])) for part in name.split("x")]
    points = sum(factor.points for factor in factors)
    spans, generators, first = [], [], 0
    for factor in factors:
        spans.append((first, first + factor.points))
        before, after = range(first), range(first + factor.points, points)
        generators.extend((*before, *(first + x for x in s), *after) for s in factor.generators)
        first += factor.points
    elements = closure(generators, points)
    assert len(elements) == order, f"{name}: {len(elements)} elements, expected {order}"

    def write(g: Permutation) -> str:
        parts = (factor.write(tuple(x - a for x in g[a:b])) for factor, (a, b) in zip(factors, spans, strict=True))
        return "|".join(parts)

    def read(text: str) -> str:
        return "|".join(factor.read(part) for factor, part in zip(factors, text.split("|"), strict=True))

    table_GG = _table(elements, generators)
    inverse_G = (table_GG == 0).int().argmax(dim=1)
    return Group(name, table_GG, inverse_G, tuple(map(write, elements)), read)


def _table(elements: list[Permutation], generators: list[Permutation]) -> Tensor:
    """g h for all g at once: every h is an earlier element times a generator, and g (h s) = (g h) s."""
    number = {g: index for index, g in enumerate(elements)}
    by_generator = [torch.tensor([number[then(g, s)] for g in elements]) for s in generators]
    transposed_GG = torch.empty(len(elements), len(elements), dtype=torch.long)  # row h is written as one piece
    transposed_GG[0] = torch.arange(len(elements))
    reached, waiting = {0}, [0]
    for h in waiting:
        for times_s_G in by_generator:
            if (hs := int(times_s_G[h])) not in reached:
                torch.index_select(times_s_G, 0, transposed_GG[h], out=transposed_GG[hs])
                reached.add(hs)
                waiting.append(hs)
    return transposed_GG.T.contiguous()


def _factor(family: str, m: int) -> _Factor:
    turn = tuple((x + 1) % m for x in range(m))
    if family == "Z":
        return _Factor((turn,), m, lambda g: str(g[0]), str)
    if family == "D":
        # Two more points, swapped by every reflection, keep D1 and D2 faithful; first, so that rotations are sorted first.
        rotation = (0, 1, *(x + 2 for x in turn))
        reflection = (1, 0, *((-x) % m + 2 for x in range(m)))
        return _Factor((rotation, reflection), m + 2, _dihedral, str)
    if family == "S":
        swap = _permutation([(0, 1)] if m > 1 else [], m)
        return _Factor((swap, turn), m, cycles, functools.partial(_read_cycles, points=m))
    threes = tuple(_permutation([(0, 1, x)], m) for x in range(2, m))
    return _Factor(threes, m, cycles, functools.partial(_read_cycles, points=m))


def _dihedral(g: Permutation) -> str:
    """r^k or s r^k: s keeps point 0, so that either sends it to k."""
    k = g[2] - 2
    written = ("s" if g[0] == 1 else "") + ("" if k == 0 else "r" if k == 1 else f"r{k}")
    return written or IDENTITY


def _permutation(parts: Sequence[Sequence[int]], points: int) -> Permutation:
    image = list(range(points))
    for cycle in parts:
        for x, y in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            image[x] = y
    return tuple(image)


def _read_cycles(text: str, *, points: int) -> str:
    if text in (IDENTITY, "()"):
        return IDENTITY
    if not CYCLES.fullmatch(text):
        raise ValueError(text)
    parts = [[int(x) - 1 for x in part.split(",")] for part in text[1:-1].split(")(")]
    moved = [x for part in parts for x in part]
    if len(set(moved)) != len(moved) or not all(0 <= x < points for x in moved):
        raise ValueError(text)
    return cycles(_permutation(parts, points))
