import jax
import numpy as np

from dapo_jax.algorithms.token_selection import clip_cov_selection, kl_cov_selection


def test_clip_cov_draws_the_tokens_with_the_smallest_noise_among_the_candidates():
    logprobs = np.array([[0.0, -1.0, -2.0, -3.0, -4.0]])
    advantages = np.array([[-2.0, -1.0, 0.0, 1.0, 2.0]])
    mask = np.ones((1, 5), bool)
    noise = np.array([[0.1, 0.2, 0.0, 0.4, 0.3]])
    select = jax.jit(clip_cov_selection)
    # covariances -4, -1, 0, -1, -4
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    options |= {"clip_cov_lb": -4.5, "clip_cov_ub": -0.5, "clip_cov_ratio": 0.4}
    chosen = select(logprobs, logprobs, advantages, mask, noise, **options)
    assert chosen.tolist() == [[True, True, False, False, False]]
    old = logprobs + np.array([1.0, 0, 0, 0, 0])  # its ratio is below 0.8 and its advantage negative: clipped already
    chosen = select(logprobs, old, advantages, mask, noise, **options)
    assert chosen.tolist() == [[False, True, False, False, True]]
    options["clip_cov_ratio"] = 0.0002
    assert select(logprobs, logprobs, advantages, mask, noise, **options).sum() == 1  # at least one
    options["clip_cov_lb"] = 10.0
    assert select(logprobs, logprobs, advantages, mask, noise, **options).sum() == 0  # no candidate


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    logprobs = np.array([[0.0, -1.0, -2.0, -3.0, -4.0, np.nan]])
    advantages = np.array([[2.0, 1.0, 0.0, 1.0, 2.0, np.nan]])
    mask = np.array([[True] * 5 + [False]])
    chosen = jax.jit(kl_cov_selection)(logprobs, logprobs, advantages, mask, logprobs, kl_cov_ratio=0.4)
    assert chosen.tolist() == [[True, False, False, True, False, False]]  # 1.6, -0.2, 0, 0.2, -1.6 and no token
