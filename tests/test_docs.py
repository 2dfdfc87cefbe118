"""Every command in docs/speculative.md runs as written, and every name it points to is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint
import cli
import explain
import generate
import model
import quantize
import tokenizer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "speculative.md").read_text(encoding="utf-8")
QUESTIONS = {int(number): text for number, text in re.findall(r"^## (\d+)\.(.*?)(?=^## )", PAGE, re.M | re.S)}
BLOCKS = [(number, block) for number, text in QUESTIONS.items() for block in re.findall(r"```sh\n(.*?)```", text, re.S)]

# What the page says that its commands print, where that is the same on every machine.
SHOWS = {
    1: r"\d+ billion operations/s, \d+ GB/s read",
    2: r"logits \[1, 5, 49152\] differ by at most (0\.0$|\d(\.\d+)?e-0[4-9])",
    3: r"the same ids 1\.0 accepted: (.+)\nother ids 0\.0 accepted: \1",
    6: r"gives tensor\(\[0\.92",
    7: r"(p = .* drawn tensor\(\[0\.(60|59[5-9])\d*, 0\.(30|29[5-9])\d*, 0\.(10|09[5-9])\d*\]\)\n){3}",
    9: r"alpha 0\.5 k = 0 \.\.\. 8: 1\.00 1\.50 1\.75",
    11: r"accepted \[3\]\ndraft \[\d+, \d+\] ",
    13: r"float32: 538 MB held, 538 MB read by a step, 46 MB of.*\nint8: 249 MB held, 135 MB read by a step, 46 MB of",
    14: r"5 of 7 rounds drafted nothing",
    15: r"red, green, blue.*'tokens_per_pass': [34]",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, smollm2_dir):
    """A directory that looks like this one after the quickstart, and may be written to."""
    root = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in (".venv", "checkpoints"):
            (root / path.name).symlink_to(path)
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (root / ".venv" / "bin" / "python").chmod(0o755)
    copy = root / "checkpoints" / smollm2_dir.name
    copy.mkdir(parents=True)
    for path in smollm2_dir.iterdir():
        if not path.name.startswith("model_"):  # the page makes its quantized files itself
            (copy / path.name).symlink_to(path)
    return root


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"question {question}" for question, _ in BLOCKS])
def test_a_command_of_the_page_runs_as_written(checkout, number):
    question, commands = BLOCKS[number]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=checkout, capture_output=True, text=True, env=environment, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() and "Traceback" not in run.stderr and "warning" not in run.stderr.lower()
    assert re.search(SHOWS.get(question, ""), run.stdout + run.stderr, re.M), run.stdout + run.stderr
    assert run.stderr.count(" tokens/s: ") == commands.count("generate.py")
    assert run.stderr.count("; memory gives ") == commands.count("--explain")
    for made in re.findall(r"--trace (\S+)", commands):
        assert "</html>" in (checkout / made).read_text(encoding="utf-8")


def test_the_page_has_fifteen_questions():
    assert list(QUESTIONS) == list(range(1, 16))


@pytest.mark.parametrize("question", range(1, 16))
def test_every_question_has_a_command_and_a_pointer(question):
    """A pointer says "Read:" and names something; that it is there, the next test checks."""
    assert any(number == question for number, _ in BLOCKS)
    (pointer,) = re.findall(r"^Read: (.*?)\n\n", QUESTIONS[question], re.M | re.S)
    assert "`" in pointer


def test_every_name_the_page_points_to_is_there():
    modules = (generate, model, checkpoint, cli, explain, quantize, tokenizer)
    names = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", PAGE)) - {"accepted", "auto", "cost", "tokens"}
    known = {name for name in names if any(found(module, name) for module in modules)}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    known |= {name for name in names if name.startswith("test_") and f"def {name}(" in tests}
    files = {name for name in names if (ROOT / name).exists() or (ROOT / "tests" / name).exists()}
    assert {"speculative_decode", "accept_or_resample", "ModelDraft.feed", "KVCache", "DraftLength"} <= known
    assert not names - known - files, names - known - files


def found(module: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True
