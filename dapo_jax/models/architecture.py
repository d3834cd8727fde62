"""Host: the sizes and switches of a decoder-only transformer, and the kinds of its layers."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.models.rope_scaling import RopeScaling


@dataclass(frozen=True)
class Layer:
    """The kind of a layer."""

    window: int | None = None  # tokens that a token attends to, itself included; None: all tokens up to itself
    rotary: bool = True  # False: queries and keys carry no position
    theta: float | None = None  # base of its own rotary embedding, which is not scaled; None: the architecture's
    experts: bool = False  # a mixture of experts instead of one dense feed-forward network
    delta: bool = False  # linear attention by a gated delta rule instead of attention


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a layer: each token goes to a few of E feed-forward networks."""

    number: int  # E
    per_token: int  # that a token is given to
    intermediate_size: int  # of each
    normalized: bool  # the weights of a token's experts add up to 1
    scores: str = "softmax"  # of the router, over all experts; or sigmoid, of each alone
    biased: bool = False  # experts are chosen by their scores plus a bias of each, which is not trained
    scale: float = 1.0  # of the weights of a token's experts
    biases: bool = False  # of the router's scores and of each expert's products, all trained
    clamp: float | None = None  # gate up to this, up from -this to this; then gate * sigmoid(slope * gate) * (up + 1)
    slope: float = 1.0  # of that sigmoid
    shared_size: int = 0  # F of a dense network next to them, for all tokens
    shared_gated: bool = False  # whose result each token scales by a gate of its own


@dataclass(frozen=True)
class Delta:
    """Sizes of the layers with linear attention: each value head has a state of key_dim x value_dim numbers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    filter_width: int  # tokens that the convolution before it sees, with the token itself

    @property
    def channels(self) -> int:
        """Numbers of a token's queries, keys and values, which the convolution takes."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def tail_size(self) -> int:
        """Channels of the last tokens, which the convolution takes with the next."""
        return (self.filter_width - 1) * self.channels

    @property
    def flops(self) -> float:
        """Operations of a token besides the layer's projections, one token after the other, and its convolution."""
        return 6.0 * self.value_heads * self.key_dim * self.value_dim + 2.0 * self.filter_width * self.channels


class Choices(NamedTuple):
    """How the experts of a token are recorded: [l, k], -1 where they are not known."""

    layers: int  # l, those that have experts
    per_token: int  # k
    dtype: str  # the smallest that holds -1 and the number of every expert


@dataclass(frozen=True)
class Architecture:
    """V vocabulary, D hidden, F feed-forward, L layers, N query heads, K key-value heads, H head size, E experts."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False  # of what attention puts out
    mlp_bias: bool = False
    qk_norm: str = ""  # norm of queries and keys: of each "head", or of all heads together, the whole "projection"
    norms: str = "before"  # where attention and feed-forward have norms: "before" them, "after" them or "around" them
    norm_offset: float = 0.0  # norms scale by this plus their weight
    activation: str = "silu"  # or gelu_tanh, of the feed-forward network's gate
    scale_embeddings: bool = False  # by the square root of D
    query_scale: float = 1.0  # of queries, besides one over the square root of H
    sinks: bool = False  # each head has a logit that takes weight of attention, and no value
    attention_cap: float | None = None  # scores of attention s become cap * tanh(s / cap)
    logit_cap: float | None = None  # so do the scores of the vocabulary
    rope_scaling: RopeScaling | None = None
    initializer_range: float = 0.02
    scalar_head: bool = False  # one number per token instead of the vocabulary's scores
    gated_attention: bool = False  # what heads attend to is scaled by a gate, which their queries carry
    experts: Experts | None = None  # of the layers that have them
    delta: Delta | None = None  # of the layers that have linear attention
    rotary_size: int = 0  # of H, the first numbers of queries and keys, which carry positions; 0: all
    first: tuple[Layer, ...] = ()  # kinds of the first layers, where they are others
    pattern: tuple[Layer, ...] = (Layer(),)  # kinds of consecutive layers, repeated from there to the last

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The kind of each of the L layers."""
        rest = self.num_layers - len(self.first)
        return (*self.first, *(self.pattern[i % len(self.pattern)] for i in range(rest)))

    @property
    def forward_size(self) -> int:
        """Numbers of a token inside a feed-forward network: F, or those of its experts together."""
        experts = self.experts
        if experts is None:
            return self.intermediate_size
        return experts.per_token * experts.intermediate_size + experts.shared_size

    @property
    def choices(self) -> Choices | None:
        """How the experts of a token are recorded; None without experts."""
        layers = sum(kind.experts for kind in self.layers)
        if self.experts is None or not layers:
            return None
        return Choices(layers, self.experts.per_token, np.min_scalar_type(-self.experts.number).name)

    def layers_with(self, leaf: str) -> tuple[int, ...]:
        """The numbers of the layers that have a leaf of this name (see models/weights.py), or an adapter of it."""
        if leaf.startswith(("gate", "up", "down")):
            return tuple(i for i, kind in enumerate(self.layers) if not kind.experts)
        if leaf.startswith("shared") and (self.experts is None or not self.experts.shared_size):
            return ()
        if leaf.startswith(("router", "expert", "shared")):
            return tuple(i for i, kind in enumerate(self.layers) if kind.experts)
        if leaf.startswith("delta"):
            return tuple(i for i, kind in enumerate(self.layers) if kind.delta)
        if leaf.startswith(("query", "key", "value", "output")):
            return tuple(i for i, kind in enumerate(self.layers) if not kind.delta)
        return tuple(range(self.num_layers))

    def within(self, length: int) -> "Architecture":
        """The same for sequences of at most `length` tokens, without windows that reach all of them."""
        if self.window is None or self.window < length:
            return self
        return replace(self, **kinds_of(tuple(replace(kind, window=None) for kind in self.layers)))

    @property
    def window(self) -> int | None:
        """The window of the layers that have one; None if all layers attend to all tokens."""
        return next((kind.window for kind in self.kinds if kind.window is not None), None)

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """The kinds that there are."""
        return tuple(dict.fromkeys(self.layers))

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_attention_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} must be even, for rotary embeddings")
        if self.rotary_size % 2 or self.rotary_size > self.head_dim:
            raise InputError(f"of head_dim={self.head_dim}, {self.rotary_size} numbers cannot carry positions in pairs")
        if len({kind.window for kind in self.kinds} - {None}) > 1:
            raise InputError(f"{self.kinds}: all layers with a window must have the same")
        if all(kind.delta for kind in self.layers):
            raise InputError("layer_types: some layer must be full_attention")
        if self.delta is not None and self.delta.value_heads % self.delta.key_heads:
            raise InputError(
                f"linear_num_value_heads={self.delta.value_heads} must be a multiple of "
                f"linear_num_key_heads={self.delta.key_heads}"
            )
        if self.experts is not None and self.experts.per_token > self.experts.number:
            raise InputError(
                f"num_experts_per_tok={self.experts.per_token} must be at most num_experts={self.experts.number}"
            )


def kinds_of(layers: tuple[Layer, ...]) -> dict[str, tuple[Layer, ...]]:
    """`first` and `pattern` of these layers: the shortest, of which the pattern is repeated."""
    options = []
    for begin in range(len(layers)):
        rest = layers[begin:]
        length = next(n for n in range(1, len(rest) + 1) if all(kind == rest[i % n] for i, kind in enumerate(rest)))
        options.append((begin + length, begin))
        if begin + 1 >= min(options)[0]:
            break
    length, begin = min(options)
    return {"first": layers[:begin], "pattern": layers[begin:length]}
