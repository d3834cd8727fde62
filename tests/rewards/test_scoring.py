import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamic_sampling.small_groups import experience
from reward_model_files import write_reward_model
from safetensors.numpy import load_file
from shapes import mesh_of
from small_run import small_config

from dapo_jax.config.sections import LengthRewardConfig, OverlongBufferConfig, RewardConfig, RewardModelConfig
from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.data.work import Work
from dapo_jax.models import transformer
from dapo_jax.models.flops import TokenFlops
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.monitor.records import read_metrics
from dapo_jax.rewards.lowest import with_lowest
from dapo_jax.rewards.pipeline import open_verifiers
from dapo_jax.rewards.scoring import add_model_scores, add_rewards, load_scorer, plan_batches, scoring_work
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict
from dapo_jax.run.held_out import _Measured
from dapo_jax.training.loop import train

CHAT = ({"role": "user", "content": "1 + 2 ="},)
PROMPTS = ["2 + 2 =", CHAT, "what is 12 * 3 ?", CHAT, "9"]
RESPONSES = ["4<pad>", "3", " 36.", "it is 3", ""]  # the first ends with the token that rows are padded with
CONVERSATIONS = [
    "2 + 2 =4<pad>",
    "system: be brief.\nuser: 1 + 2 =\nassistant: 3\nok",
    "what is 12 * 3 ? 36.",
    "system: be brief.\nuser: 1 + 2 =\nassistant: it is 3\nok",
    "9",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("reward_model"))


def config_with(directory, **changes):
    common = {
        "reward.model.path": str(directory),
        "data.system_prompt": "be brief.",
        "data.chat_template_kwargs": '{"mark": "ok"}',
    }
    return small_config("unused", **{**common, **changes})


def scorer_on(shape, directory, dtype=jnp.float32, **changes):
    config = config_with(directory, **changes)
    return load_scorer(config.reward.model, config.data, jnp.dtype(dtype), mesh_of(shape))


def scores_on(shape, directory, **changes) -> np.ndarray:
    with jax.set_mesh(mesh_of(shape)):
        return scorer_on(shape, directory, **changes).score(PROMPTS, RESPONSES)[0]


@pytest.fixture(scope="module")
def scores(directory):
    return scores_on((1, 1, 1), directory)


@pytest.fixture(scope="module")
def expected_scores(directory):
    """The head at the last token of each conversation, padded on the right, which a causal pass does not see."""
    arch = read_architecture(directory)
    params = load_params(directory, arch, lambda weight, array: jnp.asarray(array))
    head = load_file(directory / "model.safetensors")["score.weight"][0]
    forward = jax.jit(transformer.forward, static_argnums=4)

    def of(token_ids):
        lengths = np.array([len(ids) for ids in token_ids])
        tokens = np.array([[*ids, *[0] * (160 - len(ids))] for ids in token_ids], np.int32)
        mask = np.arange(160) < lengths[:, None]
        hidden = forward(params, tokens, np.broadcast_to(np.arange(160), tokens.shape), mask, arch)
        return np.asarray(hidden)[np.arange(len(lengths)), lengths - 1] @ head

    return of


@pytest.mark.parametrize(("shape", "limit"), [((1, 1, 1), 99), ((1, 1, 1), 6), ((2, 2, 2), 99)])
def test_scores_are_the_heads_at_the_end_of_each_conversation_which_may_lose_its_start(
    directory, expected_scores, shape, limit
):
    encode = load_tokenizer(directory).encode
    found = scores_on(shape, directory, **{"reward.model.max_length": limit})
    assert found.shape == (5,) and np.ptp(found) > 0.1
    np.testing.assert_allclose(found, expected_scores([encode(text)[-limit:] for text in CONVERSATIONS]), atol=1e-5)


def test_frozen_matrices_have_the_dtype_of_products_and_the_head_stays_exact(directory, scores):
    with jax.set_mesh(mesh_of((1, 1, 1))):
        scorer = scorer_on((1, 1, 1), directory, jnp.bfloat16)
        found, _ = scorer.score(PROMPTS, RESPONSES)
    weights = scorer.params
    assert weights["embedding"].dtype == weights["layers"]["down"].dtype == jnp.bfloat16
    assert weights["score"].dtype == weights["final_norm"].dtype == jnp.float32
    head = load_file(directory / "model.safetensors")["score.weight"][0]
    np.testing.assert_array_equal(weights["score"], head)
    np.testing.assert_allclose(found, scores, atol=0.3)
    assert (np.abs(found - scores) > 1e-5).all()


def long_tailed(count, median, longest):
    """Lengths, lognormal with sigma 1."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1, count)
    return np.clip(lengths, 1, longest).astype(int)


@pytest.mark.short("4")
@pytest.mark.parametrize("rows", [1, 4, 14])
def test_neighbours_change_no_score(directory, expected_scores, rows):
    """Responses of many lengths to one prompt, in micro-batches of `rows`."""
    rng, letters = np.random.default_rng(1), list("0123456789 +=")
    texts = ["".join(rng.choice(letters, length)) for length in long_tailed(14, 12, 150)]
    expected = expected_scores([load_tokenizer(directory).encode("9" + text) for text in texts])
    assert max(map(len, texts)) > 8 * min(map(len, texts)) and np.ptp(expected) > 0.1
    with jax.set_mesh(mesh_of((1, 1, 1))):
        scorer = scorer_on((1, 1, 1), directory, **{"reward.model.micro_batch_size_per_device": rows})
        for order in (np.arange(14), np.random.default_rng(2).permutation(14)):
            found, _ = scorer.score(["9"] * 14, [texts[index] for index in order])
            np.testing.assert_allclose(found, expected[order], atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_each_conversation_is_in_one_micro_batch_that_holds_it(count):
    lengths = long_tailed(count, 20, 400)
    batches = plan_batches(lengths, 4)
    assert sorted(np.concatenate([chosen for chosen, _ in batches])) == list(range(count))
    assert all(len(chosen) == 4 for chosen, _ in batches[:-1]) and len(batches) == -(-count // 4)
    assert all(lengths[chosen].max() <= width for chosen, width in batches)
    assert [width for _, width in plan_batches(np.zeros(2, int), 1)] == [4, 4]  # of empty conversations


def test_a_long_tail_costs_little_more_than_it_needs():
    flops = TokenFlops(layers=7.2e8, head=0.0, pair=86016.0)  # of Qwen2.5-0.5B
    lengths = long_tailed(512, 300, 4096)
    batches = plan_batches(lengths, 8)
    assert 1 / scoring_work(lengths, batches, 8, flops).efficiency < 1.5  # 12 if all have the width of the longest
    assert len({width for _, width in batches}) <= 9


def test_work_is_of_padded_rows_and_needed_by_causal_attention():
    flops = TokenFlops(layers=100.0, head=7.0, pair=1.0)
    lengths = np.array([2, 4, 3])
    batches = plan_batches(lengths, 2)
    assert scoring_work(lengths, batches, 2, flops) == Work(2 * 2 * 4 * (100 + 4), 9 * 100 + 3 + 10 + 6)


def test_hugging_face_gives_the_same_scores(directory, scores):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    encode = load_tokenizer(directory).encode
    with torch.no_grad():
        expected = [model(torch.tensor([encode(text)])).logits.item() for text in CONVERSATIONS]
    np.testing.assert_allclose(scores, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, (1, 1, 1), "is a language model: give a sequence-classification"),
        ({"id2label": {"0": "bad", "1": "good"}}, (1, 1, 1), "2 labels: a reward model has one"),
        ({"vocab_size": 48}, (1, 1, 1), "the tokenizer of reward.model.path=.* ids up to .* 48 embeddings"),
        ({}, (1, 1, 8), "does not fit .*mesh.tensor=8 must divide the heads dimension .*: set mesh.tensor="),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tmp_path, changes, shape, message):
    with pytest.raises(ValueError, match=message):
        scorer_on(shape, write_reward_model(tmp_path, **changes))


@dataclasses.dataclass
class LengthScorer:
    """Scores a conversation by the lengths of its parts."""

    settings: RewardModelConfig = RewardModelConfig()

    def score(self, prompts, responses, template_kwargs):
        assert template_kwargs == [{"x": prompt} for prompt in prompts]
        pairs = zip(prompts, responses, strict=True)
        return np.array([10 * len(prompt) + len(text) for prompt, text in pairs], "f4"), Work(4.0, 3.0)


NO_LENGTH = LengthRewardConfig()
PROMPT_SET = PromptSet(
    [PromptRow("a" * n, "task", "1", {}, template_kwargs={"x": "a" * n}) for n in range(4)], [[1]] * 4
)
EXPERIENCE = dataclasses.replace(
    experience([8, 9], np.eye(2), lengths=[[1, 2], [3, 4]], width=4),
    rows=np.array([3, 1]),
    texts=[["x", "xx"], ["xxx", "xxxx"]],
    scores={"score": np.array([[1.0, 0.0], [1.0, -1.0]]), "acc": np.eye(2), "length": np.ones((2, 2))},
    work={"decode": Work(2.0, 1.0)},
)


def test_the_score_is_the_weighted_sum_of_verifier_and_reward_model():
    scorer: Any = LengthScorer(RewardModelConfig(weight=0.5, function_weight=2.0))
    found = add_model_scores(EXPERIENCE, PROMPT_SET, scorer)
    np.testing.assert_array_equal(found.scores["reward_model"], [[31, 32], [13, 14]])
    np.testing.assert_array_equal(found.scores["score"], [[17.5, 16.0], [8.5, 5.0]])
    assert {values.dtype for values in found.scores.values()} == {np.dtype(np.float64)}
    for name in ("acc", "length"):
        np.testing.assert_array_equal(found.scores[name], EXPERIENCE.scores[name])
    assert found.work == {"decode": Work(2.0, 1.0), "reward_model": Work(4.0, 3.0)}
    others = {field.name for field in dataclasses.fields(Experience)} - {"scores", "work"}
    assert all(getattr(found, name) is getattr(EXPERIENCE, name) for name in others)


def test_an_evaluation_gives_a_failed_verification_what_training_does():
    """The verifier's lowest number, and then the reward model's own on top."""
    settings, failed = RewardModelConfig(weight=0.5, function_weight=2.0), np.array([[False, False], [False, True]])
    scores = EXPERIENCE.scores | {"score": np.array([[1.0, -3.0], [1.0, 0.0]])}
    groups = dataclasses.replace(EXPERIENCE, failed=failed, scores=scores, answers=[["", ""]] * 2)
    scorer: Any = LengthScorer(settings)
    evaluated = add_model_scores(groups, PROMPT_SET, scorer)
    trained = add_model_scores(with_lowest(groups, PROMPT_SET, {"task": {"score": -3.0}}), PROMPT_SET, scorer)
    found = _Measured.join([_Measured.of(evaluated, scores["score"])], ["task"] * 2, settings)
    np.testing.assert_equal(found.scores, trained.scores)
    assert found.scores["score"][1, 1] == 2.0 * -3 + 0.5 * 14


def test_without_a_verifier_there_is_no_accuracy():
    request = ScoreRequest("task", "a", None, {})
    with open_verifiers(["none"], RewardConfig(), Path()) as (verifiers, _):
        assert verifiers["none"].score([request]) == [Verdict({"score": 0.0}, None, None)]
    unjudged = dataclasses.replace(EXPERIENCE, scores={"score": np.zeros((2, 2))})
    scorer: Any = LengthScorer()
    found = add_model_scores(unjudged, PROMPT_SET, scorer)
    assert set(found.scores) == {"score", "reward_model"}
    np.testing.assert_array_equal(found.scores["score"], found.scores["reward_model"])


@pytest.mark.parametrize(("enable", "log"), [(True, True), (True, False), (False, True)])
def test_the_overlong_penalty_counts_only_where_it_is_enabled_and_its_share_is_logged_if_asked(enable, log):
    buffer = OverlongBufferConfig(enable=enable, len=2, penalty_factor=0.5, log=log)
    found = add_rewards(EXPERIENCE, buffer, NO_LENGTH, max_response_length=4, mesh=mesh_of((8, 1, 1))).scores
    penalty = [[0, 0], [-0.25, -0.5]] if enable else np.zeros((2, 2))
    np.testing.assert_allclose(found["overlong_reward"], penalty)
    np.testing.assert_allclose(found["seq_reward"], EXPERIENCE.scores["score"] + penalty)
    np.testing.assert_array_equal(found["score"], EXPERIENCE.scores["score"])
    assert ("overlong" in found) == (enable and log)
    if "overlong" in found:
        np.testing.assert_array_equal(found["overlong"], [[0, 0], [1, 1]])


@pytest.mark.parametrize(("form", "expected"), [("group", [[1.0, -1.0], [-1.0, -1.0]]), ("cosine", [])])
def test_a_length_reward_is_a_score_of_its_own_and_changes_no_other(form, expected):
    settings, mesh = LengthRewardConfig(form=form, weight=2.0), mesh_of((8, 1, 1))
    buffer = OverlongBufferConfig(enable=True, len=2, penalty_factor=0.5)
    plain = add_rewards(EXPERIENCE, buffer, NO_LENGTH, max_response_length=4, mesh=mesh).scores
    found = add_rewards(EXPERIENCE, buffer, settings, max_response_length=4, mesh=mesh).scores
    assert "length_reward" not in plain
    np.testing.assert_allclose(found["seq_reward"], plain["seq_reward"] + found["length_reward"], rtol=1e-6)
    for name, values in EXPERIENCE.scores.items():
        np.testing.assert_array_equal(found[name], values)
    if expected:  # the group's lengths are 1, 2 and 3, 4; the first of each pair is right, or the second
        np.testing.assert_allclose(found["length_reward"], [[1.0, -1.0], [0.0, -1.0]])


@pytest.mark.slow
@pytest.mark.parametrize("function", ["none", "arithmetic"])
def test_a_run_trains_on_the_sum_of_verifier_and_reward_model(directory, tmp_path, function):
    changes = {"reward.function": function, "reward.model.path": str(directory), "trainer.total_training_steps": 2}
    train(small_config(tmp_path, **changes, **{"algorithm.filter_groups.metric": "score"}))
    rows = read_metrics(tmp_path)
    names = {name for row in rows for name in row}
    assert any("/acc/" in name for name in names) == (function != "none")
    part = next(name for name in names if name.startswith("eval/") and "/reward_model/mean@" in name)
    for row in (row for row in rows if part in row):
        accuracy = row.get(part.replace("reward_model", "acc"), 0.0)
        assert row[part.replace("reward_model", "score")] == pytest.approx(accuracy + row[part])
    for row in rows[1:]:
        assert np.isfinite(row["actor/pg_loss"]) and row["actor/grad_norm"] > 0
        expected = row.get("rollout/acc/mean", 0.0) + row["rollout/reward_model/mean"]
        assert row["rollout/score/mean"] == pytest.approx(expected) != 0
        assert 0 < row["perf/reward_model_efficiency"] < 1
