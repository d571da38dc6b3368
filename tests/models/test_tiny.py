"""The tiny model and its tokenizer, through the folder that they are saved in."""

import string

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.models.tiny import WarmStart, random_model, recipe_hash, tiny_model, tiny_tokenizer, warm_up
from stretto.models.user_cache import user_cache

SHORT = WarmStart(steps=2, problems=4)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3, warm_start=SHORT)


def test_the_tokenizer_gives_back_every_text_through_its_folder(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("4+3*17?", "024017000=0", "two  spaces , and\nlines ", string.printable[:95], "<eo s>", " ' s n't"):
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text)
        assert tokenizer.decode(tokens) == text
        assert tokens == tiny_tokenizer().encode(text)


def test_special_tokens_are_known_and_can_be_left_out(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    tokens = [*tokenizer.encode("=4"), 1, 0]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "=4"
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "user: hi\nassistant: "


def test_the_model_loads_as_any_other_and_ends_with_its_own_token(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 250_000 < sum(parameter.numel() for parameter in model.parameters()) < 350_000


def test_a_model_is_made_once_and_the_same_again(folder, tmp_path, monkeypatch):
    reports = []
    again = tiny_model(tmp_path / "again", seed=3, warm_start=SHORT, progress=lambda *report: reports.append(report))
    assert [(step, steps) for step, steps, _ in reports] == [(1, 2), (2, 2)]
    one, other = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert tiny_model(again, seed=3, warm_start=SHORT, progress=pytest.fail) == again
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_the_cache_is_keyed_by_all_that_the_weights_depend_on(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    none = WarmStart(steps=0)
    path = tiny_model(seed=1, warm_start=none)
    assert path.parent == user_cache() == tmp_path / "stretto"
    assert tiny_model(seed=1, warm_start=none) == path
    assert tiny_model(seed=2, warm_start=none) != path
    keys = {recipe_hash(1, none), recipe_hash(2, none), recipe_hash(1, SHORT), recipe_hash(1, WarmStart())}
    assert len(keys) == 4


def test_a_folder_that_is_in_the_way_is_not_overwritten(tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep")
    with pytest.raises(OSError):
        tiny_model(target, warm_start=WarmStart(steps=0))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_warm_start_lowers_the_loss():
    losses = warm_up(random_model(0), tiny_tokenizer(), seed=0, options=WarmStart(steps=25, problems=8))
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0]


def test_making_a_model_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    random_model(7)
    assert torch.equal(torch.rand(3), expected)
