"""The page of --trace: its numbers against the rounds they came from, its escaping, and how it behaves in a browser.

The browser is the system's chromium, which .ci/run installs; without one, those tests are skipped.
"""

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tiny import tiny_transformer, write_checkpoint

import cli
from generate import DraftLength, NgramDraft, Round, generate
from tokenizer import get_tokenizer
from tracing import TOP, Trace, visible

HOSTILE = "</script><img src=x onerror=\"document.title='run'\"><!--"
TEMPLATE = Path(cli.__file__).with_name("tracing.html")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tracing") / "tiny", max_position_embeddings=2000)


@pytest.fixture
def tokenizer(checkpoint):
    return get_tokenizer(checkpoint)


def traced_run(tokenizer, prompt=(5, 100, 7), new_tokens=150, draft=None, speculate_k=4, rows=1, seed=0, **more):
    """A run of tiny models: (its trace, its rounds, its statistics, its DraftLength)."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        model = tiny_transformer(seed=1, block_size=2000)
        draft = draft or tiny_transformer(seed=1, noise=0.05, block_size=2000)
        trace, rounds, length = Trace(tokenizer, prompt, rows), [], DraftLength(speculate_k)

        def observe(round: Round) -> None:
            rounds.append(round)
            trace.observe(round)

        _, stats = generate(
            model, prompt, new_tokens, batch_size=rows, draft=draft, speculate_k=length,
            callback=trace.put, observe=observe, **more,
        )  # fmt: skip
    return trace, rounds, stats, length


def page_data(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


# ---------------------------------------------------------------- what it collects


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}], ids=str)
def test_the_page_has_the_rounds_own_numbers(tokenizer, rows, sampling):
    trace, rounds, stats, length = traced_run(tokenizer, rows=rows, stop_ids=range(40, 50), **sampling)
    data = page_data(trace.page(stats, length, {}))
    ids = stats["generated_tokens"] if rows > 1 else [stats["generated_tokens"]]
    kinds = set()
    assert [k for k, _, _ in data["rounds"]] == [round.drafts.shape[1] for round in rounds]
    assert [verify for _, _, verify in data["rounds"]] == pytest.approx([round.verify_s for round in rounds], rel=1e-5)
    for row, tokens in enumerate(data["rows"]):
        assert [token["name"] for token in tokens] == [trace.name(id) for id in ids[row]]
        assert "round" not in tokens[0]  # the prompt's
        seen = 1
        for r, round in enumerate(rounds):
            for place in range(min(round.accepted[row] + 1, len(tokens) - seen)):
                token, id = tokens[seen], ids[row][seen]
                seen += 1
                kinds.add(token["kind"])
                assert token["round"] == r
                p, k = round.p[row, place], round.drafts.shape[1]
                q = round.q[row, place] if place < k else torch.zeros_like(p)
                assert token["p"] == pytest.approx(p[id].item(), rel=1e-5)
                if place < round.accepted[row]:
                    assert token["kind"] == "accepted" and token["place"] == place + 1
                    assert token["q"] == pytest.approx(q[id].item(), rel=1e-5)
                    assert token["u"] == pytest.approx(round.uniform[row, place].item(), rel=1e-5)
                    assert token["ratio"] == pytest.approx(min(1, (p[id] / q[id]).item()), rel=1e-5)
                    assert token["u"] < token["ratio"]
                    continue
                left = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
                (drawn,) = [entry for entry in token["top"] if entry["drawn"]]
                assert drawn["name"] == trace.name(id) and drawn["prob"] == pytest.approx(left[id].item(), rel=1e-5)
                likeliest = [x for x in left.sort(descending=True).values[:TOP].tolist() if x > 0]
                assert [entry["prob"] for entry in token["top"]][: len(likeliest)] == pytest.approx(likeliest, rel=1e-5)
                assert token["kind"] == ("plain" if k == 0 else "bonus" if place == k else "corrected")
                if token["kind"] == "corrected":
                    first, *others = token["rejected"]
                    draft = round.drafts[row, place]
                    assert token["q"] == pytest.approx(q[id].item(), rel=1e-5)
                    assert first["name"] == trace.name(draft.item())
                    assert (first["q"], first["p"]) == pytest.approx((q[draft].item(), p[draft].item()), rel=1e-5)
                    assert first["u"] == pytest.approx(round.uniform[row, place].item(), rel=1e-5)
                    assert first["u"] >= first["ratio"]
                    rest = round.drafts[row, place + 1 :].tolist()
                    assert [other["name"] for other in others] == [trace.name(id) for id in rest]
                    assert all("u" not in other for other in others)
        assert seen == len(tokens)
    assert kinds >= {"accepted", "corrected", "bonus", "plain"}


@pytest.mark.parametrize("rows", [1, 3])
def test_at_temperature_0_the_page_has_what_was_compared_and_no_number(tokenizer, rows):
    trace, rounds, stats, length = traced_run(tokenizer, rows=rows, stop_ids=range(40, 50), temperature=0)
    data = page_data(trace.page(stats, length, {"temperature": "0"}))
    ids = stats["generated_tokens"] if rows > 1 else [stats["generated_tokens"]]
    kinds = set()
    assert data["greedy"]
    for row, tokens in enumerate(data["rows"]):
        assert [token["name"] for token in tokens] == [trace.name(id) for id in ids[row]]
        places = [(r, place) for r, round in enumerate(rounds) for place in range(round.accepted[row] + 1)]
        for id, token, (r, place) in zip(ids[row][1:], tokens[1:], places, strict=False):
            kinds.add(token["kind"])
            drafts = rounds[r].drafts[row].tolist()
            assert id == rounds[r].p[row, place].argmax() and token["round"] == r
            more = set(token) - {"text", "name", "kind", "round"}
            if token["kind"] == "accepted":
                assert more == {"place"} and token["place"] == place + 1 and id == drafts[place]
            elif token["kind"] == "corrected":
                assert more == {"rejected"} and id != drafts[place]
                assert token["rejected"] == [{"name": trace.name(draft)} for draft in drafts[place:]]
            else:
                assert not more and place == len(drafts)
    assert kinds == {"accepted", "corrected", "bonus", "plain"}
    assert not page_data(trace.page(stats, length, {"temperature": "0.001"}))["greedy"]


def test_a_trace_changes_no_token(tokenizer):
    torch.manual_seed(0)
    draft = tiny_transformer(seed=1, noise=0.05, block_size=2000)
    _, plain = generate(tiny_transformer(seed=1, block_size=2000), [5, 100, 7], 150, draft=draft, speculate_k=4)
    _, _, stats, _ = traced_run(tokenizer)
    assert stats["generated_tokens"] == plain["generated_tokens"]


def test_what_came_after_a_failed_draft_is_plain_and_of_no_round(tokenizer):
    class Fails(NgramDraft):
        def propose(self, text, k, **sampling):
            if len(text[0]) > 20:
                raise RuntimeError("<out> of memory")
            return super().propose(text, k)

    with pytest.warns(UserWarning, match="of memory"):
        trace, rounds, stats, length = traced_run(tokenizer, draft=Fails())
    data = page_data(trace.page(stats, length, {}))
    last = [token for token in data["rows"][0] if "round" not in token][1:]
    assert last == data["rows"][0][-len(last) :] and len(last) > 30
    assert {token["kind"] for token in last} == {"plain"}
    assert "of memory" in data["stats"]["fallback"]


def test_a_run_that_drafted_nothing_has_a_page(tokenizer):
    trace, _, stats, length = traced_run(tokenizer, draft=NgramDraft(longest=9, shortest=9))
    data = page_data(trace.page(stats, length, {}))
    assert data["stats"]["alpha"] is None and {token["kind"] for token in data["rows"][0]} == {"plain"}


def test_a_draft_of_probability_zero_is_no_nan_in_the_page(tokenizer):
    trace = Trace(tokenizer, [5])
    p = torch.tensor([[[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]]])
    q = torch.tensor([[[0.0, 1.0, 0.0]]])
    trace.observe(Round(torch.tensor([[0]]), q, p, torch.tensor([[0.5]]), [0]))
    trace.put(0, 2, "corrected")
    (token,) = page_data(trace.page({"alpha": None}, DraftLength(1), {}))["rows"][0]
    assert token["rejected"][0]["ratio"] == 0


def test_what_it_keeps_of_a_round_is_small(tokenizer):
    trace, rounds, _, _ = traced_run(tokenizer, new_tokens=100)
    assert len(json.dumps(trace.tokens)) < 1000 * 100  # bytes a token
    tensors = [value for value in vars(trace).values() if isinstance(value, torch.Tensor)]
    assert not tensors and len(trace.last) == 3  # and those are the last round's


# ---------------------------------------------------------------- text


def test_what_cannot_be_seen_is_shown():
    assert visible(" the") == "␣the" and visible(" the", flowing=True) == " the"
    assert visible("  ", flowing=True) == "␣␣"
    assert visible("a\n\tb") == "a⏎⇥b" and visible("a\n\n", flowing=True) == "a⏎\n⏎\n"
    assert visible("\u202eevil\u202c") == "⟨U+202E⟩evil⟨U+202C⟩"
    assert visible("\u202e", flowing=True) == "⟨U+202E⟩"
    assert visible("\u200b") == "⟨U+200B⟩" and visible("\u200d") == "⟨U+200D⟩"
    assert visible("👩\u200d🚒") == "👩\u200d🚒"
    assert visible("\x00\x1b[31m") == "⟨U+0000⟩⟨U+001B⟩[31m"
    assert visible("\u2028\u00a0") == "⟨U+2028⟩⟨U+00A0⟩"
    assert visible("é漢字 مرحبا", flowing=True) == "é漢字 مرحبا"


def test_a_character_of_several_tokens_shows_their_bytes_until_it_is_whole(tokenizer):
    trace = Trace(tokenizer, [5])
    for byte in tokenizer.encode("🦊"):
        trace.put(0, byte, "plain")
    assert [token["text"] for token in trace.tokens[0]] == ["⟨F0⟩", "⟨9F⟩", "⟨A6⟩", "🦊"]
    assert trace.tokens[0][3]["name"] == "⟨8A⟩"


def test_an_id_beyond_the_vocabulary_has_a_name(tokenizer):
    trace = Trace(tokenizer, [5])
    trace.put(0, 99999, "plain")
    assert trace.tokens[0][0]["text"] == "⟨id 99999⟩"


def hostile_trace(tokenizer) -> Trace:
    """One round of hand-made numbers, whose tokens would like to be markup."""
    tokenizer.tokens = {0: HOSTILE.encode(), 1: " \u202eevil".encode(), 2: b"&amp;<b>", 3: b"\n"}
    trace = Trace(tokenizer, [0, 2])
    q = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [0.1, 0.8, 0.1, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    p = torch.tensor([[[0.2, 0.3, 0.3, 0.2], [0.5, 0.2, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]]])
    trace.put(0, 2, "plain")
    trace.observe(Round(torch.tensor([[0, 1, 2]]), q, p, torch.tensor([[0.125, 0.75, 0.5]]), [1], 0.02, 0.01))
    trace.put(0, 0, "accepted")
    trace.put(0, 3, "corrected")
    return trace


def hostile_page(tokenizer, **about: str) -> str:
    stats = {"alpha": 0.5, "tokens_per_pass": 2.0, "decode_s": 0.04, "ttft_s": 0.01, "fallback": HOSTILE}
    return hostile_trace(tokenizer).page(stats, DraftLength(3), {"target": HOSTILE, "draft": "x"} | about)


def test_text_of_the_model_cannot_end_the_element_that_holds_it(tokenizer):
    page = hostile_page(tokenizer)
    template = TEMPLATE.read_text(encoding="utf-8")
    assert page.count("<") == template.count("<")  # no tag more than the template's
    assert page_data(page)["rows"][0][1]["text"] == HOSTILE
    assert page.isascii() or all(c in template for c in page if not c.isascii())


def test_the_page_names_no_other_address(tokenizer):
    page = hostile_page(tokenizer).replace(json.dumps(HOSTILE)[1:-1].replace("<", "\\u003c"), "")
    assert not re.search(r"https?:|url\(|@import|\b(src|href|action)\s*=|\bimport\b|fetch\(|XMLHttp|WebSocket", page)
    assert "default-src 'none'" in page


def test_the_policy_has_the_hashes_of_the_style_and_the_script(tokenizer):
    page = hostile_page(tokenizer)
    for tag in ("style", "script"):
        body = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" in page


# ---------------------------------------------------------------- the command line


@pytest.fixture
def call(checkpoint, capsys):
    def call(*flags: object) -> tuple[int, str]:
        code = cli.main([str(flag) for flag in ("--checkpoint_path", checkpoint, "--max_new_tokens", 30, *flags)])
        return code, capsys.readouterr().err

    return call


def test_trace_writes_the_first_samples_page_whole(call, tmp_path, checkpoint):
    file = tmp_path / "page.html"
    code, err = call("--draft", "ngram", "--prompt", "hello hello", "--num_samples", 2, "--seed", 7, "--trace", file)
    assert code == 0, err
    data = page_data(file.read_text(encoding="utf-8"))
    assert data["about"] == {"target": "tiny", "draft": "ngram", "temperature": "0.8", "seed": "7"}
    assert data["prompt"] == "hello hello"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trace", "x.html"], ["--trace", "--draft"]),
        (["--trace", "x.html", "--draft", "ngram", "--interactive"], ["--trace", "--interactive"]),
        (["--trace", "/nowhere/x.html", "--draft", "ngram"], ["--trace", "/nowhere/x.html"]),
    ],
)
def test_trace_refuses_in_one_line(call, flags, words):
    code, err = call(*flags)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words)


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("chromium is not there (Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync"]  # fmt: skip
        browser = playwright.chromium.launch(executable_path=chromium, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page; it must log no error and ask for nothing but itself."""
    opened = []

    def show(page: str, width: int = 1280, **more):
        file = tmp_path / "page.html"
        file.write_text(page, encoding="utf-8")
        tab = browser.new_page(viewport={"width": width, "height": 800}, **more)
        faults = []
        tab.on("console", lambda message: faults.append(message.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("dialog", lambda dialog: faults.append(dialog.message))
        tab.on("request", lambda request: faults.append(request.url) if request.url != file.as_uri() else None)
        tab.goto(file.as_uri())
        opened.append((tab, faults))
        return tab

    yield show
    for tab, faults in opened:
        tab.close()
        assert faults == []


@pytest.fixture(scope="module")
def short_page(checkpoint):
    trace, _, stats, length = traced_run(get_tokenizer(checkpoint), new_tokens=150, rows=1)
    return trace.page(stats, length, {"target": "a", "draft": "b"})


def focused(tab) -> str:
    return tab.evaluate("document.activeElement.dataset.i ?? document.activeElement.dataset.r")


def test_hostile_text_is_text_in_the_browser(show, tokenizer):
    tab = show(hostile_page(tokenizer))
    assert tab.title() == "A trace of speculative decoding"
    assert tab.evaluate("document.querySelectorAll('img, iframe, object, b b').length") == 0
    assert tab.evaluate("document.scripts.length") == 2
    assert tab.locator(".token").nth(1).text_content() == HOSTILE
    assert tab.locator("#about").text_content() == f"target {HOSTILE} · draft x"
    assert HOSTILE in tab.locator("#story").text_content()
    tab.locator(".token").nth(2).click()
    assert "⟨U+202E⟩evil" in tab.locator("#detail").text_content()
    assert tab.locator("#text s").all_text_contents() == [" ⟨U+202E⟩evil", "&amp;<b>"]


def test_pointing_at_a_token_shows_what_decided(show, tokenizer):
    tab = show(hostile_page(tokenizer))
    tab.locator(".token").nth(1).hover()
    detail = tab.locator("#detail").text_content()
    for words in (
        "accepted",
        "round 1",
        "draft 1 of 3",
        "draft q0.400",
        "target p0.200",
        "u = 0.125",
        "min(1, p/q) = 0.500",
    ):
        assert words in detail
    tab.locator(".token").nth(2).hover()
    detail = tab.locator("#detail").text_content()
    for words in (
        "corrected",
        "draft q0.800",
        "target p0.200",
        "u = 0.750",
        "min(1, p/q) = 0.250",
        "rejected",
        "3 draft steps 20 ms",
    ):
        assert words in detail
    # (p - q)+ is 0.4, 0, 0.1, 0.1, normalized over 0.6
    rows = [row.split("|") for row in tab.evaluate(
        "[...document.querySelectorAll('#detail tbody tr')].map(r => [...r.cells].map(c => c.textContent).join('|'))"
    )]  # fmt: skip
    assert [row[-1] for row in rows] == ["0.667", "0.167", "0.167"]
    assert ["⏎ ←", "0", "0.100", "0.167"] in rows


def test_at_temperature_0_the_page_tells_of_a_comparison(show, tokenizer):
    tab = show(hostile_page(tokenizer, temperature="0"))
    name = HOSTILE.replace(" ", "␣")
    for i, shown, heard in (
        (
            1,
            f"The draft proposed “{name}”: kept, because the target's likeliest token here is “{name}” too.",
            f"The draft proposed {name}: kept, because the target's likeliest token here is the same.",
        ),
        (
            2,
            "The draft proposed “␣⟨U+202E⟩evil”: rejected, because the target's likeliest token here is “⏎”, which",
            "The draft proposed ␣⟨U+202E⟩evil: rejected, because the target's likeliest token here is ⏎, which",
        ),
    ):
        tab.locator(".token").nth(i).click()
        panel, said = (tab.locator(part).text_content() for part in ("#detail", "#described"))
        assert shown in panel and heard in said
        assert "No random number decides" in panel
        for text in (panel, said):
            assert not re.search(r"\bu =|p/q|p − q|random number was|drawn|draft q|target p|probability", text)
        assert tab.locator("#detail").locator(".line, .bars, .scale, table, img, iframe").count() == 0
    assert tab.locator("#detail .chips").text_content() == "&amp;<b>"
    assert tab.locator("#by-comparison").is_visible() and not tab.locator("#by-chance").is_visible()
    assert tab.title() == "A trace of speculative decoding"


def test_at_temperature_0_every_token_and_round_can_be_pointed_at(show, tokenizer):
    trace, _, stats, length = traced_run(tokenizer, temperature=0)
    tab = show(trace.page(stats, length, {"temperature": "0"}))
    for kind, words in (
        ("accepted", "kept, because"),
        ("corrected", "rejected, because"),
        ("bonus", "its likeliest token there"),
        ("plain >> nth=1", "this is the target's likeliest token"),
        ("plain >> nth=0", "it came with the pass that read the prompt"),
    ):
        tab.locator(f".token.{kind}").first.hover()
        assert words in tab.locator("#detail").text_content()
    tab.locator(".round").nth(1).click()
    assert "Round 2: " in tab.locator("#detail").text_content()


def test_above_temperature_0_the_page_tells_of_chance(show, tokenizer):
    tab = show(hostile_page(tokenizer, temperature="0.8"))
    assert tab.locator("#by-chance").is_visible() and not tab.locator("#by-comparison").is_visible()
    assert tab.locator("#detail .line").is_visible()


def test_the_text_is_one_stop_of_the_tab_key(show, short_page):
    tab = show(short_page)
    assert tab.evaluate("document.querySelectorAll('#text [tabindex=\"0\"]').length") == 1
    assert tab.evaluate("document.querySelectorAll('#lane [tabindex=\"0\"]').length") == 1
    tab.keyboard.press("Tab")  # the checkbox
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.closest('#text') !== null")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.closest('#lane') !== null")
    tab.keyboard.press("Shift+Tab")
    assert tab.evaluate("document.activeElement.closest('#text') !== null")


def test_arrow_keys_go_from_token_to_token_and_line_to_line(show, short_page):
    tab = show(short_page)
    tab.locator(".token").first.focus()
    for key, expected in (
        ("ArrowRight", "1"),
        ("ArrowRight", "2"),
        ("ArrowLeft", "1"),
        ("Home", "0"),
        ("End", "149"),
        ("ArrowRight", "149"),
    ):
        tab.keyboard.press(key)
        assert focused(tab) == expected
    tab.keyboard.press("Home")
    top = "document.activeElement.getClientRects()[0].top"
    above = tab.evaluate(top)
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate(top) > above
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate(top) == pytest.approx(above, abs=2)


def test_a_screen_reader_hears_what_decided(show, tokenizer):
    tab = show(hostile_page(tokenizer))
    tab.locator(".token").nth(1).focus()
    token = tab.locator(".token").nth(1)
    assert token.get_attribute("aria-label") == f"{HOSTILE}, accepted"
    assert token.get_attribute("aria-selected") == "true" and token.get_attribute("role") == "option"
    said = tab.locator("#" + token.get_attribute("aria-describedby")).text_content()
    for words in ("draft gave it 0.400", "target 0.200", "= 0.500", "random number was 0.125", "accepted"):
        assert words in said


def test_a_round_shows_its_tokens_and_its_costs(show, short_page):
    data = page_data(short_page)
    tab = show(short_page)
    count = len(data["rounds"])
    assert tab.locator(".round").count() == count
    tab.locator(".round").nth(1).click()
    tokens = [token for token in data["rows"][0] if token.get("round") == 1]
    assert tab.locator(".token.same").count() == len(tokens) == tab.locator(".round").nth(1).locator(".made i").count()
    # to scale: widths are as seconds
    k, draft, verify = data["rounds"][1]
    width = "e => e.getBoundingClientRect().width"
    parts = (".cost .draft", ".cost .verify", ".made i >> nth=0")
    wide = [tab.locator(".round").nth(1).locator(part).evaluate(width) for part in parts]
    assert wide[0] / wide[1] == pytest.approx(draft / verify, rel=0.1, abs=0.02)
    assert wide[1] / wide[2] == pytest.approx(verify / data["plain_s"], rel=0.1)
    tab.keyboard.press("ArrowRight")
    assert focused(tab) == "2"


def test_the_rows_of_a_batch_are_shown_one_at_a_time(show, tokenizer):
    trace, _, stats, length = traced_run(tokenizer, rows=3, stop_ids=range(30, 60))
    tab = show(trace.page(stats, length, {}))
    for row in (0, 2):
        tab.locator("#row").select_option(str(row))
        assert tab.locator(".token").all_text_contents() == [token["text"] for token in trace.tokens[row]]
    assert not show(hostile_page(tokenizer)).locator("#row").is_visible()


def test_a_phone_has_no_sideways_scroll_and_a_tap_opens_the_panel(show, short_page):
    tab = show(short_page, width=360, has_touch=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert not tab.locator("#panel").is_visible()
    chosen = tab.locator(".token.accepted").nth(20)
    chosen.evaluate("e => scrollBy(0, e.getBoundingClientRect().top - 700)")  # where the panel will be
    chosen.tap()
    assert tab.locator("#panel").is_visible()
    token, panel = (tab.locator(part).bounding_box() for part in (".token.here", "#panel"))
    assert token["y"] + token["height"] <= panel["y"]  # not behind it
    tab.locator("#close").tap()
    assert not tab.locator("#panel").is_visible()


CONTRASTS = """(names) => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const behind = (element) => {
    const color = channels(getComputedStyle(element).backgroundColor);
    return color[3] === 0 ? behind(element.parentElement) : color;
  };
  return Object.fromEntries(names.map((name) => {
    const element = document.querySelector(name);
    const a = light(channels(getComputedStyle(element).color)), b = light(behind(element));
    return [name, Math.max(a, b) / Math.min(a, b)];
  }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(show, short_page, scheme):
    tab = show(short_page, color_scheme=scheme)
    kinds = ["accepted", "corrected", "bonus", "plain"]
    names = [f"{where} .{kind}" for where in ("#text", "#key", "#lane") for kind in kinds]
    contrasts = tab.evaluate(CONTRASTS, [*names, "small", ".prompt", "#text s", "#text s.untested", "#detail"])
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}  # WCAG 2.2, 1.4.3
    assert (tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 249)") == (
        scheme == "light"
    )


def test_kinds_differ_without_colour(show, short_page):
    tab = show(short_page)
    style = "e => getComputedStyle(e).textDecorationStyle"
    styles = {
        kind: tab.locator(f".token.{kind}").first.evaluate(style)
        for kind in ("accepted", "corrected", "bonus", "plain")
    }
    assert len(set(styles.values())) == 4


def test_rejected_drafts_can_be_hidden(show, short_page):
    tab = show(short_page)
    assert tab.locator("#text s").first.is_visible()
    tab.locator("#show-rejected").uncheck()
    assert not tab.locator("#text s").first.is_visible()


def test_a_thousand_tokens_are_a_modest_page_that_answers_at_once(show, tokenizer):
    trace, _, stats, length = traced_run(tokenizer, new_tokens=1000)
    page = trace.page(stats, length, {})
    assert len(page) < 800_000
    tab = show(page, width=390)
    assert tab.locator(".token").count() == 1000
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    tab.locator(".token").nth(500).focus()
    ms = tab.evaluate("""() => {
      const start = performance.now();
      for (let n = 0; n < 20; n++) {
        const key = n % 2 ? "ArrowUp" : "ArrowDown";
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      }
      return (performance.now() - start) / 20;
    }""")
    assert ms < 100  # for a key
