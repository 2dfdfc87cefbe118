"""What the tests share: the repository's root on sys.path, the small model, and the golden values."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The quickstart's checkpoint, float32 in Hugging Face's layout."""
    path = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
    if not path.is_dir():
        pytest.skip(f"{path} is not there: scripts/test.sh downloads it")
    return path


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of measurements and texts beside a developer's checkout."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"{path} is not there: it lies beside a developer's checkout only")
    return path


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """SmolLM2-135M-Instruct in float32: per prompt its ids, the ten highest last logits, and a greedy continuation."""
    return json.loads((ROOT / "tests" / "golden" / "smollm2-135m.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def golden_tokens() -> list[dict]:
    """Texts that tokenizers get wrong, and SmolLM2's ids for them."""
    return json.loads((ROOT / "tests" / "golden" / "smollm2-tokens.json").read_text(encoding="utf-8"))
