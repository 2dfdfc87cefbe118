"""scripts/benchmark.py and scripts/device_check.py: that they run, and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def run(script, *flags, **environment):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *map(str, flags)],
        capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("benchmark") / "tiny", max_position_embeddings=1024)


def test_a_run_measures_and_shows_every_mode(checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    figures, drawing = tmp_path / "run.json", tmp_path / "run.png"
    subset = ["--weights", "int8", "--drafts", "none,ngram,int4", "--k", "2,auto", "--prompts", "copy"]
    short = ["--max_new_tokens", "12", "--repeat", "1", "--no_compile", "--device", "cpu"]
    output = ["--json", figures, "--plot", drawing, "--markdown"]
    done = run("benchmark.py", "--checkpoint_path", checkpoint, *subset, *short, *output)
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text())
    runs = result["weights"]["int8"]["runs"]
    modes = [(run["draft"], run["k"]) for run in runs]
    assert modes == [("none", 0), ("ngram", 2), ("ngram", "auto"), ("int4", 2), ("int4", "auto")]
    assert all(run["same"] and run["tokens_per_s"] > 0 and not run["fallback"] for run in runs)
    measured = result["weights"]["int8"]
    assert sorted(map(int, measured["verify"])) == list(range(2, 10))
    assert measured["bandwidth"] > 0 and measured["prompt_tokens_per_s"] > 0 and measured["cache_speed"] > 0
    assert drawing.read_bytes()[:4] == b"\x89PNG"
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "run.png"}
    assert done.stdout.count("| int8 |") == 1 + 1 + 5
    assert "5/5: int4, k = auto" in done.stderr


def test_the_table_of_qualities(checkpoint, tmp_path):
    text = tmp_path / "text"
    text.write_text("hello world, it is in a hello world. " * 40)
    few = ["--quality_tokens", "1024", "--max_new_tokens", "8", "--repeat", "1", "--no_compile", "--device", "cpu"]
    figures = tmp_path / "run.json"
    flags = ["--quality", "--weights", "fp32,int8", "--text", text, "--json", figures]
    done = run("benchmark.py", "--checkpoint_path", checkpoint, *flags, *few)
    assert done.returncode == 0, done.stderr
    quality = {name: result["quality"] for name, result in json.loads(figures.read_text())["weights"].items()}
    assert "kl" not in quality["fp32"] and 0 < quality["int8"]["kl"] < 0.1
    assert quality["int8"]["reference_perplexity"] == pytest.approx(quality["fp32"]["perplexity"])
    assert done.stdout.count("\nint8 ") == 1


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--weights", "fp32,int3"], "'int3' is none of"),
        (["--drafts", ""], "at least one of"),
        (["--k", "3,many"], 'or "auto"'),
        (["--checkpoint_path", "nowhere"], "nowhere"),
        (["--json", "nowhere/run.json"], "nowhere/run.json"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--max_new_tokens", "2000", "--weights", "fp32", "--no_compile"], "exceed the context"),
    ],
)
def test_bad_input_gets_one_line(checkpoint, flags, says):
    done = run(
        "benchmark.py", "--device", "cpu", *([] if "nowhere" in flags else ["--checkpoint_path", checkpoint]), *flags
    )
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0]
    assert "Traceback" not in done.stderr


def test_the_device_check_itself_works(tmp_path):
    done = run("device_check.py", "--device", "cpu", "--tiny", "--no_compile", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "device_check.json").read_text())["rows"]
    assert sum(row["passed"] is True for row in rows) >= 8 and not any(row["passed"] is False for row in rows)
