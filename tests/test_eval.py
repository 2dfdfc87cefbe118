"""eval.py: perplexity and distance, on models small enough to check by hand."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint import load_model
from eval import default_text, evaluate, text_windows
from model import ModelArgs, Transformer
from quantize import calibration_text, calibration_windows, quantize_checkpoint

ROOT = Path(__file__).parent.parent
SMOLLM = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
TEXT = ROOT.parent / "shared" / "data" / "tinyshakespeare-40k.txt"


def make_model(seed: int, vocab_size: int = 50) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(
        ModelArgs(vocab_size=vocab_size, n_layer=2, n_head=2, dim=32, intermediate_size=64, block_size=64)
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.setup_caches(1, 64)
    return model.eval()


def test_perplexity_of_a_uniform_model_is_the_vocabulary_size():
    model = make_model(0)
    model.output.weight.data.zero_()
    result = evaluate(model, torch.randint(0, 50, (3, 16)))
    assert result["perplexity"] == pytest.approx(50) and result["predictions"] == 3 * 15


def test_each_window_is_scored_on_its_own_from_its_second_token():
    model, windows = make_model(0), torch.randint(0, 50, (3, 16))
    result = evaluate(model, windows)
    nll = 0.0
    for window in windows:
        with torch.no_grad():
            logits = model(window[None], torch.arange(16))[0].double()
        nll += torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum").item()
    assert result["perplexity"] == pytest.approx(math.exp(nll / 45), rel=1e-6)
    assert evaluate(model, windows[[2, 0, 1]])["perplexity"] == pytest.approx(result["perplexity"], rel=1e-9)


def test_a_model_does_not_differ_from_itself():
    model = make_model(0)
    result = evaluate(model, torch.randint(0, 50, (2, 16)), model)
    assert result["kl"] == 0 and result["agreement"] == 1 and result["largest_difference"] == 0
    assert result["reference_perplexity"] == result["perplexity"]


def test_divergence_is_of_the_model_from_the_reference():
    """KL(p || q) with q uniform is log V less the entropy of the reference p; KL(q || p) is another number."""
    model, reference, windows = make_model(0), make_model(1), torch.randint(0, 50, (2, 16))
    model.output.weight.data.zero_()
    result = evaluate(model, windows, reference)
    with torch.no_grad():
        logits = torch.stack([reference(window[None], torch.arange(16))[0, :-1] for window in windows]).double()
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean().item()
    assert result["kl"] == pytest.approx(math.log(50) - entropy, rel=1e-5) and result["kl"] > 0.01
    assert result["agreement"] == (logits.argmax(-1) == 0).double().mean()  # of equal logits, argmax takes the first
    assert result["largest_difference"] == pytest.approx(logits.abs().max().item(), rel=1e-5)


def test_vocabularies_must_agree():
    with pytest.raises(ValueError, match="the reference has 40 tokens, the model 50"):
        evaluate(make_model(0), torch.randint(0, 40, (1, 8)), make_model(1, vocab_size=40))


def test_default_text_is_long_enough():
    assert default_text() == default_text() and len(default_text().encode()) > 100_000


def command(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "eval.py", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.skipif(not SMOLLM.is_dir() or not TEXT.is_file(), reason="needs SmolLM2 and the shared text")
def test_command(tmp_path):
    ids = text_windows(TEXT.read_text(), SMOLLM, 32, 100)
    assert ids.shape == (3, 32) and ids[0, :4].tolist() == [5345, 32062, 42, 198]  # no BOS; whole windows only
    out = tmp_path / "figures.json"
    arguments = ["--checkpoint_path", SMOLLM, "--text", TEXT, "--window", 32, "--max_tokens", 100, "--json", out]
    done = command(*arguments, "--device", "cpu")
    result = json.loads(out.read_text())
    assert done.returncode == 0 and f"{result['perplexity']:.4f}" in done.stdout and "3/3 windows" in done.stderr
    assert result["window"] == 32 and result["windows"] == 3 and result["predictions"] == 93
    assert os.listdir(tmp_path) == ["figures.json"]


@pytest.mark.skipif(not SMOLLM.is_dir(), reason="needs SmolLM2")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "missing.txt"),
        (["--window", "1"], "--window 1"),
        (["--window", "5000"], "--window 5000: at least 2 and at most the text's 4096 tokens"),
        (["--checkpoint_path", "missing"], "missing"),
        (["--text", str(SMOLLM / "model.safetensors")], "not UTF-8 text"),
    ],
)
def test_command_errors_are_one_line(arguments, message):
    done = command("--checkpoint_path", SMOLLM, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr


# ---------------------------------------------------------------- the figures of SmolLM2


@pytest.fixture(scope="module")
def shakespeare(smollm2_dir, shared_dir) -> torch.Tensor:
    """The first 4,096 tokens of the shared text: 8 windows of 512."""
    windows = text_windows((shared_dir / "data" / TEXT.name).read_text(encoding="utf-8"), smollm2_dir, 512, 4096)
    assert windows.shape == (8, 512)
    return windows


@pytest.fixture
def smollm2_copy(smollm2_dir, tmp_path) -> Iterator[Path]:
    """SmolLM2, linked, in a directory that takes quantized files."""
    for file in (*smollm2_dir.glob("*.json"), smollm2_dir / "model.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    yield tmp_path
    for file in tmp_path.glob("model_*.safetensors"):  # hundreds of MB, which pytest would keep
        file.unlink()


def test_smollm2_in_float32_and_int8(smollm2_copy, shakespeare):
    quantized = load_model(quantize_checkpoint(smollm2_copy, "int8"))
    result = evaluate(quantized, shakespeare, load_model(smollm2_copy))
    assert result["reference_perplexity"] == pytest.approx(46.58, abs=0.01)
    assert result["perplexity"] <= 47.0 and result["kl"] <= 0.006


def test_smollm2_in_int4_groups_of_32(smollm2_copy, shakespeare):
    assert evaluate(load_model(quantize_checkpoint(smollm2_copy, "int4", 32)), shakespeare)["perplexity"] <= 46.8


@pytest.mark.slow
def test_smollm2_by_gptq_is_15_percent_better_than_by_rounding(smollm2_copy, shakespeare):
    calibration = calibration_windows(smollm2_copy, calibration_text())
    plain, gptq = (
        evaluate(load_model(quantize_checkpoint(smollm2_copy, "int4", 64, by)), shakespeare)["perplexity"]
        for by in (None, calibration)
    )
    assert plain == pytest.approx(61.6, abs=0.3) and gptq <= 0.85 * 61.6
