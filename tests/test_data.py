import importlib.util
import socket

import numpy as np
import pytest
import torch

from minizero import data
from minizero.model import GPT


def test_the_vocabulary_is_the_texts_characters_once_and_sorted():
    vocabulary = data.vocabulary()
    assert len(vocabulary) == 70
    assert list(vocabulary) == sorted(set(vocabulary))


def test_decode_is_the_inverse_of_encode():
    text = "To be, or not to be?\n"
    numbers = data.encode(text)
    assert numbers.dtype == torch.int64 and numbers.shape == (len(text),)
    assert data.decode(numbers) == text


def test_a_characters_number_is_its_place_in_the_vocabulary():
    assert data.encode(data.vocabulary()).tolist() == list(range(70))


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match="'Ψ'"):
        data.encode("16Ψ")


def test_the_splits_are_the_text_cut_nine_to_one():
    train, validation = data.tokens("train"), data.tokens("validation")
    assert len(validation) == (len(train) + len(validation)) // 10
    whole = data.decode(np.concatenate([train, validation]))
    assert whole.lstrip().startswith("HAMLET, PRINCE OF DENMARK")
    assert whole.rstrip().endswith("[Exit.]")
    assert len(whole) == 373497


def test_the_text_is_read_at_its_first_use_and_once():
    spec = importlib.util.spec_from_file_location("a_second_minizero_data", data.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh._corpus.cache_info().misses == 0
    fresh.vocabulary()
    fresh.tokens("train")
    assert fresh._corpus.cache_info().misses == 1


def test_the_text_needs_no_network(monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    data._corpus.cache_clear()
    assert data.vocabulary()


def test_no_tensor_keeps_the_text_alive():
    assert isinstance(data.tokens("train"), np.ndarray)


def test_batches_are_pairs_of_int64_shifted_by_one_character():
    pairs = list(data.batches("train", batch_size=4, context=16, steps=3))
    assert len(pairs) == 3
    for x, y in pairs:
        assert x.shape == y.shape == (4, 16)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert x.is_contiguous() and y.is_contiguous()


@pytest.mark.parametrize("split", data.SPLITS)
def test_a_row_is_a_piece_of_its_own_split(split):
    text = data.decode(data.tokens(split))
    for x, y in data.batches(split, 8, 32, 2):
        for row, target in zip(x, y, strict=True):
            assert data.decode(row) + data.decode(target[-1:]) in text


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 12])
def test_the_ranks_rows_in_rank_order_are_what_one_process_sees(world_size):
    alone = list(data.batches("train", 12, 8, 5, seed=7))
    together = zip(*(data.batches("train", 12, 8, 5, 7, rank, world_size) for rank in range(world_size)), strict=True)
    for (x, y), shares in zip(alone, together, strict=True):
        assert all(len(share_x) == 12 // world_size for share_x, _ in shares)
        assert torch.equal(torch.cat([share_x for share_x, _ in shares]), x)
        assert torch.equal(torch.cat([share_y for _, share_y in shares]), y)


def test_seed_and_step_choose_the_rows():
    (a, _), (b, _) = data.batches("train", 4, 16, 2, seed=0)
    ((again, _),) = data.batches("train", 4, 16, 1, seed=0)
    ((other, _),) = data.batches("train", 4, 16, 1, seed=1)
    assert torch.equal(a, again)
    assert not torch.equal(a, b)
    assert not torch.equal(a, other)


def test_batches_leave_the_global_random_numbers_alone():
    torch.manual_seed(1)
    np_state, state = np.random.get_state()[1].copy(), torch.get_rng_state()
    list(data.batches("train", 4, 16, 2, seed=0))
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == np_state).all()


def test_the_longest_context_still_has_a_target():
    longest = len(data.tokens("validation")) - 1
    ((x, y),) = data.batches("validation", 1, longest, 1)
    assert x.shape == y.shape == (1, longest)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "test"}, "split='test': choose one of 'train', 'validation'"),
        ({"batch_size": 5, "world_size": 2}, "batch_size=5 does not split into world_size=2"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"context": 0}, "context=0"),
        ({"context": 10**6}, "context=1000000"),
    ],
)
def test_wrong_arguments_fail_at_the_call_and_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        data.batches(**({"split": "train", "batch_size": 4, "context": 8, "steps": 1} | wrong))


class Successor(torch.nn.Module):
    """Stands for a model that has learnt to count: after token t comes t + 1, almost surely."""

    def __init__(self, context=4, logit=10.0):
        super().__init__()
        self.config = type("Config", (), {"context": context})
        self.weight = torch.nn.Parameter(torch.tensor(logit))

    def forward(self, x):
        assert x.shape[1] <= self.config.context
        return torch.nn.functional.one_hot((x + 1) % 70, 70) * self.weight


def test_sample_appends_length_characters_to_the_prompt():
    assert data.sample(Successor(), "ABC", 5, temperature=0) == "ABCDEFGH"


def test_sample_is_fixed_by_its_seed():
    texts = [data.sample(Successor(logit=1.0), "A", 20, seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_a_low_temperature_is_nearly_greedy_and_a_high_one_is_not():
    model = Successor(logit=5.0)
    greedy = data.sample(model, "A", 15, temperature=0)
    assert data.sample(model, "A", 15, temperature=0.1) == greedy
    assert data.sample(model, "A", 15, temperature=5.0) != greedy


def test_sample_leaves_the_model_and_the_random_numbers_as_they_were():
    for training in (True, False):
        model = GPT.preset("nano", dropout=0.5).train(training)
        state = torch.get_rng_state()
        assert data.sample(model, "A", 3) == data.sample(model, "A", 3)
        assert model.training is training
        assert torch.equal(torch.get_rng_state(), state)


def test_sample_wants_a_prompt():
    with pytest.raises(ValueError, match="prompt is empty"):
        data.sample(Successor(), "", 5)
