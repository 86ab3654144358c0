"""Routers, capacity and losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from moekit import log, router
from torch import Tensor

from forge_moe.balance import bias_rate, bias_step
from forge_moe.capacity import capacity, drop_overflow
from forge_moe.dispatch import count
from forge_moe.losses import batch_loss, sequence_counts, sequence_loss, z_loss
from forge_moe.routing import Routing
from forge_moe.table import MoeConfig

FOUR = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.7, 0.3], [0.1, 0.9]])


def close(found: Tensor | float, wanted: list[float] | float) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )


def test_probabilities_of_the_best_two_with_and_without_renormalisation() -> None:
    """Softmax of ln(4, 3, 2, 1) is (.4, .3, .2, .1); .4 / .7 and .3 / .7 are a softmax over both logits."""
    logits = log(4, 3, 2, 1)
    for renormalise, weights in ((False, [0.4, 0.3]), (True, [0.571429, 0.428571])):
        routing = router("softmax", 4, 2, renormalise=renormalise)(logits)
        assert routing.expert.tolist() == [0, 1]
        close(routing.weight, weights)
    close(logits[0, :2].softmax(-1), [0.571429, 0.428571])


def test_scaling_multiplies_weights() -> None:
    close(router("softmax", 4, 2, renormalise=False, scaling=2.5)(log(4, 3, 2, 1)).weight, [1.0, 0.75])


def test_the_router_is_as_exact_as_fp32_under_autocast() -> None:
    """8.00 and 8.02 round to one number in bf16, whose first expert would win. softmax(8, 8.02) is .505."""
    made = router("softmax", 2, 1, dim=1, renormalise=False)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[8.00], [8.02]]))
    with torch.autocast("cpu", torch.bfloat16):
        routing = made(torch.ones(5, 1, dtype=torch.bfloat16))
    assert routing.expert.tolist() == [1] * 5
    assert routing.weight.dtype == torch.float32
    close(routing.weight, [0.505000] * 5)


def test_there_is_one_softmax_in_the_balance_loss() -> None:
    """Logits (ln 3, 0): p = (.75, .25), all to expert 0: 2 * 1 * .75 = 1.5; a second softmax gives 1.2449."""
    routing = router("softmax", 2, 1)(torch.tensor([[math.log(3), 0.0]] * 6))
    close(batch_loss(routing.scores, count(routing.expert, 2), None) / 6, 1.5)


def test_the_z_loss() -> None:
    """logsumexp(ln 3, 0) = ln 4, logsumexp(0, 0) = ln 2; squares 1.921812 and .480453, mean 1.201133."""
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    close(z_loss(logits[:1]), 1.921812)
    close(z_loss(logits) / 2, 1.201133)
    close(z_loss(logits, torch.tensor([False, True])), 0.480453)


def test_the_balance_loss_of_a_batch() -> None:
    """f = (3/4, 1/4), P = (.55, .45): 2 (.4125 + .1125) = 1.05. Without the last f = (1, 0), P0 = .7."""
    expert = torch.tensor([0, 0, 0, 1])
    close(batch_loss(FOUR, count(expert, 2), None) / 4, 1.05)
    valid = torch.tensor([True, True, True, False])
    masked = torch.tensor([0, 0, 0, 2])
    close(batch_loss(FOUR, count(masked, 2), valid) / 3, 1.40)
    even = torch.full((4, 2), 0.5)
    close(batch_loss(even, torch.tensor([2, 2]), None) / 4, 1.0)


def test_the_balance_loss_of_micro_batches_is_not_that_of_the_batch() -> None:
    """Halves of the batch give 1.4 and 1.0, mean 1.2; with the counts of all they add up to 1.05."""
    expert = torch.tensor([0, 0, 0, 1])
    halves = [batch_loss(FOUR[i : i + 2], count(expert[i : i + 2], 2), None) / 2 for i in (0, 2)]
    close(halves[0], 1.4)
    close(halves[1], 1.0)
    whole = count(expert, 2)
    close(sum(batch_loss(FOUR[i : i + 2], whole, None) for i in (0, 2)) / 4, 1.05)


def test_the_balance_loss_of_a_sequence() -> None:
    """s sums to 2 a row: shares (.45, .3, .15, .1), (.1, .4, .3, .2), P = (.275, .35, .225, .15). Two of four
    each: c = (1, 2, 1, 0), f = 4 c / 4: .275 + .7 + .225 = 1.2."""
    made = router("sigmoid", 4, 2)
    s = torch.tensor([[0.9, 0.6, 0.3, 0.2], [0.2, 0.8, 0.6, 0.4]])
    routing = made(torch.logit(s))
    assert count(routing.expert, 4).tolist() == [1, 2, 1, 0]
    counts = sequence_counts(routing.expert, 1, 4, None, 2)
    close(sequence_loss(routing.scores, routing.expert, 1, None, counts), 1.2)


def test_a_sequence_counts_its_own_valid_tokens() -> None:
    scores = torch.cat([FOUR, FOUR])
    valid = torch.tensor([True] * 4 + [True, True, True, False])
    expert = torch.tensor([0, 0, 0, 1, 0, 0, 0, 2])
    counts = sequence_counts(expert, 2, 2, valid, 4)
    close(sequence_loss(scores, expert, 2, valid, counts), 1.05 + 1.40)
    nothing = torch.zeros(8, dtype=torch.bool)
    gone = torch.full((8,), 2)
    close(sequence_loss(scores, gone, 2, nothing, sequence_counts(gone, 2, 2, nothing, 4)), 0.0)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """s + b = (.4, .6, .7, .7): experts 2 and 3; of s (.3, .2) their shares are .6 and .4, times 2.5."""
    made = router("sigmoid", 4, 2, bias=True, scaling=2.5)
    assert made.expert_bias is not None
    made.expert_bias.copy_(torch.tensor([-0.5, 0.0, 0.4, 0.5]))
    routing = made(torch.logit(torch.tensor([[0.9, 0.6, 0.3, 0.2]])))
    by_expert = dict(zip(routing.expert.tolist(), routing.weight.tolist(), strict=True))
    assert set(by_expert) == {2, 3}
    close(by_expert[2], 1.5)
    close(by_expert[3], 1.0)


def test_groups_are_chosen_by_their_two_best_experts() -> None:
    """Sums .9 + .1 = 1.0 < .6 + .5 = 1.1: the second group, though it lacks the best expert."""
    routing = router("sigmoid", 4, 2, n_groups=2, top_groups=1)(
        torch.logit(torch.tensor([[0.9, 0.1, 0.6, 0.5]]))
    )
    assert routing.expert.tolist() == [2, 3]
    close(routing.weight, [0.545455, 0.454545])


def test_the_bias_rule() -> None:
    """Means 1, 1 and 10; centring takes off the mean of the step."""
    close(bias_step(torch.tensor([1.0, 2, 1, 0]), 1e-3), [0.0, -1e-3, 0.0, 1e-3])
    close(bias_step(torch.tensor([4.0, 0, 0, 0]), 1.0), [-1.0, 1, 1, 1])
    close(bias_step(torch.tensor([4.0, 0, 0, 0]), 1.0, centred=True), [-1.5, 0.5, 0.5, 0.5])
    close(bias_step(torch.tensor([28.0, 4, 4, 4]), 0.1), [-0.1, 0.1, 0.1, 0.1])


def test_the_rate_of_the_bias_follows_its_schedule() -> None:
    rates = {
        kind: [
            bias_rate(MoeConfig(bias_rate=1.0, bias_schedule=kind), step, 100) for step in (1, 10, 50, 100)
        ]
        for kind in ("constant", "linear_warmup", "cosine")
    }
    assert rates["constant"] == [1.0] * 4
    close(rates["linear_warmup"], [0.1, 1.0, 1.0, 1.0])
    close(
        rates["cosine"], [0.5 * (1 + math.cos(0.01 * math.pi)), 0.5 * (1 + math.cos(0.1 * math.pi)), 0.5, 0.0]
    )


def choices(*rows: tuple[int, ...], weights: list[float] | None = None) -> Routing:
    expert = torch.tensor(rows)
    weight = torch.ones(expert.shape) if weights is None else torch.tensor(weights)
    none = torch.empty(0)
    return Routing(expert.reshape(-1), weight.reshape(-1), none, none)


def test_capacity_is_rounded_up_and_held_within_the_tokens() -> None:
    """5 tokens, 4 experts, factor 1: 5/4, rounded up 2. Factor 8, 2 experts: 20, but there are 5 tokens."""
    five = torch.tensor(5)
    assert capacity(five, five, 4, 1.0) == 2
    assert capacity(five, five, 2, 8.0) == 5
    assert capacity(five, five, 100, 1.0) == 1


def test_the_capacity_of_one_choice() -> None:
    """4 tokens, 2 experts, factor 1: each takes 2; the third choice of expert 0 is dropped."""
    kept = drop_overflow(choices((0,), (0,), (0,), (1,)), 1, 2, 1.0, "position")
    assert kept.expert.tolist() == [0, 0, 2, 1]
    assert kept.weight.tolist() == [1, 1, 0, 1]


def test_the_capacity_holds_for_all_choices_together_and_first_choices_come_first() -> None:
    """Expert 0 takes 2 of 4: the first choices of tokens 0 and 1; two second choices are dropped."""
    kept = drop_overflow(choices((0, 1), (0, 2), (1, 0), (2, 0)), 2, 4, 1.0, "position")
    assert kept.expert.tolist() == [0, 1, 0, 2, 1, 4, 2, 4]


def test_by_score_the_largest_weights_are_kept() -> None:
    routing = choices((0,), (0,), (0,), (0,), weights=[0.1, 0.4, 0.3, 0.2])
    kept = drop_overflow(routing, 1, 2, 1.0, "score")
    assert kept.expert.tolist() == [2, 0, 0, 2]


def test_padding_has_no_part_in_capacity() -> None:
    """Of 6 tokens 4 are real: 2 an expert, as without the padding."""
    kept = drop_overflow(choices((2,), (0,), (0,), (2,), (0,), (1,)), 1, 2, 1.0, "position")
    assert kept.expert.tolist() == [2, 0, 0, 2, 2, 1]


def test_experts_choose_their_tokens() -> None:
    """Two of four each: expert 0 the tokens with .8 and .7, expert 1 those with .9 and .4."""
    made = router("expert_choice", 2, 1)
    routing = made(FOUR.log())
    assert routing.token is not None
    assert routing.expert.tolist() == [0, 0, 1, 1]
    assert routing.token.tolist() == [0, 2, 3, 1]
    close(routing.weight, [0.8, 0.7, 0.9, 0.4])
    changed = FOUR.clone()
    changed[3] = torch.tensor([0.9, 0.1])
    later = made(changed.log())
    assert later.token is not None
    assert later.token.tolist() == [3, 0, 1, 2]  # earlier tokens have other experts


def test_experts_do_not_choose_padding() -> None:
    made = router("expert_choice", 2, 1)
    logits = torch.cat([FOUR.log(), torch.full((4, 2), 9.0)])
    valid = torch.tensor([True] * 4 + [False] * 4)
    routing = made(logits, valid)
    assert routing.token is not None
    taken = [(e, t) for e, t in zip(routing.expert.tolist(), routing.token.tolist(), strict=True) if e < 2]
    assert taken == [(0, 0), (0, 2), (1, 3), (1, 1)]


def test_invalid_tokens_have_no_expert_and_no_weight() -> None:
    routing = router("softmax", 4, 2)(log(4, 3, 2, 1).expand(3, 4), torch.tensor([True, False, True]))
    assert routing.expert.tolist() == [0, 1, 4, 4, 0, 1]
    assert routing.weight[2:4].tolist() == [0, 0]


def test_jitter_is_for_training_alone() -> None:
    made = router("softmax", 4, 2, dim=8, jitter=0.5)
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    noisy = made.train()(x).logits
    torch.manual_seed(0)
    noise = torch.empty(6, 8).uniform_(0.5, 1.5)
    torch.testing.assert_close(noisy, (x * noise) @ made.weight.T)
    torch.testing.assert_close(made.eval()(x).logits, x @ made.weight.T)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "expert_choice"])
def test_no_gradient_reaches_the_bias(kind: str) -> None:
    made = router(kind, 4, 2, dim=8, bias=True)
    routing = made(torch.randn(6, 8))
    (routing.weight.sum() + routing.scores.square().sum()).backward()
    assert made.weight.grad is not None
    assert made.expert_bias is not None
    assert not made.expert_bias.requires_grad
