import dataclasses

import numpy as np
from shapes import ARCH

from dapo_jax.models.architecture import Experts, Layer
from dapo_jax.models.flops import TokenFlops, token_flops


def test_a_token_goes_through_some_of_the_experts():
    """ARCH has 48 hidden, 80 intermediate, 4 heads and 2 key-value heads of 16."""
    attention, dense = 48 * 16 * (4 + 2 + 2 + 4), 3 * 48 * 80
    assert token_flops(ARCH).layers == 2 * 2 * (attention + dense)
    experts = Experts(number=8, per_token=3, intermediate_size=20, normalized=True)
    arch = dataclasses.replace(ARCH, experts=experts, pattern=(Layer(experts=True), Layer()))
    assert token_flops(arch).layers == 2 * (2 * attention + dense + 3 * (3 * 48 * 20))


def test_pairs_are_those_of_the_mean_layer():
    arch = dataclasses.replace(ARCH, num_layers=4, pattern=(Layer(window=3), Layer(window=3), Layer(window=3), Layer()))
    flops = token_flops(arch)
    assert flops.pair == 4 * 4 * 4 * 16 and dict(flops.windows) == {3: 0.75, None: 0.25}
    pairs = [sum(min(i + 1, 3) for i in range(n)) * 0.75 + n * (n + 1) / 2 * 0.25 for n in (2, 3, 9)]
    np.testing.assert_array_equal(flops.causal_pairs(np.array([2, 3, 9])), pairs)


def test_prefill_of_long_sequences_computes_the_keys_that_a_block_reaches():
    flops = TokenFlops(layers=1.0, head=0.0, pair=1.0, windows=((512, 0.5), (None, 0.5)))
    assert flops.of_prefilled(2048) == 1 + 2048
    assert flops.of_prefilled(8192) == 1 + (8192 + 1024 + 511) / 2
