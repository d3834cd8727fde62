"""The gated delta rule in chunks against the recurrence, token by token, along the paths of trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import mesh_of

from dapo_jax.models.architecture import Delta
from dapo_jax.models.gated_delta import Inputs, empty_state, last_tail, next_token, over_sequences, update_states
from dapo_jax.models.state_kernels import update_on_gpu, update_on_tpu
from dapo_jax.models.token_paths import CHUNK, paths_of

DELTA = Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, filter_width=4)
# Of each bin: padding before it, then of each tree the tokens of its prompt and of its responses. Prompts and responses
# end at, before and after the edges of chunks, some have fewer tokens than the convolution, some span several chunks.
BINS = [
    (0, [(CHUNK, [1, 2, 30]), (5, [1, 1, 60]), (1, [2, 3])]),
    (7, [(2 * CHUNK + 2, [10, 1, 1, 40])]),
    (0, [(2, [1, CHUNK + 6, 1]), (3, [3]), (CHUNK - 4, [4, 5])]),
]
WIDTH = 3 * CHUNK + 8


def trees_and_branches():
    trees, branches = np.zeros((2, len(BINS), WIDTH), np.int32)
    for row, (at, specification) in enumerate(BINS):
        for number, (prompt, responses) in enumerate(specification, 1):
            for branch, length in enumerate([prompt, *responses]):
                trees[row, at : at + length], branches[row, at : at + length] = number, branch
                at += length
    trees[1, 20:23] = branches[1, 20:23] = 0  # padding inside of a prompt
    return trees, branches


def inputs(seed=0, rows=3, width=WIDTH):
    rng = np.random.default_rng(seed)
    shapes = (rows, width, DELTA.channels), (DELTA.channels, 4), (rows, width, 4), (rows, width, 4)
    channels, kernel, beta, decay = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    decay = -np.abs(decay) / 4
    decay[0, ::7] = -90.0  # all is forgotten
    return Inputs(channels, kernel, 1 / (1 + np.exp(-beta)), decay)


def paths_by_hand(trees, branches):
    """Of each bin, the slots of each sequence: those of a prompt and of one response."""
    for row, (tree, branch) in enumerate(zip(trees, branches, strict=True)):
        for number in range(1, tree.max() + 1):
            for response in range(1, branch[tree == number].max() + 1):
                yield row, np.flatnonzero((tree == number) & ((branch == 0) | (branch == response)))


def recurrent(given, trees, branches):
    """What each slot reads, by one token after the other of each sequence."""
    read = jnp.zeros((len(BINS), WIDTH, 4, 6))
    alive = jnp.ones(1, bool)
    for row, slots in paths_by_hand(trees, branches):

        def step(state, token):
            one = Inputs(token[0][None, None], given.filter, token[1][None, None], token[2][None, None])
            found, state = next_token(one, state, alive, DELTA)
            return state, found[0, 0]

        tokens = given.channels[row, slots], given.beta[row, slots], given.decay[row, slots]
        _, found = jax.lax.scan(step, empty_state(1, DELTA, jnp.float32), tokens)
        read = read.at[row, slots].set(found)
    return read


def weighted(form, weights, given):
    read = form(given)
    return jnp.sum(read * weights), read


@pytest.mark.slow
def test_chunks_equal_the_recurrence_along_each_path_and_so_do_gradients():
    trees, branches = trees_and_branches()
    weights = np.random.default_rng(1).normal(size=(len(BINS), WIDTH, 4, 6)) * (trees > 0)[..., None, None]

    def in_chunks(given):
        return over_sequences(given, paths_of(jnp.array(trees), jnp.array(branches), 4), DELTA)[0]

    forms = in_chunks, functools.partial(recurrent, trees=trees, branches=branches)
    (gradient, read), (expected_gradient, expected) = (
        jax.jit(jax.grad(functools.partial(weighted, form, weights), has_aux=True))(inputs()) for form in forms
    )
    np.testing.assert_allclose(read[trees > 0], expected[trees > 0], rtol=0, atol=2e-5)
    for name, found, wanted in zip(Inputs._fields, gradient, expected_gradient, strict=True):
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize("update", [update_on_gpu, update_on_tpu])
@pytest.mark.parametrize("heads", [6, 16])
def test_a_kernel_changes_states_as_it_is_defined(update, heads):
    """On eight devices, two of which have the heads of a row; a row that has ended keeps its state to the bit."""
    rng, rows, inner, columns = np.random.default_rng(3), 8, 16, 128
    shapes = (inner,), (inner,), (columns,), (), ()
    query, key, value, kept, beta = (rng.normal(size=(rows, heads, *shape)).astype("f") for shape in shapes)
    kept, beta = (1 / (1 + np.exp(-x)) for x in (kept, beta))
    kept[3], beta[3] = 1.0, 0.0
    pool = rng.normal(size=(4 * 7, heads, inner, columns)).astype("f")  # 7 places of each of 4 shards
    reads, writes = np.array([0, 5, 2, 3, 4, 4, 6, 0]), np.array([1, 5, 6, 2, 3, 5, 6, 2])
    found, expected = pool[7 * (np.arange(rows) // 2) + reads], pool.copy()
    read, expected[7 * (np.arange(rows) // 2) + writes] = update_states(found, query, key, value, kept, beta)
    arrays = reads.astype("int32"), writes.astype("int32"), pool, query, key, value, kept, beta
    with jax.set_mesh(mesh_of((2, 2, 2))):
        got, new = jax.jit(functools.partial(update, interpret=True))(*arrays)
    np.testing.assert_allclose(got, read, rtol=0, atol=3e-5)
    np.testing.assert_allclose(new, expected, rtol=0, atol=3e-5)
    np.testing.assert_array_equal(new[7 + 2], pool[7 + 3])


@pytest.mark.parametrize("length", [1, 3, CHUNK, CHUNK + 9])
def test_a_prompts_state_goes_on_token_by_token(length):
    """Left-padded, as prefill has it."""
    width, more = 2 * CHUNK, 3
    given = inputs(2, rows=1, width=width + more)
    mask = np.arange(width) >= width - length
    prompt = Inputs(given.channels[:, :width], given.filter, given.beta[:, :width], given.decay[:, :width])
    paths = paths_of(jnp.array(mask[None], jnp.int32), jnp.zeros((1, width), jnp.int32), 4)
    _, state = over_sequences(prompt, paths, DELTA)
    held = empty_state(1, DELTA, jnp.float32).replace(state=state, tail=last_tail(prompt.channels, mask[None], 4))
    whole = paths_of(
        jnp.array(np.append(mask, [1] * more)[None], jnp.int32), jnp.zeros((1, width + more), jnp.int32), 4
    )
    expected, _ = over_sequences(given, whole, DELTA)
    for at in range(width, width + more):
        one = Inputs(
            given.channels[:, at : at + 1], given.filter, given.beta[:, at : at + 1], given.decay[:, at : at + 1]
        )
        found, held = next_token(one, held, jnp.ones(1, bool), DELTA)
        np.testing.assert_allclose(found[:, 0], expected[:, at], rtol=0, atol=2e-5)
        _, kept = next_token(one, held, jnp.zeros(1, bool), DELTA)
        jax.tree.map(np.testing.assert_array_equal, kept, held)
