"""The command line: prompts, refusals, the report and its files, the conversation; as a process where that matters."""

import fcntl
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from tiny import EOS, IM_END, write_checkpoint, write_tensors

import cli
from checkpoint import load_model
from generate import generate
from tokenizer import get_tokenizer

GREEDY = ("--temperature", "0", "--precision", "fp32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", max_position_embeddings=2000)


@pytest.fixture(scope="module")
def capitals(tmp_path_factory):
    """A checkpoint that at temperature 0 writes capitals only: text that is encoded to the tokens it was made of."""
    path = write_checkpoint(tmp_path_factory.mktemp("cli") / "capitals", max_position_embeddings=2000)
    tensors = load_file(path / "model.safetensors")
    ids = get_tokenizer(path).encode("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    others = [id for id in range(len(tensors["lm_head.weight"])) if id not in ids]
    tensors["lm_head.weight"][others] = 0  # the largest of 26 random logits is above 0
    write_tensors(path, tensors)
    return path


@pytest.fixture
def call(checkpoint, capsys, monkeypatch):
    """Run the program in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it

    def call(*flags: object, stdin: bytes = b"", path=checkpoint) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        flags = [str(flag) for flag in flags]
        source = [] if "--checkpoint_path" in flags else ["--checkpoint_path", str(path)]
        try:
            code = cli.main(source + flags)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def stats(call, tmp_path):
    """Run the program: what --stats_json says."""

    def stats(*flags: object, **more) -> dict:
        file = tmp_path / "stats.json"
        code, _, err = call("--stats_json", file, *flags, **more)
        assert code == 0, err
        return json.loads(file.read_text(encoding="utf-8"))

    return stats


def expected_tokens(path, prompt: list[int], count: int, **more) -> list:
    model = load_model(path)
    with torch.inference_mode():
        return generate(model, prompt, count, **{"temperature": 0, **more})[1]["generated_tokens"]


# ---------------------------------------------------------------- prompts


def test_the_text_alone_goes_to_standard_output(call, checkpoint):
    code, out, err = call("--prompt", "hello world", "--max_new_tokens", 30, "--ignore_eos", *GREEDY)
    tokenizer = get_tokenizer(checkpoint)
    ids = expected_tokens(checkpoint, tokenizer.encode("hello world"), 30)
    assert code == 0 and out == tokenizer.decode(ids) + "\n"
    assert "tokens/s" in err and "2 prompt tokens, 30 new" in err and "peak memory" in err


def test_the_prompt_comes_from_a_flag_a_file_or_standard_input(call, tmp_path):
    text = "it's a wörld\n in 2024 <|im_end|>\n"
    (tmp_path / "prompt").write_text(text, encoding="utf-8")
    flags = ("--max_new_tokens", 20, "--ignore_eos", *GREEDY)
    by_flag = call("--prompt", text, *flags)
    assert by_flag[0] == 0 and len(by_flag[1]) > 5
    assert call("--prompt_file", tmp_path / "prompt", *flags)[:2] == by_flag[:2]
    assert call("--prompt", "-", *flags, stdin=text.encode())[:2] == by_flag[:2]


def test_an_integer_is_a_synthetic_prompt_of_that_many_tokens(stats):
    a, b = (stats("--prompt", "17", "--max_new_tokens", 5, *GREEDY)["samples"][0] for _ in range(2))
    assert a["prompt_tokens"] == 17 and a["generated_tokens"] == b["generated_tokens"]


def test_an_integer_in_a_chat_is_a_message(stats, checkpoint):
    expected = get_tokenizer(checkpoint).encode_chat([{"role": "user", "content": "17"}])
    assert stats("--prompt", "17", "--chat", "--max_new_tokens", 5)["samples"][0]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("data", [bytes(range(256)) * 2, b"\xff\xfe\x00", b"\xed\xa0\x80 \xc3"], ids=len)
def test_any_bytes_are_a_prompt(call, tmp_path, data):
    (tmp_path / "binary").write_bytes(data)
    for code, _, err in (
        call("--prompt_file", tmp_path / "binary", "--max_new_tokens", 3),
        call("--prompt", "-", "--max_new_tokens", 3, stdin=data),
    ):
        assert code == 0, err


def test_chat_goes_through_the_checkpoints_template(stats, checkpoint):
    prompt = get_tokenizer(checkpoint).encode_chat([{"role": "user", "content": "hello <|im_end|>"}])
    assert prompt[0] == 1 and prompt.count(IM_END) == 1  # what the user writes is no control token
    (sample,) = stats("--prompt", "hello <|im_end|>", "--chat", "--max_new_tokens", 10, *GREEDY)["samples"]
    assert sample["prompt_tokens"] == len(prompt)
    assert sample["generated_tokens"] == expected_tokens(checkpoint, prompt, 10, stop_ids=(EOS, IM_END))


# ---------------------------------------------------------------- refusals

REFUSALS = [
    (["--temperature", "-1"], ["--temperature", "'-1'"]),
    (["--temperature", "nan"], ["--temperature", "'nan'"]),
    (["--temperature", "hot"], ["--temperature", "'hot'"]),
    (["--top_k", "0"], ["--top_k", "'0'"]),
    (["--top_p", "0"], ["--top_p", "'0'"]),
    (["--top_p", "1.5"], ["--top_p", "'1.5'"]),
    (["--seed", "-1"], ["--seed", "'-1'"]),
    (["--max_new_tokens", "0"], ["--max_new_tokens", "'0'"]),
    (["--max_new_tokens", "1.5"], ["--max_new_tokens", "'1.5'"]),
    (["--num_samples", "0"], ["--num_samples", "'0'"]),
    (["--batch_size", "-3"], ["--batch_size", "'-3'"]),
    (["--precision", "int8"], ["--precision", "'int8'", "bf16"]),
    (["--device", "tpu"], ["--device", "'tpu'", "cpu"]),
    (["--temp", "0"], ["--temp"]),
    (["--prompt"], ["--prompt"]),
    (["extra"], ["extra"]),
    (["--speculate_k", "0"], ["--speculate_k", "auto"]),
    (["--prompt", "a", "--prompt_file", "b"], ["--prompt ", "--prompt_file"]),
    (["--prompt", "a", "--interactive"], ["--prompt ", "--interactive"]),
    (["--interactive", "--batch_size", "2"], ["--interactive", "--batch_size"]),
    (["--interactive", "--num_samples", "2"], ["--interactive", "--num_samples"]),
    (["--interactive", "--profile", "trace.json"], ["--interactive", "--profile"]),
    (["--interactive", "--max_seq_length", "2001"], ["--max_seq_length", "2001", "2000"]),
    (["--max_seq_length", "100"], ["--max_seq_length", "--interactive"]),
    (["--compare"], ["--compare", "--draft"]),
    (["--show_draft"], ["--show_draft", "--draft"]),
    (["--draft", "ngram", "--draft_checkpoint_path", "x"], ["--draft ", "--draft_checkpoint_path"]),
    (["--draft", "ngram", "--ngram_min", "4"], ["--ngram_min 4", "--ngram_max 3"]),
    (["--stats_json", "/nowhere/stats.json"], ["--stats_json", "/nowhere/stats.json"]),
    (["--stats_json", "/tmp"], ["--stats_json", "/tmp"]),
    (["--stats_json", "/dev/null"], ["--stats_json", "/dev/null"]),  # a file would replace the device
    (["--stats_json", "/dev/stdout"], ["--stats_json", "/dev/stdout"]),
    (["--prompt", "9" * 5000], ["--prompt 999"]),
    (["--batch_size", "100000000"], ["--batch_size 100000000", "GB"]),
    (["--profile", "/nowhere/trace.json"], ["--profile", "/nowhere/trace.json"]),
    (["--checkpoint_path", "/nowhere"], ["/nowhere"]),
    (["--draft_checkpoint_path", "/nowhere"], ["/nowhere"]),
    (["--prompt", ""], ["prompt", "empty"]),
    (["--prompt", "0"], ["--prompt 0"]),
    (["--prompt", "99999999999"], ["--prompt 99999999999"]),
    (["--prompt_file", "/nowhere/prompt"], ["/nowhere/prompt"]),
    (["--prompt_file", "/tmp"], ["/tmp"]),
    (["--prompt", "1950", "--max_new_tokens", "51"], ["1950", "51", "2001", "2000"]),
    (["--prompt", "hello", "--max_new_tokens", "2000"], ["1 ", "2000", "2001"]),
]


@pytest.fixture
def refused(call, monkeypatch):
    """Check a refusal: one line on standard error that has these words, nothing on standard output, exit code 2."""
    monkeypatch.setattr(cli, "load_model", lambda *arguments: pytest.fail("weights were loaded"))

    def refused(flags: list, words: list[str], **more) -> None:
        code, out, err = call(*flags, **more)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
        for word in words:
            assert word in err

    return refused


@pytest.mark.parametrize("flags, words", REFUSALS, ids=lambda x: " ".join(x)[:50])
def test_bad_input_is_refused_in_one_line_before_weights_are_loaded(refused, flags, words):
    refused(flags, words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_a_device_that_is_not_there_is_refused(refused):
    refused(["--device", "cuda"], ["--device cuda", "cpu"])


def test_a_checkpoint_that_cannot_be_used_is_refused_before_weights_are_loaded(refused, tmp_path):
    path = write_checkpoint(tmp_path / "moe", model_type="mixtral")
    refused([], [str(path / "config.json"), "mixtral"], path=path)
    path = write_checkpoint(tmp_path / "no_tokenizer")
    (path / "tokenizer.json").unlink()
    refused([], [str(path), "tokenizer.json"], path=path)
    (path / "tokenizer.json").write_text("{")
    refused([], [str(path / "tokenizer.json")], path=path)
    path = write_checkpoint(tmp_path / "sharded", shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    refused([], ["model-00002-of-00002.safetensors"], path=path)
    path = write_checkpoint(tmp_path / "base")
    (path / "tokenizer_config.json").write_text("{}")
    refused(["--chat", "--prompt", "hi"], ["chat_template"], path=path)
    path = write_checkpoint(tmp_path / "window", "mistral", sliding_window=50)
    refused(["--prompt", "40", "--max_new_tokens", "11"], ["40", "11", "51", "50"], path=path)


def test_damaged_weights_are_refused_in_one_line(call, tmp_path):
    path = write_checkpoint(tmp_path / "m")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])
    code, out, err = call("--prompt", "hi", path=path)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert str(path / "model.safetensors") in err


def test_a_lack_of_memory_is_one_line(call, monkeypatch):
    monkeypatch.setattr(cli, "load_model", lambda *arguments: torch.empty(1 << 60))
    code, out, err = call("--prompt", "hi")
    assert (code, out) == (2, "") and err.startswith("error: out of memory") and err.count("\n") == 1


def test_a_closed_standard_input_is_refused(checkpoint, capsys, monkeypatch):
    for flags in (["--interactive"], ["--prompt", "-"]):
        monkeypatch.setattr(sys, "stdin", None)
        assert cli.main(["--checkpoint_path", str(checkpoint), *flags]) == 2
        assert flags[0] in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_an_encoding_without_a_character_ends_no_run(call, stats, monkeypatch):
    text = stats("--max_new_tokens", "30", "--ignore_eos")["samples"][0]["text"]
    assert not text.isascii()
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert call("--max_new_tokens", "30", "--ignore_eos")[0] == 0
    assert stream.buffer.getvalue() == text.encode("ascii", "backslashreplace") + b"\n"


def test_a_link_to_an_output_file_stays_one(stats, tmp_path):
    (tmp_path / "stats.json").symlink_to(tmp_path / "real.json")
    stats("--max_new_tokens", "2")
    assert (tmp_path / "stats.json").is_symlink() and (tmp_path / "real.json").is_file()


# ---------------------------------------------------------------- what is generated


def test_generation_stops_at_any_end_token_of_the_checkpoint(stats, tmp_path):
    """A list in generation_config.json, one in config.json, one by name in tokenizer_config.json."""
    prompt = ("--prompt", "12", "--max_new_tokens", 60, *GREEDY)
    path = write_checkpoint(tmp_path / "m", seed=8)
    whole = stats(*prompt, "--ignore_eos", path=path)["samples"][0]["generated_tokens"]
    assert len(whole) == 60
    cuts = []
    for eos, config_eos in (([270, whole[9]], ...), (whole[12], whole[7]), (270, ...)):
        path = write_checkpoint(tmp_path / "m", seed=8, eos=eos, eos_token_id=config_eos)
        ends = {*(eos if isinstance(eos, list) else [eos]), config_eos, IM_END}
        cuts.append(next(i for i, id in enumerate(whole) if id in ends))
        (sample,) = stats(*prompt, path=path)["samples"]
        assert sample["generated_tokens"] == whole[: cuts[-1] + 1]  # the end token included
        assert stats(*prompt, "--ignore_eos", path=path)["samples"][0]["generated_tokens"] == whole
    assert len(set(cuts)) == 3 and whole[cuts[2]] == IM_END


def test_each_sample_has_the_next_seed(stats, call):
    flags = ("--prompt", "hello", "--max_new_tokens", 20, "--temperature", 1.5)
    two = stats(*flags, "--num_samples", 2, "--seed", 7)["samples"]
    assert [sample["seed"] for sample in two] == [7, 8]
    assert two[0]["generated_tokens"] != two[1]["generated_tokens"]
    (again,) = stats(*flags, "--seed", 8)["samples"]
    assert again["generated_tokens"] == two[1]["generated_tokens"] and again["text"] == two[1]["text"]
    assert call(*flags, "--seed", 8)[1] == again["text"] + "\n"


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_a_seed_gives_its_text_with_a_draft_too_in_any_sample(stats, call, checkpoint, draft):
    """`auto` follows the clock, and a sampled text follows what is drafted: a seed that is given sets k."""
    drafting = ("--draft", "ngram") if draft == "ngram" else ("--draft_checkpoint_path", checkpoint)
    flags = ("--prompt", "hello hello hello", "--max_new_tokens", 40, "--temperature", 1.5, "--ignore_eos", *drafting)
    two = stats(*flags, "--num_samples", 2, "--seed", 7)["samples"]
    assert all(max(k for k, count in enumerate(sample["k_counts"]) if count) == cli.SEEDED_K for sample in two)
    for sample in two:
        (again,) = stats(*flags, "--seed", sample["seed"])["samples"]
        assert again["generated_tokens"] == sample["generated_tokens"]


def test_what_sets_k(call, capsys):
    def k(*flags: str) -> int | str:
        args = cli.parser().parse_args(["--draft", "ngram", *flags])
        cli.check_flags(args)
        return args.speculate_k

    assert k() == k("--temperature", "0.5") == k("--temperature", "0", "--seed", "3") == "auto"
    assert k("--seed", "0") == k("--seed", "3", "--temperature", "0.1") == cli.SEEDED_K
    assert k("--speculate_k", "2", "--seed", "3") == 2
    assert capsys.readouterr().err == ""
    assert k("--speculate_k", "auto", "--seed", "3") == "auto"
    assert "--seed will not give the same text again" in capsys.readouterr().err


def test_a_batch_is_printed_row_by_row(call, stats, tmp_path):
    flags = ("--prompt", "hello", "--max_new_tokens", 20, "--temperature", 1.5, "--batch_size", 3)
    (sample,) = stats(*flags)["samples"]
    assert len(sample["generated_tokens"]) == len(sample["text"]) == 3 and len(set(sample["text"])) == 3
    assert call(*flags)[1] == "".join(text + "\n" for text in sample["text"])


def test_sampling_flags_reach_the_sampler(stats):
    flags = ("--prompt", "9", "--max_new_tokens", 20, "--ignore_eos")
    greedy = stats(*flags, *GREEDY)["samples"][0]["generated_tokens"]
    for more in (("--top_k", 1), ("--top_p", 1e-6), ("--temperature", 1e-4)):
        assert stats(*flags, *more)["samples"][0]["generated_tokens"] == greedy
    assert stats(*flags, "--temperature", 1)["samples"][0]["generated_tokens"] != greedy


def test_streaming_does_not_split_a_character(capsys, checkpoint):
    tokenizer = get_tokenizer(checkpoint)
    text = "é€𝄞!"
    ids = tokenizer.encode(text)
    assert len(ids) == 10  # one for each byte
    printer, pieces = cli.Printer(tokenizer, 1, False), []
    for id in ids[:-2]:
        printer(0, id, "plain")
        pieces.append(capsys.readouterr().out)
    assert pieces == ["", "é", "", "", "€", "", "", ""]
    assert printer.finish() == ["é€\ufffd"]  # the last one was never completed


def test_compile_makes_the_same_text_and_compiles_once(stats, monkeypatch):
    from torch._dynamo.utils import counters

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: real(f, fullgraph=True, backend="aot_eager"))
    torch._dynamo.reset()
    flags = ("--prompt", "20", "--max_new_tokens", 12, "--ignore_eos", *GREEDY)
    plain = stats(*flags)["samples"][0]
    assert plain["compile_s"] == 0
    before = counters["stats"]["unique_graphs"]
    compiled = stats(*flags, "--compile", "--num_samples", 3)["samples"]
    assert 0 < counters["stats"]["unique_graphs"] - before <= 2
    for sample in compiled:
        assert sample["generated_tokens"] == plain["generated_tokens"] and sample["compile_s"] > 0
        assert sample["ttft_s"] + sample["decode_s"] < compiled[0]["compile_s"]  # it is no part of them


# ---------------------------------------------------------------- the files

FIELDS = {
    "prompt_tokens": int,
    "generated_tokens": list,
    "text": str,
    "seed": int,
    "ttft_s": float,
    "decode_s": float,
    "tokens_per_s": float,
    "bytes_per_token": (int, float),
    "bandwidth_gb_s": float,
    "peak_memory_bytes": int,
    "compile_s": float,
}
DRAFT_FIELDS = {
    "acceptance_rate": float,
    "tokens_per_pass": float,
    "accept_counts": list,
    "draft_s": float,
    "verify_s": float,
    "predicted_speedup": float,
    "measured_speedup": (float, type(None)),
    "fallback": (str, type(None)),
}


def test_stats_json_has_every_field(stats, checkpoint, tmp_path):
    flags = ("--prompt", "hello hello hello hello", "--max_new_tokens", 30, "--ignore_eos", "--precision", "fp32")
    found = stats(*flags)
    assert (found["device"], found["precision"], found["quantization"]) == ("cpu", "fp32", None)
    (sample,) = found["samples"]
    assert sample.keys() == FIELDS.keys()
    for field, kind in FIELDS.items():
        assert isinstance(sample[field], kind), field
    assert len(sample["generated_tokens"]) == 30
    assert sample["text"] == get_tokenizer(checkpoint).decode(sample["generated_tokens"])
    assert sample["tokens_per_s"] == pytest.approx(29 / sample["decode_s"])
    assert 50e6 < sample["peak_memory_bytes"] < 1e12
    assert list(tmp_path.iterdir()) == [tmp_path / "stats.json"]  # nothing half-written is left

    (sample,) = stats(*flags, "--draft", "ngram", "--speculate_k", 3)["samples"]
    assert sample.keys() >= FIELDS.keys() | DRAFT_FIELDS.keys()
    for field, kind in (FIELDS | DRAFT_FIELDS).items():
        assert isinstance(sample[field], kind), field
    assert sample["measured_speedup"] is None and sample["fallback"] is None
    (sample,) = stats(*flags, "--draft", "ngram", "--speculate_k", 3, "--compare")["samples"]
    assert sample["measured_speedup"] > 0


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "stats.json"
    file.write_text("old")

    def half(path) -> None:
        path.write_text("ha")
        assert file.read_text() == "old"
        raise OSError("disk full")

    with pytest.raises(OSError):
        cli.write_whole(file, half)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    cli.write_whole(file, lambda path: path.write_text("new"))
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_profile_writes_a_trace_of_the_first_sample(call, tmp_path):
    code, _, err = call("--prompt", "5", "--max_new_tokens", 3, "--profile", tmp_path / "trace.json")
    assert code == 0, err
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert len(trace["traceEvents"]) > 100 and list(tmp_path.iterdir()) == [tmp_path / "trace.json"]


# ---------------------------------------------------------------- the conversation


def converse(stats, *lines: str, flags=(), **more) -> list[dict]:
    flags = ("--interactive", "--max_new_tokens", 12, *GREEDY, *flags)
    return stats(*flags, stdin="".join(line + "\n" for line in lines).encode(), **more)["samples"]


@pytest.mark.parametrize("name", ["checkpoint", "capitals"])
def test_a_conversation_keeps_its_cache(stats, request, name):
    """Of each turn only what is new is read, and the answers are those of a fresh start."""
    checkpoint = request.getfixturevalue(name)
    tokenizer = get_tokenizer(checkpoint)
    samples = converse(stats, "hello", "", "world in a hat", "it", path=checkpoint)
    assert len(samples) == 3 and [sample["seed"] for sample in samples] == [0, 1, 2]
    messages, before = [], 0
    for line, sample in zip(("hello", "world in a hat", "it"), samples, strict=True):
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.encode_chat(messages)
        assert sample["prompt_tokens"] == len(prompt)
        assert sample["generated_tokens"] == expected_tokens(checkpoint, prompt, 12, stop_ids=(EOS, IM_END))
        assert before <= sample["cached_tokens"] < len(prompt)
        if name == "capitals":  # the last token of an answer is never read
            assert sample["cached_tokens"] == before
        messages.append({"role": "assistant", "content": sample["text"]})
        before = len(prompt) + (11 if name == "capitals" else 0)
    assert samples[0]["cached_tokens"] == 0 < samples[1]["cached_tokens"] < samples[2]["cached_tokens"]


def test_what_is_cached_is_not_read_again(stats, monkeypatch):
    read = []
    real = cli.load_model

    def load(*arguments):
        model = real(*arguments)
        model.tok_embeddings.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[1]))
        return model

    monkeypatch.setattr(cli, "load_model", load)
    samples = converse(stats, "hello", "world", "it")
    prompts = [sample["prompt_tokens"] - sample["cached_tokens"] for sample in samples]
    steps = sum(len(sample["generated_tokens"]) - 1 for sample in samples)
    assert sum(read) == sum(prompts) + steps


def test_interactive_cache_is_as_long_as_asked(stats, call):
    """Not 350 tokens, whatever was asked."""
    long = "a" * 500
    for flags in (("--max_seq_length", 1000), ()):
        (sample,) = converse(stats, long, flags=flags)
        assert sample["prompt_tokens"] > 500 and len(sample["generated_tokens"]) == 12
    code, _, err = call("--interactive", "--max_seq_length", 100, *GREEDY, stdin=f"{long}\nhello\n".encode())
    assert code == 0
    assert re.search(r"would have 5\d\d tokens, but there is room for 100 \(--max_seq_length\)", err)
    assert "[turn 1]" in err  # and the conversation goes on


def test_an_answer_ends_where_the_cache_does(stats):
    (sample,) = converse(stats, "hello", flags=("--max_seq_length", 24, "--ignore_eos"))
    assert sample["prompt_tokens"] + len(sample["generated_tokens"]) == 24


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_interrupted_answer_leaves_a_conversation_that_goes_on_rightly(stats, capitals, monkeypatch, after):
    """Whether the interrupt comes before the first token (then the turn never was) or in the middle."""
    heard = []

    class Interrupted(cli.Printer):
        def __call__(self, row: int, token: int, kind: str) -> None:
            super().__call__(row, token, kind)
            heard.append(token)
            if len(heard) == after:
                raise KeyboardInterrupt

    monkeypatch.setattr(cli, "Printer", Interrupted)
    if after == 0:
        real, calls = cli.generate, []

        def generate_or_stop(*arguments, **more):
            calls.append(arguments)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return real(*arguments, **more)

        monkeypatch.setattr(cli, "generate", generate_or_stop)
    samples = converse(stats, "hello there", "world", flags=("--ignore_eos",), path=capitals)
    tokenizer, messages = get_tokenizer(capitals), []
    if after:
        partial = tokenizer.decode(heard[:after])
        messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": partial}]
    prompt = tokenizer.encode_chat([*messages, {"role": "user", "content": "world"}])
    (sample,) = samples
    assert sample["prompt_tokens"] == len(prompt)
    assert sample["generated_tokens"] == expected_tokens(capitals, prompt, 12)
    first = tokenizer.encode_chat([{"role": "user", "content": "hello there"}])
    assert sample["cached_tokens"] == (len(first) + after - 1 if after else 0)


# ---------------------------------------------------------------- as a process


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A checkpoint that can go on for half a minute."""
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "endless", max_position_embeddings=100_000)


class Program:
    """generate.py in a process of its own; what it writes is collected as it comes."""

    def __init__(self, *flags: object, **more):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "generate.py"), *map(str, flags)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd="/", env=env, **more)
        self.written = {"stdout": b"", "stderr": b""}
        self.pieces: list[bytes] = []  # of standard output, as they came
        self.enough = False  # once true, standard output is closed
        for name in self.written:
            threading.Thread(target=self.collect, args=(name,), daemon=True).start()

    def collect(self, name: str) -> None:
        with getattr(self.process, name) as stream:
            while (data := os.read(stream.fileno(), 4096)) and not (self.enough and name == "stdout"):
                self.written[name] += data
                self.pieces += [data] * (name == "stdout")

    def until(self, condition, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.written
            time.sleep(0.01)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def test_a_refusal_as_a_process():
    run = subprocess.run(
        [sys.executable, str(ROOT / "generate.py"), "--checkpoint_path", "/nowhere"], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: /nowhere: ") and run.stderr.count("\n") == 1


def test_tokens_stream_and_a_closed_pipe_ends_the_program_quietly(endless):
    flags = ("--prompt", "hello", "--max_new_tokens", 50_000, "--ignore_eos", "--checkpoint_path", endless)
    with Program(*flags, stdin=subprocess.DEVNULL) as program:
        program.until(lambda: len(program.written["stdout"]) > 20)
        first = len(program.written["stdout"])
        program.until(lambda: len(program.written["stdout"]) > first)  # more comes, long before the end
        assert len(program.pieces[0]) < 4096  # and not when some buffer is full
        program.enough = True
        assert program.process.wait(30) == 0
    assert b"Traceback" not in program.written["stderr"] and b"rror" not in program.written["stderr"]


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(endless, tmp_path):
    """On a terminal, with the keys themselves."""
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    flags = ("--interactive", "--max_new_tokens", 50_000, "--ignore_eos", "--checkpoint_path", endless)
    flags += ("--max_seq_length", 60_000, "--stats_json", tmp_path / "stats.json")
    with Program(*flags, stdin=slave, preexec_fn=own_terminal) as program:
        out, err = (lambda: program.written["stdout"]), (lambda: program.written["stderr"])
        program.until(lambda: err().endswith(b"> "))
        for turn in (1, 2):
            before = len(out())
            os.write(master, b"hello\n")
            program.until(lambda before=before: len(out()) > before + 20)
            os.write(master, b"\x03")
            program.until(lambda turn=turn: re.search(rb"\[turn %d\] stopped after \d+ tokens" % turn, err()))
        program.until(lambda: err().endswith(b"> "))
        os.write(master, b"\x03")  # with no answer to stop
        program.until(lambda: b"(ctrl-D ends)" in err() and err().endswith(b"> "))
        os.write(master, b"\x04")
        assert program.process.wait(30) == 0
    os.close(master)
    os.close(slave)
    assert b"Traceback" not in err()
    assert json.loads((tmp_path / "stats.json").read_text())["samples"] == []


@pytest.mark.parametrize("flag", ["--compile", "--compile_prefill"])
def test_compiling_without_a_compiler_is_refused_in_one_line(tmp_path, capsys, monkeypatch, flag):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    path = write_checkpoint(tmp_path / "m")
    assert cli.main(["--checkpoint_path", str(path), "--prompt", "x", "--device", "cpu", flag]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "/nowhere/c++" in err and "CXX" in err
    assert cli.main(["--checkpoint_path", str(path), "--prompt", "x", "--device", "cpu", "--max_new_tokens", "2"]) == 0


def test_a_draft_file_that_is_not_there_is_named(tmp_path, capsys):
    path = write_checkpoint(tmp_path / "m")
    flags = [
        "--checkpoint_path",
        str(path),
        "--prompt",
        "x",
        "--draft_checkpoint_path",
        str(path / "model_int8.safetensors"),
    ]
    assert cli.main(flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "model_int8.safetensors: no such file" in err
