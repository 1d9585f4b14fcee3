import math

import pytest
import torch

from minizero import data
from minizero.model import GPT, PRESETS, GPTConfig

CONFIG = GPTConfig(vocab_size=11, context=8, layers=2, heads=2, width=16)


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT.preset("nano", **changes)


def tokens(*shape, seed=0):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


def test_logits_are_one_row_of_the_vocabulary_per_token():
    assert GPT(CONFIG)(tokens(3, 8)).shape == (3, 8, 11)
    assert GPT(CONFIG)(tokens(3, 5)).shape == (3, 5, 11)


def test_loss_is_the_mean_cross_entropy_of_the_logits():
    model, x, y = GPT(CONFIG), tokens(3, 8), tokens(3, 8, seed=1)
    by_hand = -model(x).log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x, y), by_hand)
    assert model(x, y).shape == ()


def test_an_untrained_model_guesses_all_characters_alike():
    x, y = next(data.batches("train", 8, 64, 1))
    for tied in (False, True):
        assert abs(build(tied=tied)(x, y).item() - math.log(70)) < 0.6


def test_a_token_does_not_see_those_after_it():
    model, x = GPT(CONFIG), tokens(1, 8)
    changed = x.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    differs = (model(x) != model(changed)).any(-1)[0]
    assert not differs[:5].any()
    assert differs[5:].all()


def test_the_order_of_tokens_matters():
    model, x = GPT(CONFIG), torch.tensor([[1, 2, 3], [2, 1, 3]])
    a, b = model(x)[:, -1]
    assert not torch.equal(a, b)


def test_the_same_seed_gives_the_same_model():
    a, b, other = build(seed=1).state_dict(), build(seed=1).state_dict(), build(seed=2).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["tokens.weight"], other["tokens.weight"])


def test_state_dict_holds_the_parameters_and_nothing_else():
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert not list(model.buffers())


def test_the_blocks_are_the_children_of_the_only_module_list():
    model = build()
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    assert lists == ["blocks"]
    assert len(model.blocks) == PRESETS["nano"].layers


def test_a_tied_head_is_the_embedding_itself():
    untied, tied = build(), build(tied=True)
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight
    saved = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert saved == 70 * 64


def test_presets_have_the_sizes_that_lessons_quote():
    sizes = {name: sum(p.numel() for p in GPT.preset(name).parameters()) for name in PRESETS}
    assert sizes == {"nano": 113152, "tiny": 827648, "small": 4840448}


def test_presets_know_the_characters_of_the_text():
    assert {config.vocab_size for config in PRESETS.values()} == {len(data.vocabulary())}


def test_every_parameter_receives_a_gradient():
    model = build()
    model(*next(data.batches("train", 2, 64, 1))).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_dropout_draws_in_training_only():
    model, x = build(dropout=0.5), torch.zeros(2, 16, dtype=torch.int64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_attention_drops_out_too():
    torch.manual_seed(0)
    attention = GPT.preset("nano", dropout=0.5).blocks[0].attention
    x = torch.randn(1, 16, 64)
    assert not torch.equal(attention(x), attention(x))


def test_the_loss_is_fp32_in_a_16_bit_model():
    model = build().bfloat16()
    x, y = next(data.batches("train", 2, 64, 1))
    assert model(x).dtype == torch.bfloat16
    assert model(x, y).dtype == torch.float32


def test_sixty_steps_halve_the_perplexity_of_guessing():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x, y in data.batches("train", 8, 64, steps=60):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    x, y = next(data.batches("validation", 32, 64, 1))
    assert model(x, y).item() < math.log(35)


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="width=10 does not split into heads=4"):
        GPTConfig(vocab_size=11, context=8, layers=1, heads=4, width=10)
    with pytest.raises(ValueError, match="row of 9 tokens is longer than the context of 8"):
        GPT(CONFIG)(tokens(1, 9))
    with pytest.raises(ValueError, match="no preset 'huge': choose one of nano, tiny, small"):
        GPT.preset("huge")
