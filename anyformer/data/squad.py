"""Read questions with their texts and answers, in the formats of SQuAD (Rajpurkar et al. 2016). Imports no torch.

    .json    {"data": [{"paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": [...]}]}]}]}
    .jsonl   {"question": ..., "context": ..., "answers": {"text": [...], "answer_start": [...]}}

Answers of both may be a list of {"text": ..., "answer_start": ...} or one table of two lists. An answer without
`answer_start` is searched in the text. A question without answers has none in its text (SQuAD 2.0).
"""

import json
from collections.abc import Iterator
from typing import Any

from anyformer.config.spec import ConfigError, Fault, shorten
from anyformer.data.files import File, Parsed, open_files
from anyformer.data.readers import Rows, collect, part_of
from anyformer.recipe import Root, SquadFile

MAX_SHOWN = 40  # characters of an answer in a message


def squad_rows(source: SquadFile, data: Root) -> Rows:
    """Return the questions of a file."""
    file = open_files(source, data, "path")["path"]
    return collect(part_of(source, questions(source, file)), dict.fromkeys(("text", "pair", "answers"), file))


def questions(source: SquadFile, file: File) -> Parsed:
    """Yield the number of each question, and its row or its fault; for .jsonl the number of the line."""
    if is_lines(source):
        for number, line in enumerate(file.lines(), 1):
            if line.strip():
                yield number, file.flaw(line) or _parsed_row(line)
        return
    try:
        data = json.loads(file.text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Fault("path", f"= {source.path!r}: {file.name} is not valid JSON: {error}")]) from None
    for number, one in enumerate(_nested(data), 1):
        yield number, _row(one)


def is_lines(source: SquadFile) -> bool:
    return source.path.lower().removesuffix(".gz").endswith(".jsonl")


def _parsed_row(line: str) -> dict[str, str] | str:
    try:
        return _row(json.loads(line))
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"


def _nested(data: Any) -> Iterator[Any]:
    """Yield every question with the text of its paragraph; of a plain list, its entries."""
    articles = data.get("data") if isinstance(data, dict) else data
    for article in articles if isinstance(articles, list) else [None]:
        if not isinstance(article, dict) or "paragraphs" not in article:
            yield article
            continue
        paragraphs = article["paragraphs"]
        for paragraph in paragraphs if isinstance(paragraphs, list) else [None]:
            if not isinstance(paragraph, dict) or not isinstance(questions := paragraph.get("qas", []), list):
                yield None
                continue
            for one in questions:
                yield {**one, "context": paragraph.get("context")} if isinstance(one, dict) else None


def _row(one: Any) -> dict[str, str] | str:
    """Return the columns of a question, or why it cannot be read."""
    if not isinstance(one, dict):
        return "not a question: expected an object with question, context and answers"
    question, context, answers = one.get("question"), one.get("context"), one.get("answers", [])
    for name, value in (("question", question), ("context", context)):
        if not isinstance(value, str):
            return f"{name} must be a text, not {type(value).__name__}"
    assert isinstance(question, str)
    assert isinstance(context, str)
    if isinstance(answers, dict):
        texts, starts = answers.get("text", []), answers.get("answer_start")
        starts = [None] * len(texts) if starts is None and isinstance(texts, list) else starts
        if not isinstance(texts, list) or not isinstance(starts, list) or len(starts) != len(texts):
            return "answers must have two lists of one length, text and answer_start"
        answers = [{"text": text, "answer_start": starts[i]} for i, text in enumerate(texts)]
    if one.get("is_impossible") or not answers:
        answers = []
    if not isinstance(answers, list):
        return "answers must be a list, or a table of two lists"
    found = []
    for answer in answers:
        placed = _place(answer, context)
        if isinstance(placed, str):
            return placed
        found.append(placed)
    return {"text": question, "pair": context, "answers": json.dumps(found, ensure_ascii=False)}


def _place(answer: Any, context: str) -> tuple[str, int] | str:
    """Return an answer and where it begins in its text, or its fault."""
    text = answer.get("text") if isinstance(answer, dict) else None
    if not isinstance(text, str) or not text.strip():
        return "an answer must have a text"
    start = answer.get("answer_start")
    if start is None:
        start = context.find(text)
        return (text, start) if start >= 0 else f"the answer {shorten(text, MAX_SHOWN)!r} is not in the context"
    if type(start) is not int or start < 0 or context[start : start + len(text)] != text:
        return f"the answer {shorten(text, MAX_SHOWN)!r} is not at answer_start = {start} of the context"
    return text, start
