"""Finite groups: the axioms on random elements, and orders, classes and centres against sympy and by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.combinatorics.named_groups import AlternatingGroup, CyclicGroup, DihedralGroup, SymmetricGroup
from sympy.combinatorics.perm_groups import PermutationGroup
from sympy.combinatorics.permutations import Permutation

from loopcore.errors import UnknownGroup, UnknownSymbol
from loopcore.specs.task import group_order
from loopcore.tasks import Group, finite_group
from loopcore.tasks.groups import closure, cycles, then

NAMES = [
    "Z1",
    "Z2",
    "Z12",
    "Z60",
    "D1",
    "D2",
    "D3",
    "D8",
    "S1",
    "S2",
    "S3",
    "S4",
    "S5",
    "A1",
    "A3",
    "A4",
    "A5",
    "A4xZ5",
    "Z2xZ2xZ3",
]

# Order and number of conjugacy classes, from the theory: Z_m has m classes, S_m as many as m has partitions, D_m (m + 3) / 2
# for odd m and m / 2 + 3 for even m, A4 has 4, A5 has 5, and a product the product of both.
KNOWN = {
    "Z60": (60, 60),
    "D2": (4, 4),
    "D3": (6, 3),
    "D8": (16, 7),
    "D9": (18, 6),
    "S3": (6, 3),
    "S4": (24, 5),
    "S5": (120, 7),
    "S6": (720, 11),
    "A4": (12, 4),
    "A5": (60, 5),
    "A4xZ5": (60, 20),
    "S3xD4": (48, 15),
    "Z2xZ2xZ3": (12, 12),
}


def element_orders(group: Group) -> Counter[int]:
    """How many elements have which order, by powers in the table."""
    found: Counter[int] = Counter()
    for g in range(group.order):
        power, order = g, 1
        while power != group.identity:
            power, order = int(group.table_GG[power, g]), order + 1
        found[order] += 1
    return found


def class_sizes(group: Group) -> list[int]:
    """Sizes of the conjugacy classes {g^-1 x g}."""
    classes = set()
    for x in range(group.order):
        gx_G = group.table_GG[group.inverse_G, x]
        classes.add(frozenset(group.table_GG[gx_G, torch.arange(group.order)].tolist()))
    return sorted(map(len, classes))


def centre(group: Group) -> int:
    return int((group.table_GG == group.table_GG.T).all(dim=1).sum())


def sympy_group(name: str) -> PermutationGroup:
    family, m = name[0], int(name[1:])
    return {"Z": CyclicGroup, "D": DihedralGroup, "S": SymmetricGroup, "A": AlternatingGroup}[family](m)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_axioms(name: str, data: st.DataObject) -> None:
    group = finite_group(name)
    a, b, c = (data.draw(st.integers(0, group.order - 1)) for _ in range(3))
    times = group.table_GG
    assert 0 <= int(times[a, b]) < group.order
    assert times[times[a, b], c] == times[a, times[b, c]]
    assert times[a, group.identity] == times[group.identity, a] == a
    assert times[a, group.inverse_G[a]] == times[group.inverse_G[a], a] == group.identity


@pytest.mark.parametrize("name", NAMES)
def test_a_row_and_a_column_hold_every_element_once(name: str) -> None:
    group = finite_group(name)
    everything = torch.arange(group.order)
    assert torch.equal(group.table_GG.sort(dim=1).values, everything.expand(group.order, -1))
    assert torch.equal(group.table_GG.sort(dim=0).values, everything[:, None].expand(-1, group.order))
    assert group.table_GG.dtype == group.inverse_G.dtype == torch.long


@pytest.mark.parametrize(("name", "order", "classes"), [(name, *known) for name, known in KNOWN.items()])
def test_order_and_number_of_classes_are_those_of_the_theory(name: str, order: int, classes: int) -> None:
    group = finite_group(name)
    assert group.order == group_order(name) == len(group.table_GG) == order
    assert len(class_sizes(group)) == classes


@pytest.mark.parametrize("name", ["Z1", "Z2", "Z12", "D3", "D4", "D7", "D10", "S3", "S4", "S5", "A3", "A4", "A5", "A6"])
def test_agrees_with_sympy(name: str) -> None:
    group, other = finite_group(name), sympy_group(name)
    assert group.order == other.order()
    assert element_orders(group) == Counter(int(element.order()) for element in other.elements)
    assert centre(group) == other.center().order()
    assert class_sizes(group) == sorted(len(found) for found in other.conjugacy_classes())
    assert bool((group.table_GG == group.table_GG.T).all()) == other.is_abelian


def test_every_product_in_s4_is_sympys() -> None:
    """sympy multiplies from left to right too: (p * q)(x) = q(p(x))."""
    group = finite_group("S4")

    def element(symbol: str) -> Permutation:
        parts = [] if symbol == "e" else [[int(x) - 1 for x in part.split(",")] for part in symbol[1:-1].split(")(")]
        return Permutation(parts, size=4)

    elements = [element(symbol) for symbol in group.symbols]
    number = {p: g for g, p in enumerate(elements)}
    for g, p in enumerate(elements):
        assert group.table_GG[g].tolist() == [number[p * q] for q in elements]
        assert int(group.inverse_G[g]) == number[p**-1]


@pytest.mark.parametrize(
    ("name", "word", "product"),
    [
        ("S3", "(1,2) (2,3)", "(1,3,2)"),  # 1 to 2 to 3, 2 to 1, 3 to 2
        ("S3", "(2,3) (1,2)", "(1,2,3)"),
        ("S4", "(1,2,3,4) (1,2,3,4)", "(1,3)(2,4)"),
        ("A4", "(1,2,3) (1,2)(3,4)", "(2,4,3)"),  # 1 to 2 to 1; 2 to 3 to 4; 3 to 1 to 2; 4 to 3
        ("Z60", "45 30", "15"),
        ("D4", "s r s r", "e"),  # a reflection turns a rotation round
        ("D4", "r s", "sr3"),
        ("D4", "r2 r3", "r"),
        ("D1", "s s", "e"),
        ("D2", "r s", "sr"),
        ("A4xZ5", "(1,2,3)|2 (1,3,2)|4", "e|1"),
    ],
)
def test_products_by_hand(name: str, word: str, product: str) -> None:
    group = finite_group(name)
    g = group.identity
    for symbol in word.split():
        g = int(group.table_GG[g, group.parse(symbol)])
    assert group.symbols[g] == product


@pytest.mark.parametrize("name", NAMES)
def test_a_symbol_is_read_back_and_so_is_a_number(name: str) -> None:
    group = finite_group(name)
    assert len(set(group.symbols)) == group.order
    assert not any(" " in symbol for symbol in group.symbols)
    assert [group.parse(symbol) for symbol in group.symbols] == list(range(group.order))
    assert [group.parse(str(g)) for g in range(group.order)] == list(range(group.order))


def test_cycles_may_start_anywhere_and_stand_in_any_order() -> None:
    s4 = finite_group("S4")
    assert s4.symbols[s4.parse("(4,3)(2,1)")] == "(1,2)(3,4)"
    assert s4.symbols[s4.parse("(3,1,2)")] == "(1,2,3)"
    assert s4.parse("()") == s4.parse("e") == s4.parse("(2)") == s4.identity
    product = finite_group("A4xZ5")
    assert product.parse("(3,1,2)|4") == product.parse("(1,2,3)|4")


NO_ELEMENTS = {
    "S3": ["(1,4)", "(1,1)", "(1,2)(2,3)", "(0,1)", "6", "-1", "", "(1,2", "٣", "9" * 5000],
    "A4": ["(1,2)"],
    "Z60": ["60", "1.0"],
    "D4": ["r4", "rs"],
    "A4xZ5": ["(1,2,3)", "e|5", "e|1|1"],
}


@pytest.mark.parametrize(("name", "symbol"), [(name, symbol) for name, symbols in NO_ELEMENTS.items() for symbol in symbols])
def test_what_is_no_element(name: str, symbol: str) -> None:
    with pytest.raises(UnknownSymbol, match=f"no element of {name}; expected one of") as raised:
        finite_group(name).parse(symbol)
    assert len(str(raised.value)) < 400


def test_the_message_lists_the_vocabulary() -> None:
    with pytest.raises(UnknownSymbol) as raised:
        finite_group("S3").parse("x")
    assert str(raised.value) == (
        "'x' is no element of S3; expected one of e (2,3) (1,2) (1,2,3) (1,3,2) (1,3), or a number from 0 to 5"
    )
    with pytest.raises(UnknownSymbol, match=r"0 1 2 3 4 5 6 7 8 9 10 11 and 48 more$"):
        finite_group("Z60").parse("x")


@pytest.mark.parametrize("name", ["", "Q8", "Z0", "S03", "z3", "S3x", "xS3", "S3 x Z2", "S-1", "S٣", "Z1000"])
def test_no_such_group(name: str) -> None:
    with pytest.raises(UnknownGroup, match="expected a group such as Z60, D4, S3, A5"):
        finite_group(name)


@pytest.mark.parametrize("name", ["S8", "A8", "S999xS999", "Z999xZ6", "S7xZ2"])
def test_a_group_that_is_too_large(name: str) -> None:
    with pytest.raises(UnknownGroup, match=f"at most 5040 elements, {name} has more; choose a smaller one"):
        finite_group(name)


def test_the_largest_group_is_built() -> None:
    s7 = finite_group("S7")
    assert s7.order == 5040
    g, h = s7.parse("(1,2,3,4,5,6,7)"), s7.parse("(1,2)")
    assert s7.symbols[int(s7.table_GG[g, h])] == "(2,3,4,5,6,7)"  # 1 to 2 to 1; 2 to 3; ...; 7 to 1 to 2


def test_a_group_is_built_once() -> None:
    assert finite_group("S4") is finite_group("S4")


def test_closure_and_cycles_by_hand() -> None:
    quarter = (1, 2, 3, 0)
    assert closure([quarter], 4) == [(0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)]
    assert closure([], 3) == [(0, 1, 2)]
    assert then((1, 0, 2), (0, 2, 1)) == (2, 0, 1)
    assert cycles((1, 0, 3, 2)) == "(1,2)(3,4)"
    assert cycles((0, 1, 2)) == "e"
