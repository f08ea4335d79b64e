"""The recall convnet against a plain rendering of its definition, and the progressive loss against its own."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loopcore.errors import InputError, LengthError
from loopcore.instruments import correct_by_loop
from loopcore.instruments.damage import damage_maps
from loopcore.instruments.tail import measure_tail
from loopcore.model import LoopedTransformer
from loopcore.recall import RecallNet, progressive_draw, progressive_loss, scores_by_loop
from loopcore.scaling import Multipliers
from loopcore.specs import MazeTask, ModelSpec, ParityTask, PrefixSumTask, WordTask
from loopcore.tasks import Mazes, Parity, PrefixSums, WordProblem

BITS = Parity(ParityTask())
MAZES = Mazes(MazeTask(train_examples=20, held_out_examples=20))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def bits(size: int, length: int) -> tuple[Tensor, Tensor]:
    return BITS.random_batch(seed=0, split="train", index=0, size=size, length=length)


def numpy_conv(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[channels, *space] by [out, channels, 3, ...]: zeros beyond the edge, one output at a time."""
    space = x.shape[1:]
    padded = np.pad(x, [(0, 0)] + [(1, 1)] * len(space))
    out = np.zeros((len(weight), *space))
    for offset in itertools.product(range(3), repeat=len(space)):
        window = padded[(slice(None), *(slice(o, o + n) for o, n in zip(offset, space, strict=True)))]
        out += np.tensordot(weight[(slice(None), slice(None), *offset)], window, axes=1)
    return out


def by_definition(net: RecallNet, x: np.ndarray, loops: int) -> np.ndarray:
    """Logits [V, *space] of one raw input [C, *space]."""
    w = {name: weight.detach().double().numpy() for name, weight in net.named_parameters()}

    def relu(a: np.ndarray) -> np.ndarray:
        return np.maximum(a, 0.0)

    h = relu(numpy_conv(x, w["projection.weight"]))
    for _ in range(loops):
        h = numpy_conv(np.concatenate([h, x]), w["recall.weight"])
        h = relu(h) if x.ndim == 2 else h
        for block in "01":
            h = relu(h + numpy_conv(relu(numpy_conv(h, w[f"residual.{block}.0.weight"])), w[f"residual.{block}.1.weight"]))
    for part in "01":
        h = relu(numpy_conv(h, w[f"head.{part}.weight"]))
    return numpy_conv(h, w["head.2.weight"])


def test_one_dimension_by_definition() -> None:
    net = RecallNet.for_task(BITS, width=6, seed=3).double()
    tokens, _ = bits(3, 9)
    logits = net(tokens, 3)
    assert logits.shape == (3, 9, 2)
    for row, tokens_N in zip(logits, tokens.numpy(), strict=True):
        expected = by_definition(net, tokens_N[None] - 0.5, 3)
        assert row.detach().numpy() == pytest.approx(expected.T, rel=1e-9)


def test_two_dimensions_by_definition() -> None:
    net = RecallNet.for_task(MAZES, width=5, seed=3).double()
    tokens, _ = MAZES.random_batch(seed=0, split="train", index=0, size=2, length=7)
    logits = net(tokens, 2)
    assert logits.shape == (2, 49, 2)
    for row, tokens_N in zip(logits, tokens.numpy(), strict=True):
        side = tokens_N.reshape(7, 7)
        red, green, blue = (side == 1) | (side == 3), (side == 1) | (side == 2), side == 1  # white, green start, red end
        expected = by_definition(net, np.stack([red, green, blue]).astype(float), 2)
        assert row.detach().numpy() == pytest.approx(expected.reshape(2, 49).T, rel=1e-9)


def test_parameters_by_hand() -> None:
    def count(net: RecallNet) -> int:
        return sum(weight.numel() for weight in net.parameters())

    # Projection, recall, four of the residual blocks, head of D, D/2 and the classes.
    assert count(RecallNet.for_task(BITS, width=400)) == 3 * (400 + 401 * 400 + 4 * 400**2 + 400**2 + 400 * 200 + 200 * 2)
    assert count(RecallNet.for_task(MAZES, width=128)) == 9 * (3 * 128 + 131 * 128 + 4 * 128**2 + 128 * 32 + 32 * 8 + 8 * 2)


def test_weights_depend_on_the_seed_alone_and_have_torchs_scale() -> None:
    first, again, other = (RecallNet.for_task(BITS, width=64, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.recall.weight, other.recall.weight)  # type: ignore[arg-type]
    weight = first.residual[0][0].weight.detach()  # type: ignore[index]
    assert weight.abs().max() <= (3 * 64) ** -0.5
    assert weight.std().item() == pytest.approx((3 * 64) ** -0.5 / 3**0.5, rel=0.03)


def test_a_loop_reaches_five_positions_further() -> None:
    """In double precision and with weights above zero, so that no ReLU and no rounding stops what could spread."""
    net = RecallNet.for_task(BITS, width=8).double()
    tokens = torch.ones(1, 61, dtype=torch.long)
    flipped = tokens.clone()
    flipped[0, 30] ^= 1
    with torch.no_grad():
        for weight in net.parameters():
            weight.abs_()
        for t, (h, other) in enumerate(zip(net.iterate(tokens, 4), net.iterate(flipped, 4), strict=True)):
            changed = torch.nonzero((h != other).any(-1)[0]).flatten()
            reach = 1 + 5 * t
            assert changed.min() == 30 - reach
            assert changed.max() == 30 + reach


def test_the_surface_of_a_looped_model() -> None:
    net = RecallNet.for_task(BITS, width=8)
    tokens, _ = bits(4, 10)
    logits, states = net(tokens, 3, trace=True)
    assert len(states) == 4
    e = net.embed(tokens)
    assert e.shape == (4, 10, 1)
    h = net.start(e)
    for t in range(3):
        assert torch.equal(states[t], h)
        h = net.loop(h, e, t)
    assert h.shape == (4, 10, 8)
    assert torch.equal(logits, net.readout(h))
    assert torch.equal(logits, net(tokens, 3))
    assert net.position_free_of_loop
    with pytest.raises(InputError, match="at least 1 loop"):
        net(tokens, 0)
    with pytest.raises(LengthError, match="empty"):
        net(tokens[:, :0], 1)
    with pytest.raises(LengthError, match="is a square"):
        RecallNet.for_task(MAZES, width=8)(tokens, 1)
    with pytest.raises(InputError, match="channels for each token"):
        RecallNet(width=8, palette=((1.0,), (1.0, 2.0)), classes=2)
    words = RecallNet.for_task(WordProblem(WordTask(group="S3")), width=8)
    assert words.embed(torch.tensor([[2]])).tolist() == [[[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]]


def test_an_input_schedule_hides_what_is_not_shown_yet() -> None:
    net = RecallNet.for_task(BITS, width=8)
    tokens, _ = bits(1, 6)
    e = net.embed(tokens)
    assert net.revealed(e, 1, 2.0)[0, :, 0].tolist() == [*e[0, :4, 0].tolist(), 0.0, 0.0]
    shown = list(net.iterate(tokens, 6, reveal_per_loop=1))
    other = tokens.clone()
    other[0, 5] ^= 1
    assert torch.equal(shown[5], list(net.iterate(other, 6, reveal_per_loop=1))[5])
    assert not torch.equal(shown[6], list(net.iterate(other, 6, reveal_per_loop=1))[6])
    with pytest.raises(InputError, match="positive number"):
        net.iterate(tokens, 6, reveal_per_loop=0)


def test_instruments_take_it() -> None:
    net = RecallNet.for_task(BITS, width=8)
    assert correct_by_loop(net, BITS, words=6, length=9, loops=3).shape == (3, 6, 9)
    (damage,) = damage_maps(net, BITS, words=6, length=40, loops=2, positions=(20,), at=1, after=2)
    moved = torch.tensor(damage.map.moved_SN)
    assert [torch.nonzero(row).flatten().tolist() for row in moved[:2]] == [[20], list(range(15, 26))]
    tail = measure_tail(net, BITS, words=6, length=5, loops=3)
    assert tail.undecided == {}
    assert tail.exact_jacobian


def test_progressive_draws_are_uniform_in_their_ranges() -> None:
    stream = torch.Generator().manual_seed(0)
    drawn = collections.Counter(progressive_draw(3, stream) for _ in range(6000))
    # n = 0, 1, 2 each a third; then k in 1..3, 1..2, 1.
    expected = {(0, 1): 667, (0, 2): 667, (0, 3): 667, (1, 1): 1000, (1, 2): 1000, (2, 1): 2000}
    assert set(drawn) == set(expected)
    assert [drawn[key] for key in expected] == pytest.approx(list(expected.values()), abs=120)


def test_progressive_loss_by_its_definition() -> None:
    net = RecallNet.for_task(BITS, width=6).double()
    tokens, targets = bits(5, 8)
    counted = torch.rand(5, 8, generator=torch.Generator().manual_seed(0)) < 0.6

    def loss(logits: Tensor) -> Tensor:
        per_position = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (per_position * counted).sum() / counted.sum()

    for alpha, n, k in ((0.0, 0, 1), (1.0, 2, 3), (0.01, 4, 1), (1.0, 0, 5), (0.3, 1, 2)):
        net.zero_grad()
        value = progressive_loss(net, tokens, targets, loops=5, alpha=alpha, n=n, k=k, counted_BN=counted)
        value.backward()
        found = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
        states = list(net.iterate(tokens, 5))
        h = states[n].detach() if n else states[0]
        e = net.embed(tokens)
        for t in range(n, n + k):
            h = net.loop(h, e, t)
        expected = (1 - alpha) * loss(net.readout(states[5])) + alpha * loss(net.readout(h))
        assert value.item() == pytest.approx(expected.item())
        net.zero_grad()
        expected.backward()
        wanted = [weight.grad for weight in net.parameters() if weight.grad is not None and weight.grad.abs().max() > 0]
        # Projection, recall, four convolutions of the blocks, three of the head.
        assert len(found) == len(wanted) == (8 if alpha == 1.0 and n else 9)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_steps_without_gradient_leave_none() -> None:
    """The projection acts before the first loop only: with n > 0 and alpha = 1 nothing of the loss reaches it."""
    net = RecallNet.for_task(BITS, width=6)
    tokens, targets = bits(4, 8)
    progressive_loss(net, tokens, targets, loops=4, alpha=1.0, n=1, k=2).backward()
    assert net.projection.weight.grad is None
    assert net.recall.weight.grad is not None
    progressive_loss(net, tokens, targets, loops=4, alpha=1.0, n=0, k=2).backward()
    assert net.projection.weight.grad is not None


def test_the_progressive_loss_takes_a_transformer() -> None:
    model = LoopedTransformer(
        ModelSpec(width=8, heads=2, readout_init="normal"), vocabulary=2, classes=2, multipliers=Multipliers()
    )
    tokens, targets = bits(4, 6)
    value = progressive_loss(model, tokens, targets, loops=4, alpha=1.0, n=1, k=3)
    assert value.item() == pytest.approx(F.cross_entropy(model(tokens, 4).transpose(1, 2), targets).item(), rel=1e-5)


@pytest.mark.parametrize(("n", "k", "alpha"), [(4, 1, 0.5), (-1, 1, 0.5), (0, 5, 0.5), (2, 0, 0.5), (0, 1, 1.5)])
def test_progressive_loss_out_of_range(n: int, k: int, alpha: float) -> None:
    net = RecallNet.for_task(BITS, width=6)
    with pytest.raises(InputError, match="expected 0 <= n < loops"):
        progressive_loss(net, *bits(1, 4), loops=4, alpha=alpha, n=n, k=k)


class Scripted:
    """A model whose logits after each loop are given: [T, B, N, V]."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def embed(self, tokens_BN: Tensor) -> Tensor:
        return tokens_BN.float().unsqueeze(-1)

    def start(self, e_BPD: Tensor) -> Tensor:
        return e_BPD

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        return self.logits[t]

    def readout(self, h_BPD: Tensor) -> Tensor:
        return h_BPD

    def iterate(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None):
        yield self.embed(tokens_BN)
        yield from self.logits[:loops]


def test_scores_in_both_modes() -> None:
    """One sequence of two positions with targets 1, 0; logits give the first class's or the second's lead."""
    lead = torch.tensor([[-1.0, 1.0], [1.0, -1.0], [3.0, -3.0], [2.0, 2.0], [4.0, -3.0]])  # class 1's lead, by loop and position
    logits = torch.stack([torch.zeros_like(lead), lead], -1).unsqueeze(1)
    tokens, targets = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[1, 0]])
    scores = scores_by_loop(Scripted(logits), tokens, targets, 5)
    assert scores.default_TB.squeeze(1).tolist() == [False, True, True, False, True]
    # As sure at loop 2 as at loop 1, surer at 3, less sure at 4, surest at 5: the answer of loops 1, 1, 3, 3, 5.
    assert scores.max_conf_TB.squeeze(1).tolist() == [False, False, True, True, True]
    first = scores_by_loop(Scripted(logits), tokens, targets, 5, counted_BN=torch.tensor([[True, False]]))
    assert first.default_TB.squeeze(1).tolist() == [False, True, True, True, True]


def test_it_learns_prefix_sums_and_goes_beyond_its_length() -> None:
    """Six seconds of one thread; measured: all right at length 12 from step 200 on, and at length 20 from five loops on."""
    task = PrefixSums(PrefixSumTask(examples=4000))
    net = RecallNet.for_task(task, width=32, seed=0)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    stream = torch.Generator().manual_seed(0)
    for step in range(300):
        batch = task.random_batch(seed=0, split="train", index=step, size=64, length=12)
        n, k = progressive_draw(6, stream)
        loss = progressive_loss(net, batch.tokens, batch.targets, loops=6, alpha=0.5, n=n, k=k)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    batch = task.random_batch(seed=0, split="held_out", index=0, size=200, length=12)
    assert scores_by_loop(net, batch.tokens, batch.targets, 6).default_TB[-1].float().mean() > 0.9
    longer = task.random_batch(seed=0, split="held_out", index=0, size=200, length=20)
    exact_T = scores_by_loop(net, longer.tokens, longer.targets, 8).default_TB.float().mean(1)
    assert exact_T[0] < 0.1  # start, one loop and readout see nine positions back
    assert exact_T.max() > 0.8
