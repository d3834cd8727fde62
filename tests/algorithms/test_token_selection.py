import jax.numpy as jnp

from dapo_jax.algorithms.token_selection import clip_cov_selection, kl_cov_selection


def test_clip_cov_draws_the_tokens_with_the_smallest_noise_among_the_candidates():
    logprobs = jnp.array([[0.0, -1.0, -2.0, -3.0, -4.0]])
    advantages = jnp.array([[-2.0, -1.0, 0.0, 1.0, 2.0]])
    mask = jnp.ones((1, 5), bool)
    noise = jnp.array([[0.1, 0.2, 0.0, 0.4, 0.3]])
    # covariances -4, -1, 0, -1, -4
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    options |= {"clip_cov_lb": -4.5, "clip_cov_ub": -0.5, "clip_cov_ratio": 0.4}
    chosen = clip_cov_selection(logprobs, logprobs, advantages, mask, noise, **options)
    assert chosen.tolist() == [[True, True, False, False, False]]
    old = logprobs.at[0, 0].add(1.0)  # its ratio is below 0.8 and its advantage negative: clipped already
    chosen = clip_cov_selection(logprobs, old, advantages, mask, noise, **options)
    assert chosen.tolist() == [[False, True, False, False, True]]
    options["clip_cov_ratio"] = 0.0002
    assert clip_cov_selection(logprobs, logprobs, advantages, mask, noise, **options).sum() == 1  # at least one
    options["clip_cov_lb"] = 10.0
    assert clip_cov_selection(logprobs, logprobs, advantages, mask, noise, **options).sum() == 0  # no candidate


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    logprobs = jnp.array([[0.0, -1.0, -2.0, -3.0, -4.0, jnp.nan]])
    advantages = jnp.array([[2.0, 1.0, 0.0, 1.0, 2.0, jnp.nan]])
    mask = jnp.array([[True] * 5 + [False]])
    chosen = kl_cov_selection(logprobs, logprobs, advantages, mask, logprobs, kl_cov_ratio=0.4)
    assert chosen.tolist() == [[True, False, False, True, False, False]]  # 1.6, -0.2, 0, 0.2, -1.6 and no token
