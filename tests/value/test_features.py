import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.policy.adapters import LoraSettings
from rrl_core.policy.model import ModelSpec, load_policy_model
from rrl_core.value.features import StateSequence, backbone_digest, state_features
from tests.policy_learner.models import ARCHITECTURES, VOCABULARY, llama, trained

SAME = 1e-4  # absolute; features are of the order of 1
FAR = 1e-1

# Two responses of one prompt with a common beginning, one of another, a prompt alone.
SEQUENCES = [
    StateSequence((1, 2, 3, 4), (10, 11, 12, 13, 14, 258), (0, 2, 4)),
    StateSequence((1, 2, 3, 4), (10, 11, 20, 21), (4, 1)),
    StateSequence((5,), tuple(range(30, 60)), (1, 24)),
    StateSequence((9, 8, 7), (), (0,)),
]
NUM_STATES = 8


@pytest.fixture(params=ARCHITECTURES, scope="module")
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def alone(policy, prompt_ids, completion_ids, prefix_tokens):
    """The obvious way: the base model over one state, without adapter, batch or mask."""
    input_ids = torch.tensor([[*prompt_ids, *completion_ids[:prefix_tokens]]])
    with torch.no_grad(), policy.model.disable_adapter():
        outputs = policy.model(input_ids=input_ids, output_hidden_states=True)
    return outputs.hidden_states[-1][0, -1].numpy()


def all_alone(policy, sequences):
    rows = [
        alone(policy, s.prompt_ids, s.completion_ids, t) for s in sequences for t in s.prefix_tokens
    ]
    return np.stack(rows)


@pytest.mark.parametrize("max_tokens", [1, 20, 1000])
def test_features_are_the_last_hidden_state_of_each_state_alone(policy, max_tokens):
    features = state_features(policy, SEQUENCES, max_tokens)
    assert features.dtype == np.float32
    assert features.shape == (NUM_STATES, policy.model.get_base_model().config.hidden_size)
    np.testing.assert_allclose(features, all_alone(policy, SEQUENCES), atol=SAME, rtol=0)


def test_the_hidden_state_is_taken_after_the_final_norm(policy):
    """What the head turns into the model's own logits."""
    base = policy.model.get_base_model()
    features = state_features(policy, SEQUENCES[:1], 100)
    input_ids = torch.tensor([[1, 2, 3, 4, 10, 11, 12, 13]])
    with torch.no_grad(), policy.model.disable_adapter():
        logits_TV = policy.model(input_ids=input_ids).logits[0]
        rebuilt_SV = base.get_output_embeddings()(torch.from_numpy(features))
    torch.testing.assert_close(rebuilt_SV, logits_TV[[3, 5, 7]], atol=SAME, rtol=0)


def test_the_same_list_gives_the_same_bits(policy):
    first, second = (state_features(policy, SEQUENCES, 40) for _ in range(2))
    assert first.tobytes() == second.tobytes()


sequences = st.builds(
    lambda prompt, completion, cuts: StateSequence(
        tuple(prompt), tuple(completion), tuple(sorted({min(c, len(completion)) for c in cuts}))
    ),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    st.lists(st.sampled_from([1, 2, 256, 258]), max_size=10),
    st.lists(st.integers(0, 10), max_size=4),
)


@settings(max_examples=20)
@given(batch=st.lists(sequences, min_size=1, max_size=6), max_tokens=st.integers(1, 80))
def test_what_else_is_in_the_batch_does_not_matter(policy, batch, max_tokens):
    together = state_features(policy, batch, max_tokens)
    apart = [state_features(policy, [sequence], 1000) for sequence in batch]
    np.testing.assert_allclose(together, np.concatenate(apart), atol=SAME, rtol=0)
    reverse = state_features(policy, batch[::-1], max_tokens)
    again = np.concatenate(np.split(reverse, np.cumsum([len(a) for a in apart[::-1]])[:-1])[::-1])
    np.testing.assert_allclose(together, again, atol=SAME, rtol=0)


def test_a_response_is_run_once_and_only_as_far_as_its_last_state(policy):
    num_tokens = []
    decoder = policy.model.get_base_model().get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: num_tokens.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    with hook:
        state_features(policy, [StateSequence((1, 2), tuple(range(3, 53)), (0, 5, 10, 40))], 1000)
        # The prompt is run once for both responses: 4 + 4 tokens, and 2 of the second's own.
        state_features(policy, SEQUENCES[:2], 1000)
    assert num_tokens == [42, 10]


def test_training_does_not_change_features_and_a_start_adapter_does(tmp_path):
    policy = llama()
    before = state_features(policy, SEQUENCES, 100)
    digest = backbone_digest(policy)
    trained(policy)
    after = state_features(policy, SEQUENCES, 100)
    assert before.tobytes() == after.tobytes()
    assert backbone_digest(policy) == digest == policy.base_digest
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(policy.adapter_bytes())
    spec = ModelSpec("tiny", device="cpu", lora=LoraSettings(rank=4), start_adapter=path)
    started = load_policy_model(spec, seed=1)
    moved = state_features(started, SEQUENCES, 100)
    assert np.abs(moved - before).max() > FAR
    assert backbone_digest(started) == policy.digest() != digest


def test_the_policy_is_left_as_it_was(policy):
    state = policy.adapter_digest()
    gradients = torch.is_grad_enabled()
    state_features(policy, SEQUENCES, 100)
    assert policy.adapter_digest() == state
    assert torch.is_grad_enabled() == gradients
    assert not policy.model.training


def test_no_states_give_no_rows(policy):
    width = policy.model.get_base_model().config.hidden_size
    assert state_features(policy, [], 100).shape == (0, width)
    assert state_features(policy, [StateSequence((1,), (2, 3), ())], 100).shape == (0, width)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (StateSequence((), (1, 2), (1,)), "prompt of at least one token.*index 1"),
        (StateSequence((1,), (1, 2), (3,)), "between 0 and the 2 tokens.*index 1"),
        (StateSequence((1,), (1, 2), (-1,)), "between 0 and the 2 tokens.*index 1"),
        (StateSequence((1,), (2,) * 3000, (2500,)), "context of .* tokens.*2501.*index 1"),
    ],
)
def test_states_that_do_not_exist_are_refused(policy, sequence, message):
    with pytest.raises(ValueError, match=message):
        state_features(policy, [SEQUENCES[0], sequence], 100)
