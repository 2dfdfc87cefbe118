"""Every command in docs/speculative.md runs as written, and every name it points to is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint
import cli
import generate
import model
import tokenizer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "speculative.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines() if line]


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


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_command_of_the_page_runs_as_written(checkout, number):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        ["bash", "-c", COMMANDS[number]], cwd=checkout, capture_output=True, text=True, env=environment, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr and "warning" not in run.stderr
    if "quantize.py" not in COMMANDS[number]:
        assert run.stdout.strip() and "tokens/s" in run.stderr
    if "--explain" in COMMANDS[number]:
        assert "read bandwidth" in run.stderr or "GB/s" in run.stderr
    for made in re.findall(r"--trace (\S+)", COMMANDS[number]):
        assert "</html>" in (checkout / made).read_text(encoding="utf-8")


def test_the_page_has_a_command_for_most_questions():
    assert len(COMMANDS) >= 6 and len(re.findall(r"^## \d+\.", PAGE, re.M)) == 15


def test_every_name_the_page_points_to_is_there():
    modules = (generate, model, checkpoint, cli, tokenizer)
    names = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", PAGE)) - {"accepted", "auto"}
    known = {name for name in names if any(found(module, name) for module in modules)}
    files = {name for name in names if (ROOT / name).exists() or (ROOT / "tests" / name).exists()}
    assert {"speculative_decode", "accept_or_resample", "ModelDraft.feed", "KVCache", "DraftLength"} <= known
    assert not names - known - files, names - known - files


def found(module: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True
