"""Chat templates in the styles of published models, tokenizers for them, and conversations."""

from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Conversation = list[dict[str, Any]]

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] }}
{{- '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN = """{%- if tools %}
    {{- 'no tools here' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last < 0 %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {%- generation %}{{- content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA_2 = """{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user, …') }}
{% endif %}
{% if loop.index0 == 0 and system != false %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}
{%- endif %}
{% endfor %}"""

LLAMA_3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = message['content'] | trim + '<|eot_id|>' %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + content %}
{% if loop.index0 == 0 %}{% set content = bos_token ~ content %}{% endif %}{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}
{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] not in ["user", "assistant"] %}{%- continue %}{%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}"""

PHI_3 = """{% for message in messages %}
{{'<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PARTS = """{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}
{% if part.type == 'text' %}{{ part.text }}{% else %}{{ part | tojson }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ show(message.content) }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Style(NamedTuple):
    """A template, its special tokens, and the kind of tokenizer that models of this style have."""

    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    end: str | None  # of a turn
    pieces: str = "bytes"  # or "first", "each": with ▁ before the text, or before each part of it
    plain: tuple[str, ...] = ()  # added tokens that are not special
    strips: bool = False  # special tokens take the space after them along


STYLES = {
    "chatml": Style(CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), None, "<|endoftext|>", "<|im_end|>"),
    "qwen": Style(
        QWEN,
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        None,
        "<|im_end|>",
        "<|im_end|>",
        plain=("<think>", "</think>"),
    ),
    "llama-2": Style(LLAMA_2, ("<s>", "</s>", "<unk>"), "<s>", "</s>", "</s>", "each"),
    "llama-3": Style(
        LLAMA_3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
    ),
    "zephyr": Style(ZEPHYR, ("<s>", "</s>", "<unk>"), "<s>", "</s>", "</s>", "first"),
    "gemma": Style(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", "<end_of_turn>", "first"
    ),
    "mistral": Style(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", "</s>", "first"),
    "phi-3": Style(
        PHI_3,
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<s>",
        "<|endoftext|>",
        "<|end|>",
        "each",
        strips=True,
    ),
    "markers": Style(ZEPHYR, ("<s>", "</s>"), "<s>", "</s>", "</s>", plain=("<|user|>", "<|assistant|>", "<|system|>")),
    "parts": Style(PARTS, ("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", "<|im_end|>"),
}

TEXTS = (
    "Translate cheese to French. 안녕하세요, 오늘 날씨가 어때요? 你好，今天天气怎么样？",
    "[INST] system user assistant",
)


def tokenizer(style: Style) -> Tokenizer:
    """A small byte-level or byte-fallback tokenizer with the special tokens of a style."""
    added = [AddedToken(name, special=True, normalized=False, rstrip=style.strips) for name in style.special]
    if style.pieces == "bytes":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        found.train_from_iterator(
            TEXTS,
            trainers.BpeTrainer(
                vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
            ),
        )
    else:
        alphabet = [
            *(f"<0x{i:02X}>" for i in range(256)),
            "▁",
            *sorted(set("".join(TEXTS)) - {" "}),
            *"<|>/_[]",
            "▁c",
            "ch",
            "▁he",
        ]
        vocab = {token: i for i, token in enumerate(dict.fromkeys((*style.special, *alphabet)))}
        found = Tokenizer(
            models.BPE(vocab, [("▁", "c"), ("c", "h"), ("▁", "he")][:2], byte_fallback=True, fuse_unk=True)
        )
        if style.pieces == "each":
            found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        found.decoder = decoders.Sequence(steps)
    found.add_special_tokens(added)
    found.add_tokens([AddedToken(name, special=False, normalized=False) for name in style.plain])
    return found


def turns(*contents: str, system: str | None = None) -> Conversation:
    """A conversation of a user and an assistant."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


CONVERSATIONS: list[Conversation] = [
    turns("Hello"),
    turns("Hello", "Hi, how can I help?", "Translate cheese."),
    turns("안녕하세요, 오늘 날씨가 어때요?", system="한국어로 대답하세요."),
    turns("你好，今天天气怎么样？", "很好！", "谢谢", system="请用中文回答。"),
    turns("  spaces around  ", "\n\nlines\n", "\ttabs\n"),
    turns("a < b, c > d, x | y, [1], <b>bold</b> <", "> quoted\n</p>", "<|", "|>"),
    turns("👩‍👩‍👧 é é ﬁ", system=""),
    turns("def f(x):\n    return {'a': x}\n", "```python\nf(1)\n```", "{{ messages }} {% raw %}"),
    turns("x" * 500, "<think>\nshort\n</think>\n\nyes", "again"),
    turns("one", "two"),
]
