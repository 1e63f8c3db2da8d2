from __future__ import annotations

import math

import torch
from lm_model import VOCABULARY, LanguageModel, draw_batch, loss_of, read_source


def test_the_text_is_python_source_of_exactly_the_size_asked_for() -> None:
    text = read_source(50_000)
    assert text.dtype == torch.uint8
    assert text.shape == (50_000,)
    source = bytes(text.tolist())
    assert b"import " in source
    assert b"def " in source


def test_a_larger_budget_goes_on_where_a_smaller_one_ended() -> None:
    assert torch.equal(read_source(90_000)[:40_000], read_source(40_000))


def test_a_batch_is_pieces_of_the_text_and_depends_on_its_key_alone() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batch = draw_batch(text, 5, 16, (0, 1, 2, 3))
    assert batch.shape == (5, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    torch.manual_seed(123)
    assert torch.equal(batch, draw_batch(text, 5, 16, (0, 1, 2, 3)))


def test_other_seeds_steps_parts_and_ranks_see_other_pieces() -> None:
    text = read_source(50_000)
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)]
    batches = {tuple(draw_batch(text, 4, 8, key).flatten().tolist()) for key in keys}
    assert len(batches) == len(keys)


def test_every_piece_of_the_text_can_be_drawn() -> None:
    text = torch.arange(6, dtype=torch.uint8)
    firsts = {int(draw_batch(text, 1, 3, (step,))[0, 0]) for step in range(200)}
    assert firsts == {0, 1, 2}


def test_no_byte_sees_those_behind_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel(layers=2, width=32, heads=4, context=16)
    tokens = torch.randint(VOCABULARY, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_an_untrained_model_knows_nothing() -> None:
    torch.manual_seed(0)
    model = LanguageModel(layers=2, width=64, heads=4, context=64)
    loss = loss_of(model, draw_batch(read_source(100_000), 16, 64, (0,)))
    assert abs(loss.item() - math.log(VOCABULARY)) < 0.2


def test_embedding_and_output_layer_are_one_tensor() -> None:
    model = LanguageModel(layers=1, width=32, heads=4, context=16)
    assert [name for name, parameter in model.named_parameters() if parameter.shape[0] == VOCABULARY] == [
        "embedding.weight"
    ]
