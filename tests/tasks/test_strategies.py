"""Every way to choose tokens, on texts: what answers must be they are, and none depends on what stands beside it."""

import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from anyformer.config import ConfigError
from anyformer.generation.beam_search import beam_search
from anyformer.runs.run import Run
from anyformer.tasks import generation
from anyformer.tasks.generation import NotFinite
from anyformer.tasks.output_constraints import spellings
from tests.test_generate import HOT, KINDS, PROMPTS, SHAPES, TOKENIZERS, writer

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.5, "seed": 3},
    "beams": {"beams": 3},
    "groups": {"beams": 4, "groups": 2, "diversity_penalty": 1.0},
    "contrastive": {"candidates": 3, "alpha": 0.6},
    "lookup": {"lookup": 2, "ahead": 3},
    "lookup, drawn": {"lookup": 2, "temperature": 1.5, "seed": 3},
}
SCHEMA = {
    "type": "object",
    "properties": {"이름": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["이름", "ok"],
}


@pytest.mark.parametrize(("kind", "shape"), [*((kind, "lm") for kind in KINDS), *(("bpe", s) for s in SHAPES[1:])])
def test_one_beam_is_greedy(kind: str, shape: str) -> None:
    run = writer(kind, shape, ends=True)
    plain = run.generate(PROMPTS, max_new_tokens=12)
    assert run.generate(PROMPTS, max_new_tokens=12, beams=1) == plain
    assert run.generate(PROMPTS, max_new_tokens=12, candidates=3, alpha=0.0) == plain
    assert run.generate(PROMPTS, max_new_tokens=12, lookup=2) == plain
    assert run.generate(PROMPTS, max_new_tokens=12, draft=writer(kind, shape, ends=True)) == plain


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_texts_together_are_as_one_by_one(shape: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unequal length, with rooms of their own and near the last position; in one batch and in many."""
    run = writer("bpe", shape, length=18, ends=True)
    how = WAYS[way] if "seed" not in WAYS[way] else WAYS[way] | {"seed": [5, 6, 7, 8]}

    def alone(i: int, **more: Any) -> str:
        own = how | {"seed": [how["seed"][i]]} if "seed" in how else how
        return run.generate([PROMPTS[i]], **own, **more)[0]

    for more in ({}, {"regex": r" ?[a-z]{2,9}"}):
        together = run.generate(PROMPTS, **how, **more)
        assert together == [alone(i, **more) for i in range(len(PROMPTS))]
        with monkeypatch.context() as patch:
            patch.setattr(generation, "MAX_INFERENCE_TOKENS", 60)
            assert run.generate(PROMPTS, **how, **more) == together


def test_the_best_answers_are_those_of_the_search() -> None:
    run = writer("bytes", "encoder-decoder", ends=True)
    tokenizer = run.tokenizer
    how = {"beams": 5, "n_best": 4, "length_penalty": 0.5, "max_new_tokens": 8}
    for text, found in zip(PROMPTS, run.hypotheses(PROMPTS, **how), strict=True):
        ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos]])
        best = beam_search(run.model, ids, stop=[tokenizer.eos], **how)
        assert [one.text for one in found] == tokenizer.decode_batch(best.ids[0].tolist())
        assert [one.score for one in found] == pytest.approx(best.scores[0].tolist())
        assert run.generate([text], **how | {"n_best": 1}) == [found[0].text]
    assert run.hypotheses([" "], beams=2) == [[]]


# -- what answers must be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=5)
def test_limits_hold(way: str, data: st.DataObject) -> None:
    """However little room there is, as long as there is some."""
    kind, shape = data.draw(st.sampled_from(["chars", "bytes", "bpe", "unigram"])), data.draw(st.sampled_from(SHAPES))
    run, how = writer(kind, shape, ends=data.draw(st.booleans())), WAYS[way]
    letter = data.draw(st.sampled_from("aeot"))
    most = data.draw(st.integers(6, 20))
    for pattern in (rf"[^{letter}]*", r"(dog|안녕)(, (dog|안녕))*", "[a-d 가-힣🙂]{2,6}"):
        for said in run.generate(["the dog", "안녕"], regex=pattern, max_new_tokens=most, **how):
            assert re.fullmatch(pattern, said, re.ASCII), (pattern, said)
    choices = ["dog", " fox over", "안녕 🙂", "the"]
    for said in run.generate(["the dog", "안녕"], choices=choices, max_new_tokens=most, **how):
        assert said in choices
    for said in run.generate(["the dog", "안녕"], banned=[letter, "quick", "녕"], max_new_tokens=most, **how):
        assert not any(word in said for word in (letter, "quick", "녕"))
    for said in run.generate(["the dog"], prefix="over 안", max_new_tokens=40, **how):
        assert said.startswith("over 안")
        assert len(said) > len("over 안")
    if shape == "lm" and how.keys() <= {"temperature", "seed"}:
        whole = run.generate(["dog"], regex="[a-d]+,안*", max_new_tokens=most, **how)
        assert "".join(run.stream("dog", regex="[a-d]+,안*", max_new_tokens=most, **how)) == whole[0]


@pytest.mark.parametrize("kind", ["words", "wordpiece"])
def test_words_have_a_space_before_them(kind: str) -> None:
    """In what goes on, and not in an answer."""
    lm, pair = writer(kind), writer(kind, "encoder-decoder")
    for how in (WAYS["greedy"], WAYS["beams"], WAYS["lookup, drawn"]):
        assert lm.generate(["fox"], regex="( (fox|안녕)){3}", max_new_tokens=9, **how)[0].split() != []
        said = pair.generate(["fox"], regex="(fox|안녕)( (fox|안녕))*", max_new_tokens=9, **how)[0]
        assert set(said.split()) <= {"fox", "안녕"}
        assert pair.generate(["fox"], choices=["안녕", "fox over"], **how)[0] in ("안녕", "fox over")
        assert lm.generate(["fox"], choices=[" 안녕", " fox over"], **how)[0] in (" 안녕", " fox over")
        assert lm.generate([""], choices=["안녕", "fox over"], **how)[0] in ("안녕", "fox over")
        assert "fox" not in lm.generate(["dog"], banned=["fox"], max_new_tokens=30, **how)[0]
    if kind == "words":  # pieces of words may go on from one
        with pytest.raises(ConfigError, match=r"choices: 'fox' continues a text .*: write ' fox'"):
            lm.generate(["dog"], choices=["fox"])
        with pytest.raises(ConfigError, match=r"regex: .*impossible.*begins with a space: write ' \(\?:fox\|dog\)'"):
            lm.generate(["dog"], regex="fox|dog")
        with pytest.raises(ConfigError, match=r"regex: .*impossible: the vocabulary can write no text of it$"):
            lm.generate(["dog"], regex="Zoo")


@pytest.mark.parametrize(("kind", "shape"), [("bytes", "lm"), ("bpe", "decoder"), ("unigram", "encoder-decoder")])
@pytest.mark.parametrize("way", ["greedy", "drawn", "beams", "contrastive", "lookup"])
def test_json_is_valid_even_where_there_is_little_room(kind: str, way: str, shape: str) -> None:
    run = writer(kind, shape)
    for most in (50, 80):
        (said,) = run.generate(["the dog"], json_schema=SCHEMA, max_new_tokens=most, **WAYS[way])
        found = json.loads(said)
        assert {"이름", "ok"} <= found.keys() <= {"이름", "n", "ok"}
        assert len(found["이름"]) <= 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_phrases_appear_as_text(kind: str, shape: str) -> None:
    run = writer(kind, shape, ends=True)
    phrases = ["over", "안녕 세상!"] if kind != "wordpiece" else ["over", "안녕"]
    for beams in (4, 9):
        for said in run.generate(["dog", "the lazy"], beams=beams, phrases=phrases, max_new_tokens=24):
            assert all(phrase in said for phrase in phrases)
        for one in run.hypotheses(["the lazy"], beams=beams, n_best=3, phrases=phrases, max_new_tokens=24)[0]:
            assert all(phrase in one.text for phrase in phrases)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.sampled_from(["the", " the", "over the", "fox jumps", "안녕", "🙂 naïve", "café,"]))
def test_spellings_are_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    for lead in {"", tokenizer.lead}:
        for ids in spellings(text, tokenizer, lead):
            table = tokenizer.vocabulary_bytes()
            assert b"".join(table[id] for id in ids).decode() == lead + text
    if kind in ("chars", "bytes", "bpe", "unigram"):
        assert spellings(text, tokenizer, tokenizer.lead)[0] == tuple(tokenizer.encode(text))
        assert spellings(text, tokenizer)


def test_a_model_with_more_ids_than_its_tokenizer() -> None:
    """Such as one whose table was padded to a round number."""
    run = writer("bytes")
    config = run.config.model_copy(update={"target": run.config.target.model_copy(update={"vocab": 300})})
    model = type(run.model)(config).eval()
    wide = Run(model, run.task, run.spec, run.folder)
    for how in WAYS.values():
        assert re.fullmatch("[ab]{3}", wide.generate(["x"], regex="[ab]{3}", **how)[0])


# -- what is wrong --------------------------------------------------------------------------------------------------

WRONG = {
    "beams that draw": ({"beams": 2, "temperature": 0.5}, "temperature = 0.5: beam search does not sample"),
    "a seed of beams": ({"beams": 2, "seed": 1}, "seed = 1: beam search does not sample: leave it out, or beams"),
    "a seed of nothing": ({"seed": 1}, "seed = 1: needs a temperature above 0"),
    "more than beams": ({"beams": 2, "n_best": 3}, "n_best = 3: must be from 1 to the number of beams, 2"),
    "groups of nothing": ({"groups": 2}, "groups = 2: needs beams: give their number"),
    "two ways": ({"beams": 2, "alpha": 0.5}, "beams: belongs to beam search, and alpha to contrastive search"),
    "two guesses": ({"lookup": 2, "draft": writer()}, "lookup: drafts tokens instead of a draft model"),
    "ahead of nothing": ({"ahead": 2}, "ahead = 2: needs a draft, a lookup or self_draft"),
    "many answers": ({"beams": 2, "n_best": 2}, "n_best = 2: `generate` gives the best; see `hypotheses`"),
    "a beam's stop string": ({"beams": 2, "stop": "x"}, "stop: is not for beam search"),
    "phrases alone": ({"phrases": ["x"]}, "phrases: needs beams"),
    "two wholes": ({"regex": "a", "choices": ["a"]}, "choices: defines the whole answer, and so does regex"),
    "a pattern and a ban": ({"regex": "a", "banned": ["b"]}, "banned: cannot be combined with regex"),
    "a pattern and a stop": ({"regex": "a", "stop": "b"}, "stop: would cut off what regex requires"),
    "a banned phrase": ({"beams": 2, "phrases": ["abc"], "banned": ["b"]}, "banned: 'b' occurs in the phrase 'abc'"),
    "no choice": ({"choices": []}, "choices: is empty: give at least one"),
    "one choice": ({"choices": "yes"}, "choices: must be a list of strings, not one"),
    "a ban of nothing": ({"banned": [""]}, "banned: an empty string occurs everywhere"),
    "no pattern": ({"regex": "(a"}, r"regex: the pattern \(a, character 1: a \( without its \)"),
    "no text at all": ({"regex": r"[^\x00-\U0010ffff]"}, "regex: the pattern .* is impossible: no text matches it"),
    "no schema": ({"json_schema": {"type": "strin"}}, "json_schema.type = 'strin': must be of"),
    "an unknown word": (
        {"json_schema": {"type": "string", "format": "date"}},
        "json_schema.format: is not supported",
    ),
    "a schema of nothing": (
        {"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}},
        "json_schema: has no integer from 3 to 2",
    ),
    "a prefix that is not allowed": (
        {"regex": "[a-c]+", "prefix": "x"},
        "prefix = 'x': regex allows no answer that begins with it",
    ),
    "a banned prefix": (
        {"banned": ["x"], "prefix": "wxy"},
        "prefix = 'wxy': banned allows no answer that begins with it",
    ),
    "a long prefix": ({"prefix": "xyz", "max_new_tokens": 2}, "text 1: its answer has 2 tokens at most"),
    "too little room": ({"regex": "[a-c]{9}", "max_new_tokens": 4}, "text 1: no answer of at most 4 tokens was found"),
    "more than most": ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens = 5: is more than max_new_tokens"),
    "no end": ({"regex": "a", "stop_ids": []}, "stop_ids: is empty"),
    "a draft of other words": ({"draft": writer("chars")}, "draft: has another tokenizer"),
    "too many candidates": ({"candidates": 999}, "candidates = 999: the vocabulary has 262"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_clear_line(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as error:
        writer().generate(["a"], **options)
    assert "\n" not in str(error.value)


def test_what_the_vocabulary_cannot_write() -> None:
    run = writer("chars", "encoder-decoder")
    with pytest.raises(
        ConfigError, match="regex: the pattern 'Z' is impossible: the vocabulary can write no text of it"
    ):
        run.generate(["a"], regex="Z")
    with pytest.raises(ConfigError, match="choices: 'Zoo' cannot be written by the tokenizer, which turns it into"):
        run.generate(["a"], choices=["dog", "Zoo"])
    with pytest.raises(ConfigError, match="phrases: 'Zoo' cannot be written"):
        run.generate(["a"], beams=2, phrases=["Zoo"])
    with pytest.raises(ConfigError, match="stream: is for sampling and greedy decoding"):
        run.stream("a", beams=2)
    with pytest.raises(ConfigError, match="beams: is missing"):
        run.hypotheses(["a"])


@pytest.mark.parametrize("way", ["greedy", "beams", "contrastive", "lookup"])
def test_a_text_that_fails_spoils_no_other(way: str) -> None:
    run = writer("chars")
    (id,) = run.tokenizer.encode("x")
    with torch.no_grad():
        run.model.target.table.weight[id] = math.nan
    texts, how = ["o", "x", "the", "ax"], {"max_new_tokens": 5, "banned": ["x"], **WAYS[way]}
    with pytest.raises(NotFinite, match="texts 2, 4: the model's logits are not finite") as error:
        run.generate(texts, **how)
    answers = error.value.answers
    assert answers[1] is answers[3] is None
    assert [answers[0], answers[2]] == run.generate(["o", "the"], **how)


def test_a_beam_wider_than_the_vocabulary() -> None:
    run = writer("chars")
    beams = run.tokenizer.size + 7
    assert len(run.hypotheses(["dog"], beams=beams, n_best=beams, max_new_tokens=1)[0]) == run.tokenizer.size
    assert len(run.hypotheses(["dog"], beams=beams, n_best=beams, max_new_tokens=2)[0]) == beams


# -- what else could be said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_alternatives_are_what_scores_say(shape: str) -> None:
    run = writer("bytes", shape)
    for answer in ("", "do"):
        found = run.alternatives("the ", 5, answer=answer)
        assert [one.probability for one in found] == sorted((one.probability for one in found), reverse=True)
        for one in found:
            said = answer + run.tokenizer.decode([one.id])
            if len(run.tokenizer.encode(said)) == len(answer) + 1 and one.id in run.tokenizer.encode(said):
                logprob = run.score(["the "], [said])[0].logprobs[len(answer)]
                assert math.log(one.probability) == pytest.approx(logprob, abs=1e-6)
        assert found[0].token == run.tokenizer.token(found[0].id)
    if shape == "lm":
        assert run.alternatives("the dog", 3, at=3) == run.alternatives("the", 3)
    with pytest.raises(ConfigError, match="at = 99: must be from 1 to"):
        run.alternatives("the", 3, at=99)
    with pytest.raises(ConfigError, match="k = 0: must be from 1 to the size of the vocabulary"):
        run.alternatives("the", 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_run_in_fewer_bits(bits: Any) -> None:
    run = writer("bytes")
    small = run.quantise(bits)
    assert small.model is not run.model
    assert sum(x.nbytes for x in small.model.buffers()) > 0
    for how in WAYS.values():
        assert re.fullmatch("[a-z]{4}", small.generate(["x"], regex="[a-z]{4}", cache="int8", **how)[0])
    assert run.generate(["dog"], seed=1, **HOT) == writer("bytes").generate(["dog"], seed=1, **HOT)
