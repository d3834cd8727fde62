import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.checkpoints import DATA, NAMES, model, score

from dapo_jax.models.layer_cache import LayerCache, last_columns, layer_cache
from dapo_jax.models.layers import layer_weights
from dapo_jax.models.remat import POLICIES
from dapo_jax.models.transformer import decode, forward, logits, positions_of, prefill
from dapo_jax.models.weights import cast_matrices

PROMPT_LENGTHS, SAMPLES, RESPONSE = (6, 1, 4), 2, 5  # three prompts, left-padded to six tokens
PAST_WINDOW = 50  # tokens of a response that is much longer than the windows of the models

jit_prefill = jax.jit(prefill, static_argnums=3)
jit_decode = jax.jit(decode, static_argnums=6)
jit_logits = jax.jit(logits, static_argnums=2)


@functools.partial(jax.jit, static_argnums=(3, 4))
def loss_and_gradient(params, tokens, mask, arch, remat="none"):
    """Mean negative log-probability of the next token, over all positions."""

    def loss(params):
        scores = logits(params, forward(params, tokens, positions_of(mask), mask, arch, remat=remat), arch)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), tokens[:, 1:, None], axis=-1).mean()

    return jax.value_and_grad(loss)(params)


def small_model(name, dtype=np.float32):
    """Of the first two layers only, or of one repetition of their kinds, which compile faster."""
    arch, params = model(name)
    num_layers = max(2, len(arch.pattern))
    arch = dataclasses.replace(arch, num_layers=num_layers)
    params = params | {"layers": {name: leaf[:num_layers] for name, leaf in params["layers"].items()}}
    return arch, cast_matrices(params, arch, dtype)


def unstack(params, arch):
    return params | {"layers": layer_weights(params["layers"], arch)}


def random_tokens(arch, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, arch.vocab_size, shape, np.int32)


def prompts_and_responses(arch, prompt_lengths=PROMPT_LENGTHS, response=RESPONSE):
    """Left-padded prompts [Q, P], their mask, responses [B, R], rows [B, P + R] of both and their mask."""
    width = max(prompt_lengths)
    prompts = random_tokens(arch, len(prompt_lengths), width)
    prompt_mask = np.arange(width) >= width - np.array(prompt_lengths)[:, None]
    responses = random_tokens(arch, len(prompt_lengths) * SAMPLES, response, seed=1)
    rows = np.concatenate([prompts.repeat(SAMPLES, 0), responses], axis=1)
    row_mask = np.concatenate([prompt_mask.repeat(SAMPLES, 0), np.ones_like(responses, bool)], axis=1)
    return prompts, prompt_mask, responses, rows, row_mask


def decode_logits(params, arch, prompts, prompt_mask, responses, window):
    """Logits [B, R + 1, V] before each response token and after the last, fed through the cache."""
    params = unstack(params, arch)  # as the engines do
    last_hidden, prompt_caches, _ = jit_prefill(params, prompts, prompt_mask, arch)
    make = functools.partial(np.zeros, dtype=prompt_caches[0][0].dtype)
    sizes = {"rows": len(responses), "prompts": len(prompts), "width": prompts.shape[1], "window": window}
    empty = [layer_cache(make, kind, arch, **sizes) for kind in arch.layers]
    caches = [
        LayerCache(*last_columns(cache, *prompt), cache.key, cache.value)
        for cache, prompt in zip(empty, prompt_caches, strict=True)
    ]
    samples = len(responses) // len(prompts)
    first_position = prompt_mask.sum(1, dtype=np.int32).repeat(samples)
    scores = [np.repeat(jit_logits(params, last_hidden, arch), samples, 0)]
    for index, tokens in enumerate(responses.T):
        positions = first_position + np.int32(index)
        hidden, caches, _ = jit_decode(params, tokens, positions, prompt_mask, caches, np.int32(index), arch)
        scores.append(jit_logits(params, hidden, arch))
    return np.stack(scores, axis=1)


def logprobs(scores, tokens):
    return np.take_along_axis(np.asarray(jax.nn.log_softmax(scores)), tokens[..., None], axis=-1)[..., 0]


# Layers are stacked for training and a list for decoding, which the tests below compare with stacked ones: as a list,
# the long lane has a dense model and one with experts.
@pytest.mark.short("stacked")
@pytest.mark.long("gemma3-list", "qwen3_moe_mixed-list")
@pytest.mark.parametrize("layers", ["stacked", "list"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name, layers):
    arch, params = model(name)
    reference = np.load(DATA / name / "reference.npz")
    mask = reference["attention_mask"].astype(bool)
    scores = score(unstack(params, arch) if layers == "list" else params, reference["input_ids"], mask, arch)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores[mask], reference["logits"][mask], rtol=0, atol=1e-4)


@pytest.mark.short("qwen2_bias_tied")
@pytest.mark.parametrize("name", NAMES)
def test_decoding_after_a_shared_prefill_equals_forward(name):
    arch, params = small_model(name)
    prompts, prompt_mask, responses, rows, row_mask = prompts_and_responses(arch)
    decoded = decode_logits(params, arch, prompts, prompt_mask, responses, window=RESPONSE)
    expected = score(params, rows, row_mask, arch)[:, prompts.shape[1] - 1 :]
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=1e-4)


@pytest.mark.short("gemma3")
@pytest.mark.parametrize("name", ["gemma3", "gemma2_softcap", "olmo3", "mistral_sliding"])
def test_decoding_passes_its_window_several_times(name):
    """Prompts are shorter and longer than the window, and its layers hold keys and values of no more than it."""
    arch, params = small_model(name)
    assert arch.window == 16 and PAST_WINDOW > 3 * arch.window
    prompts, prompt_mask, responses, rows, row_mask = prompts_and_responses(arch, (21, 3, 40), PAST_WINDOW)
    decoded = decode_logits(params, arch, prompts, prompt_mask, responses, window=PAST_WINDOW)
    expected = score(params, rows, row_mask, arch)[:, prompts.shape[1] - 1 :]
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=1e-4)


def test_neither_a_wider_cache_nor_the_empty_prompt_of_another_row_changes_a_row():
    arch, params = small_model("qwen2_bias_tied")
    prompts, prompt_mask, responses, *_ = prompts_and_responses(arch)
    narrow, wide = (
        decode_logits(params, arch, prompts, prompt_mask, responses, window) for window in (RESPONSE, 3 * RESPONSE)
    )
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=1e-5)
    prompt_mask[1] = False
    found = decode_logits(params, arch, prompts, prompt_mask, responses, RESPONSE)
    assert np.isfinite(found).all()
    others = np.arange(len(responses)) // SAMPLES != 1
    np.testing.assert_array_equal(found[others], narrow[others])


@pytest.mark.short("mixed")
@pytest.mark.parametrize("places", [(0, 0, 0, 0), (8, 8, 8, 8), (0, 0, 3, 8)], ids=["left", "right", "mixed"])
def test_padding_changes_nothing(places):
    arch, params = small_model("qwen2_bias_tied")
    tokens = random_tokens(arch, 3, 8)
    padded = np.insert(tokens, places, 7, axis=1)
    mask = np.insert(np.ones_like(tokens, bool), places, False, axis=1)
    plain = score(params, tokens, np.ones_like(tokens, bool), arch)
    np.testing.assert_allclose(score(params, padded, mask, arch)[:, mask[0]], plain, rtol=0, atol=1e-5)


def test_a_row_of_padding_gives_finite_values_and_gradients():
    arch, params = small_model("qwen3_qknorm")
    tokens = random_tokens(arch, 2, 8)
    mask = np.array([[True] * 8, [False] * 8])
    value, gradient = loss_and_gradient(params, tokens, mask, arch)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
def test_rematerialisation_changes_no_value_and_no_gradient(policy):
    arch, params = small_model("qwen3_qknorm")
    tokens = random_tokens(arch, 2, 8)
    mask = np.ones_like(tokens, bool)
    kept, recomputed = (loss_and_gradient(params, tokens, mask, arch, remat) for remat in ("none", policy))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), kept, recomputed)


@pytest.mark.short("qwen3_qknorm")
@pytest.mark.parametrize("name", ["qwen2_bias_tied", "qwen3_qknorm"])
def test_bfloat16_decoding_and_forward_agree_within_small_divergence(name):
    arch, params = small_model(name, dtype=jnp.bfloat16)
    prompts, prompt_mask, responses, rows, row_mask = prompts_and_responses(arch)
    decoded = decode_logits(params, arch, prompts, prompt_mask, responses, RESPONSE)[:, :-1]
    trained = score(params, rows, row_mask, arch)[:, prompts.shape[1] - 1 : -1]
    assert trained.dtype == jnp.float32
    difference = logprobs(trained, responses) - logprobs(decoded, responses)
    assert 0 <= np.mean(np.exp(difference) - difference - 1) < 1e-4


@pytest.mark.slow
def test_gradients_through_bfloat16_weights_follow_those_in_float32():
    arch, params = small_model("qwen3_qknorm")
    tokens = random_tokens(arch, 2, 8)
    mask = np.ones_like(tokens, bool)
    _, exact = loss_and_gradient(params, tokens, mask, arch)
    params = cast_matrices(params, arch, jnp.bfloat16)
    _, rounded = loss_and_gradient(params, tokens, mask, arch)
    leaves = (jax.tree.leaves(tree) for tree in (params, exact, rounded))
    for leaf, expected, gradient in zip(*leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        expected, gradient = (np.asarray(x, np.float32).ravel() for x in (expected, gradient))
        assert np.isfinite(gradient).all()
        assert expected @ gradient > 0.99 * np.linalg.norm(expected) * np.linalg.norm(gradient)


def test_positions_count_real_tokens():
    mask = np.array([[False, False, True, True], [True, False, True, False], [False] * 4])
    assert positions_of(mask).tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
