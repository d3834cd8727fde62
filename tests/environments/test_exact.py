"""Laws: no token or reward of an episode depends on segments, slots, pages, chunks, workers or processes."""

import dataclasses
import functools
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import pytest
from environments.test_episodes import config_of
from rollout.small_rollouts import queues_of

import dapo_jax as dx
from dapo_jax.data.experience import concatenate, from_arrays, to_arrays
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.environments.protocol import Fault, Reply
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.rewards.verification import Verification
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.run import replies, sampler
from dapo_jax.run.episodes import open_environments
from dapo_jax.run.segments import SegmentedRollout, Segments

N, LENGTH = 4, 40


def sampled(*segments, most_s=0.0, **changes):
    """Episodes to two sums by one policy, for each number in segments of so many tokens; 0 = whole.

    Of what a step has begun, only the arrays of a checkpoint reach the next.
    """
    changes = {"data.max_response_length": LENGTH, "rollout.n": 1, "evaluate.n": 1, **changes}
    config = config_of("unused", arguments={"first": "now: ", "most_s": most_s}, **changes)
    with dx.Policy(config) as policy, open_environments(config, policy.tokenizer) as environments:
        prompts = [[{"role": "user", "content": f"{n} + 1 ="}] for n in range(2)]
        rows = [PromptRow(tuple(prompt), "", str(n + 1), {}) for n, prompt in enumerate(prompts)]
        prompt_set = PromptSet(rows, policy.tokenizer.encode_prompts(prompts, config.data))

        def verify(chosen):
            return Verification(None, policy.tokenizer, [rows[row] for row in chosen], N, check=lambda: None)

        def in_segments(length):
            begun, found = None, []
            for version in range(-(-LENGTH // length)):
                given = of_policy, request, prompt_set, int, verify, version
                rollout = SegmentedRollout(*given, segments=Segments(length, LENGTH), begun=begun)
                rollout.start([] if version else range(2))
                found.append(rollout.wait())
                if (left := rollout.sampled.left) is None:
                    break
                rollout.segments.check(left, version + 1)
                begun = from_arrays(to_arrays(left, prompt_set), prompt_set, policy.tokenizer)
            groups = concatenate([part for part in found if part is not None])
            assert len(groups) == 2
            return groups.select(np.argsort(groups.numbers))

        of_policy = dataclasses.replace(policy._sampler, environments=environments)
        with jax.set_mesh(of_policy.mesh):
            weights = policy._learner.networks.decode_weights(policy._models.actor.params)
            request = of_policy.request(weights, N, TRAIN, Sampling.create(1.0, 1.0, -1))
            return [
                in_segments(length) if length else of_policy.sample(request, prompt_set, range(2), verify)
                for length in segments
            ]


@functools.cache
def whole():
    [found] = sampled(0)
    return found


def assert_equal(found, expected):
    for name in ("prompts", "responses", "mask", "by_policy", "finished", "texts", "scores", "failed"):
        np.testing.assert_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.long("22")
@pytest.mark.parametrize("segment", [1, 6, 22])
def test_episodes_in_segments_are_whole_episodes(segment):
    """Also where a turn ends at a segment's end, and what the environment says reaches past one or several."""
    expected, found = sampled(0, segment, **{"rollout.decode_chunk_length": 22})
    assert expected.scores["num_turns"].max() == 3 and expected.by_policy is not None
    *_, ends = np.nonzero(expected.by_policy[..., :-1] & (expected.mask & ~expected.by_policy)[..., 1:])
    assert ((ends + 1) % segment == 0).any()
    assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.long("'rollout.decode_chunk_length': 4")
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.max_num_seqs": 1, "environment.num_workers": 3},
        {"rollout.decode_chunk_length": 4, "rollout.max_num_seqs": 8},
        {"rollout.decode_chunk_length": 64, "rollout.max_num_seqs": 64},
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    ],
    ids=str,
)
def test_slots_chunks_and_devices_change_nothing_while_tools_sleep(changes):
    for found in sampled(0, 12, most_s=0.01, **changes):
        assert_equal(found, whole())


@pytest.mark.slow
def test_pages_that_are_given_up_change_nothing(monkeypatch):
    expected = whole()
    monkeypatch.setattr(sampler, "page_attention", lambda settings: (attend_gathered, ""))
    queues = queues_of(monkeypatch, 18)
    for found in sampled(0, 12, most_s=0.01, **{"rollout.decode_chunk_length": 4}):
        assert_equal(found, expected)
    assert sum(shard.given_up for queue in queues for shard in queue.shards) > 0


def test_all_processes_hear_all_replies(monkeypatch):
    """Two threads as processes, of which the second waits for a slow reply."""
    barrier, said = threading.Barrier(2, timeout=60), {}

    def gather(value):
        said[threading.current_thread().name] = json.loads(json.dumps(value))
        barrier.wait()
        found = [said[name] for name in sorted(said)]
        barrier.wait()
        return found

    def future(value):
        made = Future()
        made.set_exception(value) if isinstance(value, Exception) else made.set_result(value)
        return made

    monkeypatch.setattr(replies, "gather", gather)
    monkeypatch.setattr(replies, "WAIT_S", 0.01)
    slow, checks = Future(), [0, 0]

    def check(process):
        checks[process] += 1
        if process == 1 and checks[1] == 3:
            slow.set_result(Reply(done=True, numbers={"acc": 1 / 3}))

    first = [{4: [future(Fault("gone"))], 1: []}, {}, {0: [], 7: [future(Reply(reward=0.1)), future(Reply(ends=True))]}]
    second = [{4: [], 1: [slow]}, {}, {0: [future(Reply([{"role": "user", "content": "é"}]))], 7: []}]
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(replies.exchanged, asked, functools.partial(check, process))
            for process, asked in enumerate((first, second))
        ]
        heard = [one.result() for one in both]
    for one in heard:
        assert str(one[0].pop(4)[0]) == "gone"
    assert (
        heard[0]
        == heard[1]
        == [
            {1: [Reply(done=True, numbers={"acc": 1 / 3})]},
            {},
            {0: [Reply([{"role": "user", "content": "é"}])], 7: [Reply(reward=0.1), Reply(ends=True)]},
        ]
    )
    assert checks[0] == checks[1] == 3
