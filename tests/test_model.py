"""The model: golden values of a real checkpoint, an independent implementation on tiny ones, the cache, the config."""

import gc
import json
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from tiny import LLAMA31_SCALING, make_config, tiny_transformer, write_checkpoint

import kernels
from checkpoint import load_model
from model import Linear, ModelArgs, Transformer
from quantize import quantize_checkpoint
from tokenizer import get_tokenizer


@pytest.fixture(params=["kernels", "reference"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test twice: with the C++ operators and with the PyTorch ones."""
    if request.param == "kernels" and not kernels.load():
        pytest.skip("no C++ compiler here")
    with kernels.disabled() if request.param == "reference" else nullcontext(), torch.inference_mode():
        yield request.param


@pytest.fixture(scope="module")
def smollm2(smollm2_dir) -> Transformer:
    return load_model(smollm2_dir, "cpu", torch.float32)


# ---------------------------------------------------------------- golden values


def padded(rows: list[list[int]]) -> torch.Tensor:
    """[B, longest], zeros on the right: no query looks to its right, so they change nothing before them."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def test_golden_prompt_ids(smollm2_dir, golden):
    tokenizer = get_tokenizer(smollm2_dir)
    assert golden
    for entry in golden:
        assert tokenizer.encode(entry["prompt"], allow_special=True) == entry["ids"]


def check_last_logits(logits: torch.Tensor, golden: list[dict]) -> None:
    for row, entry in zip(logits, golden, strict=True):
        expected = {int(id): value for id, value in entry["last_logits_top10"].items()}
        values, ids = row[len(entry["ids"]) - 1].topk(10)
        found = dict(zip(ids.tolist(), values.tolist(), strict=True))
        assert found == pytest.approx(expected, abs=0.01), entry["prompt"]


def test_golden_logits_and_continuation_in_one_pass(smollm2, golden, arithmetic):
    texts = [entry["ids"] + entry["greedy"] for entry in golden]
    x = padded(texts)
    smollm2.setup_caches(*x.shape)
    logits = smollm2(x, torch.arange(x.shape[1]))
    check_last_logits(logits, golden)
    for row, text, entry in zip(logits.argmax(-1).tolist(), texts, golden, strict=True):
        start = len(entry["ids"])
        assert row[start - 1 : len(text) - 1] == entry["greedy"], entry["prompt"]


def test_golden_continuation_token_by_token(smollm2, golden):
    """All prompts side by side, each row at a position of its own; the first 32 tokens, for the time it takes."""
    starts = torch.tensor([[len(entry["ids"])] for entry in golden])
    steps = 32
    x = padded([entry["ids"] for entry in golden])
    smollm2.setup_caches(len(golden), int(starts.max()) + steps)
    with torch.inference_mode():
        logits = smollm2(x, torch.arange(x.shape[1]))
        check_last_logits(logits, golden)
        token = logits.argmax(-1).gather(1, starts - 1)
        made = [token]
        for step in range(steps - 1):
            token = smollm2(token, starts + step).argmax(-1)
            made.append(token)
    for row, entry in zip(torch.cat(made, dim=1).tolist(), golden, strict=True):
        count = min(steps, len(entry["greedy"]))
        assert row[:count] == entry["greedy"][:count], entry["prompt"]


# ---------------------------------------------------------------- an independent implementation


def theirs(path, ids: torch.Tensor) -> torch.Tensor:
    """The logits that transformers computes, float32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(ids).logits


CASES = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3.1": ("llama3", {}),
    "llama3.1_old_name_of_the_type": (
        "llama3",
        {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA31_SCALING.items()}},
    ),
    "llama3.2_tied": ("llama32", {}),
    "transformers5_rope_parameters": (
        "llama",
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": LLAMA31_SCALING | {"rope_theta": 500000.0}},
    ),
    "mistral": ("mistral", {}),
    "mistral_one_kv_head": ("mistral", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "head_of_10": ("odd", {}),
    "head_of_6_and_odd_sizes": ("odd", {"hidden_size": 54, "vocab_size": 301}),
    "head_of_40": ("llama", {"hidden_size": 66, "head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "smollm2_shape": (
        "llama",
        {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "sharded": ("llama", {"shards": 3}),
    "stored_as_bf16": ("llama", {"dtype": torch.bfloat16}),
    "stored_as_fp16": ("qwen2", {"dtype": torch.float16}),
    "default_entries": (
        "llama",
        dict.fromkeys(("rope_theta", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias"), ...),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, arithmetic, case):
    family, overrides = CASES[case]
    path = write_checkpoint(tmp_path / "m", family, seed=1, **overrides)
    model = load_model(path)
    ids = torch.randint(model.args.vocab_size, (2, 150), generator=torch.Generator().manual_seed(0))  # past 64
    model.setup_caches(2, 150)
    expected = theirs(path, ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(model(ids, torch.arange(150)), expected, atol=1e-4, rtol=0)


def test_head_dim_differs_from_dim_over_heads(tmp_path):
    for family, head_dim in (("mistral", 24), ("qwen3", 32)):
        args = ModelArgs.from_config(write_checkpoint(tmp_path / family, family))
        assert (args.head_dim, args.dim // args.n_head) == (head_dim, 16)


def test_keys_and_values_are_kept_once_for_the_heads_that_share_them():
    model = tiny_transformer(n_head=8, n_local_heads=2, head_dim=8)
    model.setup_caches(3, 50)
    assert model.layers[0].attention.kv_cache.k.shape == (3, 2, 50, 8)


# ---------------------------------------------------------------- the cache

VARIANTS = {
    "gqa": {},
    "qwen3": {"qk_norm": True, "head_dim": 24},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "odd": {"dim": 90, "n_head": 9, "n_local_heads": 3, "intermediate_size": 77},
}


def fresh(length: int = 64, rows: int = 2, **overrides) -> tuple[Transformer, torch.Tensor]:
    model = tiny_transformer(seed=3, **overrides)
    model.setup_caches(rows, length)
    ids = torch.randint(model.args.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
    return model, ids


def compare(found: torch.Tensor, expected: torch.Tensor, arithmetic: str) -> None:
    """The C++ operators give a row the same bits however many rows there are; F.linear gives nearly the same."""
    tolerance = {"atol": 0, "rtol": 0} if arithmetic == "kernels" else {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[20] + [1] * 44, [1] * 64, [7, 1, 30, 2, 24], [33, 31]], ids=len)
def test_chunks_give_the_logits_of_one_pass(arithmetic, variant, chunks):
    model, ids = fresh(**VARIANTS[variant])
    whole = model(ids, torch.arange(64))
    model, _ = fresh(**VARIANTS[variant])
    parts, start = [], 0
    for size in chunks:
        parts.append(model(ids[:, start : start + size], torch.arange(start, start + size)))
        start += size
    assert start == 64
    compare(torch.cat(parts, dim=1), whole, arithmetic if variant != "odd" else "reference")


def test_rows_may_be_at_positions_of_their_own(arithmetic):
    model, ids = fresh()
    whole = model(ids, torch.arange(64))
    model, _ = fresh()
    model(ids[:, :40], torch.arange(40))
    positions = torch.stack((torch.arange(10, 15), torch.arange(37, 42)))
    found = model(ids.gather(1, positions), positions)
    compare(found, torch.stack((whole[0, 10:15], whole[1, 37:42])), arithmetic)


def test_positions_of_one_row_count_for_all(arithmetic):
    model, ids = fresh()
    one = model(ids[:, :9], torch.arange(9))
    both = model(ids[:, :9], torch.arange(9).repeat(2, 1))
    assert torch.equal(one, both)


def test_moving_the_position_back_is_a_rollback(arithmetic):
    model, ids = fresh()
    whole = model(ids, torch.arange(64))
    model(torch.zeros_like(ids[:, :30]), torch.arange(20, 50))  # drafts that turn out wrong
    again = model(ids[:, 20:24], torch.arange(20, 24))
    compare(again, whole[:, 20:24], arithmetic)


def test_what_lies_beyond_the_position_is_not_read(arithmetic):
    model, ids = fresh()
    expected = model(ids[:, :20], torch.arange(20))
    for layer in model.layers:
        layer.attention.kv_cache.k[:] = 1e4
        layer.attention.kv_cache.v[:] = -1e4
    compare(model(ids[:, :20], torch.arange(20)), expected, arithmetic)


def test_fewer_rows_than_the_cache_has(arithmetic):
    model, ids = fresh(rows=3)
    expected = model(ids, torch.arange(64))
    model, _ = fresh(rows=3)
    compare(model(ids[:2], torch.arange(64)), expected[:2], arithmetic)
    assert not model.layers[0].attention.kv_cache.k[2].any()


def test_logits_to_keep(arithmetic):
    model, ids = fresh()
    expected = model(ids, torch.arange(64))
    compare(model(ids, torch.arange(64), logits_to_keep=1), expected[:, -1:], arithmetic)


def test_a_cache_longer_than_the_text_changes_nothing(arithmetic):
    model, ids = fresh()
    expected = model(ids, torch.arange(64))
    model, _ = fresh(length=256)
    compare(model(ids, torch.arange(64)), expected, arithmetic)


@pytest.mark.parametrize(
    "positions, named",
    [
        ([-1, 0, 1], "-1"),
        ([62, 63, 64], "64"),
        ([1000, 1001, 1002], "1000"),
        ([[0, 1, 2], [62, 63, 64]], "64"),
        ([[-2, -1, 0], [0, 1, 2]], "-2"),
    ],
    ids=str,
)
def test_a_position_outside_the_cache_is_an_error_before_the_write(arithmetic, positions, named):
    model, ids = fresh()
    model(ids[:, :30], torch.arange(30))
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(IndexError, match=rf"position {named} .* 64"):
        model(ids[:, :3], torch.tensor(positions))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


# ---------------------------------------------------------------- all blocks in one operator


def one_by_one(model: Transformer, x: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, model.rope, input_pos)
    return x


@pytest.fixture
def counted(monkeypatch) -> list:
    """Where the C++ compiler is: the calls of `kernels.blocks`."""
    if not kernels.load():
        pytest.skip("no C++ compiler here")
    calls, blocks = [], kernels.blocks
    monkeypatch.setattr(kernels, "blocks", lambda *args: calls.append(args) or blocks(*args))
    return calls


@pytest.mark.parametrize("mode", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_operator_for_all_blocks_gives_their_bits(tmp_path, counted, family, mode):
    """Who changed a block, and finds this test failing, has to leave the operator out of `Transformer.all_layers`."""
    path = write_checkpoint(tmp_path / "m", family, intermediate_size=160)
    if mode.startswith("int"):
        path = quantize_checkpoint(path, mode, 32 if mode == "int4" else None)
    model = load_model(path, "cpu", torch.bfloat16 if mode == "bf16" else torch.float32)
    model.setup_caches(3, 40)
    with torch.inference_mode():
        for rows, start, count in ((2, 0, 11), (2, 11, 1), (3, 0, 30), (1, 12, 5)):
            x = torch.randn(rows, count, 64)
            input_pos = torch.arange(start, start + count).expand(rows, -1)
            found = model.all_layers(x, input_pos)
            caches = [buffer.clone() for buffer in model.buffers()]
            assert torch.equal(found, one_by_one(model, x, input_pos))
            assert all(torch.equal(a, b) for a, b in zip(caches, model.buffers(), strict=True))
    assert len(counted) == 4


def test_what_is_more_than_a_product_runs_by_itself(counted):
    """Hooks on a linear layer are called, and a layer of one's own is."""

    class Doubled(Linear):
        operands = property()  # none: an AttributeError

        def forward(self, x: torch.Tensor, **around: object) -> torch.Tensor:
            return 2 * super().forward(x, **around)

    model, ids = fresh()
    with torch.inference_mode():
        before = model(ids[:, :9], torch.arange(9))
        seen = []
        hook = model.layers[1].feed_forward.w2.register_forward_hook(lambda *arguments: seen.append(arguments))
        assert torch.equal(model(ids[:, :9], torch.arange(9)), before) and len(seen) == 1
        hook.remove()
        assert len(counted) == 1
        model.layers[1].feed_forward.w13.__class__ = Doubled
        assert not torch.equal(model(ids[:, :9], torch.arange(9)), before)
        assert len(counted) == 1


def test_a_bias_on_any_layer_counts(counted):
    model, ids = fresh()
    with torch.inference_mode():
        for layer in (model.layers[0].attention.wo, model.layers[1].feed_forward.w13, model.layers[1].feed_forward.w2):
            before = model(ids[:, :9], torch.arange(9))
            layer.bias = torch.nn.Parameter(torch.randn(layer.out_features), requires_grad=False)
            after = model(ids[:, :9], torch.arange(9))
            assert not torch.equal(before, after)
            with kernels.disabled():
                assert (model(ids[:, :9], torch.arange(9)) - after).abs().max() < 1e-4
    assert len(counted) == 6


def test_held_parts_give_the_same_bits_through_growing_caches(counted):
    (model, ids), (plain, _) = fresh(100, 1), fresh(100, 1)
    model.hold()
    with torch.inference_mode():
        for rows, end in ((1, 20), (3, 20), (3, 100)):
            for each in (model, plain):
                each.setup_caches(rows, end)
            for start, count in ((0, 9), (9, 1), (end - 3, 3)):
                idx, input_pos = ids[:1, start : start + count].expand(rows, -1), torch.arange(start, start + count)
                assert torch.equal(model(idx, input_pos), plain(idx, input_pos))
        for each in (model, plain):
            each.layers[1].feed_forward.w2.weight.mul_(1.5)  # in place
        assert torch.equal(model(idx, input_pos), plain(idx, input_pos))
        with kernels.disabled():
            model.layers[0].attention.wo.weight.mul_(1.5)
            assert not torch.equal(model(idx, input_pos), plain(idx, input_pos))
    assert len(counted) == 10  # all of `plain`


def is_held(number: int) -> bool:
    """Whether C++ has parts under this number."""
    with pytest.raises(RuntimeError) as error:  # no such parts, or parts that do not go with these
        kernels.held_blocks(torch.zeros(1, 1, 8), torch.zeros(1, 4, 2), torch.zeros(1, 1, dtype=torch.int64), number, 0)
    return f"no blocks are held under {number}" not in str(error.value)


def test_held_parts_go_with_their_model():
    if not kernels.load():
        pytest.skip("no C++ compiler here")
    model, _ = fresh()
    model.hold()
    number = model.held_number
    assert is_held(number)
    model.setup_caches(2, 200)
    assert not is_held(number) and is_held(model.held_number)
    number = model.held_number
    del model
    gc.collect()
    assert not is_held(number)


# ---------------------------------------------------------------- the size of the cache


def test_caches_are_allocated_once():
    model = tiny_transformer()
    model.setup_caches(2, 100)
    address = model.layers[1].attention.kv_cache.k.data_ptr()
    model.setup_caches(1, 50)
    model.setup_caches(2, 100)
    assert model.layers[1].attention.kv_cache.k.data_ptr() == address
    model.setup_caches(1, 200)
    assert model.layers[1].attention.kv_cache.k.shape[:3] == (2, 2, 200)
    assert model.rope.shape[0] == 200


def test_a_cache_beyond_the_context_is_refused():
    model = tiny_transformer(block_size=100)
    model.setup_caches(1, 100)
    with pytest.raises(ValueError, match="101 .* context has 100"):
        model.setup_caches(1, 101)


def test_a_cache_beyond_the_sliding_window_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "m", "mistral", sliding_window=40)
    model = load_model(path)
    model.setup_caches(1, 40)
    with pytest.raises(ValueError, match="41 .*sliding attention window.* 40"):
        model.setup_caches(1, 41)
    ids = torch.randint(model.args.vocab_size, (1, 40))
    with torch.inference_mode():  # as long as the window, nothing slides
        torch.testing.assert_close(model(ids, torch.arange(40)), theirs(path, ids), atol=1e-4, rtol=0)


# ---------------------------------------------------------------- config.json


def write_config(tmp_path, family: str = "llama", **overrides):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(make_config(family, **overrides)), encoding="utf-8")
    return file


def test_config_is_read_from_the_file_or_its_directory(tmp_path):
    file = write_config(tmp_path, "qwen3", max_position_embeddings=77)
    expected = ModelArgs(
        block_size=77,
        vocab_size=272,
        n_layer=2,
        n_head=4,
        n_local_heads=2,
        dim=64,
        intermediate_size=128,
        head_dim=32,
        rope_base=1e6,
        norm_eps=1e-6,
        qk_norm=True,
    )
    assert (
        ModelArgs.from_config(file) == ModelArgs.from_config(tmp_path) == ModelArgs.from_config(str(file)) == expected
    )


def test_head_counts_default_to_all(tmp_path):
    for missing in (..., None):
        args = ModelArgs.from_config(write_config(tmp_path, num_key_value_heads=missing, head_dim=missing))
        assert (args.n_local_heads, args.head_dim) == (4, 16)


@pytest.mark.parametrize(
    "family, entries, window",
    [
        ("mistral", {"sliding_window": 40}, 40),
        ("mistral", {"sliding_window": 40, "use_sliding_window": False}, 40),  # no entry of Mistral's
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {}, None),
        ("qwen2", {"use_sliding_window": ...}, None),
        ("qwen2", {"use_sliding_window": True}, 32),
        ("llama", {"sliding_window": 40}, None),  # transformers' Llama has none
    ],
)
def test_sliding_window(tmp_path, family, entries, window):
    assert ModelArgs.from_config(write_config(tmp_path, family, **entries)).sliding_window == window


REFUSALS = [
    ({"model_type": "mixtral"}, "model_type", '"mixtral"'),
    ({"model_type": ...}, "model_type", "null"),
    ({"model_type": ["llama"]}, "model_type", '["llama"]'),
    ({"hidden_act": "gelu"}, "hidden_act", '"gelu"'),
    ({"num_local_experts": 8}, "num_local_experts", "8"),
    ({"num_experts": 4}, "num_experts", "4"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling", '"linear"'),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling", '"yarn"'),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_scaling", '"dynamic"'),
    ({"rope_scaling": "linear"}, "rope_scaling", '"linear"'),
    ({"rope_scaling": {"factor": 8.0}}, "rope_scaling", "no type"),
    ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "yarn"}}, "rope_scaling", '"yarn"'),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_scaling", "no type"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding_attention"),
    ({"layer_types": ["linear_attention"]}, "layer_types", "linear_attention"),
    ({"num_experts_per_tok": 8}, "num_experts_per_tok", "8"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling", "low_freq_factor"),
    ({"rope_scaling": LLAMA31_SCALING | {"factor": "8"}}, "factor", '"8"'),
    ({"rope_parameters": "default"}, "rope_", '"default"'),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
    ({"attention_bias": True}, "attention_bias", "true"),
    ({"mlp_bias": True}, "mlp_bias", "true"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ({"vocab_size": ...}, "vocab_size", "null"),
    ({"num_hidden_layers": ...}, "num_hidden_layers", "null"),
    ({"hidden_size": ...}, "hidden_size", "null"),
    ({"intermediate_size": "128"}, "intermediate_size", '"128"'),
    ({"num_attention_heads": 0}, "num_attention_heads", "0"),
    ({"hidden_size": True}, "hidden_size", "true"),
    ({"num_attention_heads": 4.0}, "num_attention_heads", "4.0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps", "-1e-05"),
    ({"rope_theta": "10000"}, "rope_theta", '"10000"'),
    ({"num_key_value_heads": 3}, "4 heads", "3 key/value heads"),
    ({"num_key_value_heads": 8}, "4 heads", "8 key/value heads"),
    ({"num_attention_heads": 6, "num_key_value_heads": 2}, "hidden_size", "6"),
    ({"head_dim": 15}, "15", "pairs"),
]


@pytest.mark.parametrize("entries, entry, value", REFUSALS, ids=lambda x: json.dumps(x, default=str)[:50])
def test_what_is_not_computed_is_refused_by_name(tmp_path, entries, entry, value):
    file = write_config(tmp_path, **entries)
    with pytest.raises(ValueError) as error:
        ModelArgs.from_config(file)
    message = str(error.value)
    assert message.startswith(f"{file}: ") and entry in message and value in message and "\n" not in message


def test_a_window_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match='config.json: sliding_window is "all"'):
        ModelArgs.from_config(write_config(tmp_path, "mistral", sliding_window="all"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"vocab_size": 3,}', b"[" * 100_000, b"[1]", b'"llama"', b"null"], ids=repr
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="config.json: (not valid JSON|a JSON object is expected)"):
        ModelArgs.from_config(tmp_path)


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json: no such file"):
        ModelArgs.from_config(tmp_path)
