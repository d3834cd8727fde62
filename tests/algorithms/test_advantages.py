import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.advantages import grpo

CASES = json.loads((Path(__file__).parent / "data" / "grpo.json").read_text())


def run(scores, group_ids, *, tokens=3, norm_by_std=True):
    scores, group_ids = jnp.array(scores, jnp.float32), jnp.array(group_ids)
    mask = jnp.ones((len(scores), tokens), bool)
    num_groups = int(group_ids.max()) + 1
    return np.asarray(grpo(scores, mask, group_ids, num_groups=num_groups, norm_by_std=norm_by_std))


@pytest.mark.parametrize("case", CASES)
def test_grpo_equals_the_reference(case):
    names = {name: index for index, name in enumerate(dict.fromkeys(case["group_ids"]))}
    advantages = grpo(
        jnp.array(case["token_level_rewards"]).sum(axis=1),
        jnp.array(case["response_mask"], bool),
        jnp.array([names[name] for name in case["group_ids"]]),
        num_groups=len(names),
        norm_by_std=case["norm_by_std"],
    )
    np.testing.assert_allclose(advantages, case["advantages"], atol=1e-5)


@pytest.mark.parametrize(("right", "good", "bad"), [(1, 3.74999, -0.25), (8, 0.968245, -0.968245), (15, 0.25, -3.75)])
def test_closed_form_of_right_and_wrong_answers(right, good, bad):
    advantages = run([1.0] * right + [-1.0] * (16 - right), [0] * 16)[:, 0]
    np.testing.assert_allclose(advantages[[0, -1]], [good, bad], atol=2e-5)


@pytest.mark.parametrize(("count", "value"), [(12, 0.1), (7, 0.7), (8, 0.1), (3, -1.3)])
def test_equal_scores_give_exactly_zero(count, value):
    assert (run([value] * count, [0] * count) == 0).all()
    assert (run([value] * count, [0] * count, norm_by_std=False) == 0).all()


def test_a_single_response_gets_its_score():
    np.testing.assert_allclose(run([2.0, 1.0, 0.0], [0, 1, 1])[0], 2.0, rtol=1e-5)


def test_the_order_of_rows_does_not_matter():
    scores, groups = np.random.default_rng(0).normal(size=12), np.repeat(np.arange(3), 4)
    order = np.random.default_rng(1).permutation(12)
    np.testing.assert_allclose(run(scores[order], groups[order]), run(scores, groups)[order], atol=1e-6)


def test_padding_has_no_advantage():
    mask = jnp.array([[True, False], [True, True]])
    advantages = grpo(jnp.array([1.0, 0.0]), mask, jnp.array([0, 0]), num_groups=1)
    assert advantages[0, 1] == 0 and advantages[0, 0] > 0 > advantages[1, 1]
