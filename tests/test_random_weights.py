"""--random_weights, and `random_model` behind it."""

import json

import pytest
import torch
from tiny import FAMILIES, make_config, write_checkpoint

import cli
from checkpoint import load_model, random_model
from generate import generate
from quantize import Int4Linear, Int8Linear


def write_config(path, family="llama", **overrides):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(make_config(family, **overrides)))
    return path


@pytest.mark.parametrize("mode, groupsize", [(None, None), ("int8", None), ("int4", 32)])
@pytest.mark.parametrize("family", ["llama", "llama32", "qwen2", "qwen3"])
def test_logits_are_finite_and_of_the_usual_size(tmp_path, family, mode, groupsize):
    model = random_model(write_config(tmp_path / family, family), mode=mode, groupsize=groupsize)
    model.setup_caches(1, 32)
    with torch.inference_mode():
        logits = model(torch.arange(32)[None], torch.arange(32))
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3
    layers = [type(m) for m in model.modules() if isinstance(m, Int8Linear | Int4Linear)]
    expected = {None: set(), "int8": {Int8Linear}, "int4": {Int4Linear, Int8Linear}}[mode]
    assert set(layers) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_it_has_what_a_loaded_model_has(tmp_path, family, precision):
    path = write_checkpoint(tmp_path / family, family)
    loaded, random = load_model(path, "cpu", precision), random_model(path / "config.json", "cpu", precision)
    assert {n: (t.shape, t.dtype) for n, t in loaded.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in random.state_dict().items()
    }
    tied = random.output.weight is random.tok_embeddings.weight
    assert tied == (loaded.output.weight is loaded.tok_embeddings.weight)


def test_the_weights_are_always_the_same(tmp_path):
    config = write_config(tmp_path / "m")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = random_model(config)
    assert torch.equal(torch.get_rng_state(), before)  # and the caller's generator is left alone
    torch.manual_seed(2)
    other = random_model(config)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_the_command_prints_token_ids(tmp_path, capsys):
    config = write_config(tmp_path / "m")
    stats = tmp_path / "stats.json"
    flags = ["--max_new_tokens", "5", "--temperature", "0", "--stats_json", str(stats)]
    assert cli.main(["--random_weights", f"{config}:int8", "--device", "cpu", *flags]) == 0
    out = capsys.readouterr().out.split()
    sample = json.loads(stats.read_text())["samples"][0]
    assert sample["prompt_tokens"] == 16
    assert [int(word) for word in out] == sample["generated_tokens"]
    assert len(out) == 5
    model = random_model(config, mode="int8")
    prompt = torch.randint(model.args.vocab_size, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        assert generate(model, prompt, 5, temperature=0)[1]["generated_tokens"] == sample["generated_tokens"]


@pytest.mark.parametrize("draft", [[], ["--draft", "ngram", "--compare"]])
@pytest.mark.parametrize("mode", ["", ":int8", ":int4"])
def test_it_runs_with_batches_and_lookups(tmp_path, capsys, mode, draft):
    config = write_config(tmp_path / "m") / "config.json"
    flags = ["--prompt", "7", "--max_new_tokens", "4", "--batch_size", "2", "--device", "cpu"]
    assert cli.main(["--random_weights", f"{config}{mode}", *flags, *draft]) == 0
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()] == [4, 4]


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--checkpoint_path", "there"], "--checkpoint_path exclude each other"),
        (["--chat"], "--chat needs a tokenizer"),
        (["--interactive"], "--interactive needs a tokenizer"),
        (["--prompt_file", "text"], "--prompt_file needs a tokenizer"),
        (["--draft_checkpoint_path", "there"], "--draft_checkpoint_path needs a tokenizer"),
        (["--prompt", "Once upon a time"], "INTEGER"),
        (["--prompt", "-"], "INTEGER"),
        (["--prompt", "0"], "1 token at least"),
        (["--prompt", "300"], "the context of"),
    ],
)
def test_what_needs_a_tokenizer_is_refused_in_one_line(tmp_path, capsys, flags, says):
    config = write_config(tmp_path / "m")
    assert cli.main(["--random_weights", str(config), "--device", "cpu", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert says in captured.err


@pytest.mark.parametrize("text", ["nowhere", "nowhere:int8", "nowhere/config.json:int4"])
def test_a_config_that_is_not_there(tmp_path, capsys, text):
    assert cli.main(["--random_weights", str(tmp_path / text), "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no such file" in err


def test_int4_groups_that_do_not_divide(tmp_path, capsys):
    config = write_config(tmp_path / "m", "odd")
    assert cli.main(["--random_weights", f"{config}:int4", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "groups of 32 do not divide" in err
