"""Chat templates: rendered texts, positions of answers, and limits on hostile templates."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from chats import ALTERNATING, MARKED, PLAIN, REASONING, UNREASONED, messages, template

from collapipe.errors import ConfigError
from collapipe.text import chat_template
from collapipe.text.chat_template import Answers, ChatTemplate, Message, Renderer
from collapipe.text.tokenizer import Tokenizer, check_tokenizer

TALK = messages("One?", "It is 1.", "Two?", "It is 2.")


def answers(renderer: Renderer, talk: Sequence[Message] = TALK) -> tuple[str, Answers]:
    """The text of one conversation and the positions of its answers."""
    (found,) = renderer.answers([talk])
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (MARKED, ["It is 1.<|end|>", "It is 2.<|end|>"]),
        (PLAIN, ["It is 1.<|end|>", "It is 2.<|end|>"]),
        (REASONING, ["It is 1.<|end|>", "<think></think>It is 2.<|end|>"]),
        (UNREASONED, ["It is 1.<|end|>", "It is 2.<|end|>"]),
        (ALTERNATING, ["assistant: It is 1.\n", "assistant: It is 2.\n"]),
    ],
    ids=["marked", "plain", "reasoning", "unreasoned", "without heading"],
)
def test_answers_are_found_with_their_end_tokens(source: str, expected: list[str]) -> None:
    text, places = answers(Renderer(template(source)))
    assert [text[slice(*each)] for each in places] == expected


def test_an_answer_that_repeats_its_question_is_found_after_it() -> None:
    talk = messages("the same", "the same", "the same", "same")
    text, places = answers(Renderer(template(PLAIN)), talk)
    assert [text[slice(*each)] for each in places] == ["the same<|end|>", "same<|end|>"]
    assert [text[:first].count("<|assistant|>") for first, _ in places] == [1, 2]


def test_a_prompt_ends_with_the_heading_of_an_answer() -> None:
    assert Renderer(template(PLAIN)).prompt(TALK[:1]) == "<|user|>One?<|end|><|assistant|>"


def test_a_template_can_use_its_special_tokens_and_its_date() -> None:
    source = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ messages | length }}"
    assert Renderer(template(source, bos_token="<s>")).prompt(TALK) == "<s>03 May 20334"


@pytest.mark.parametrize(
    ("source", "talk", "cause"),
    [
        (ALTERNATING, [*TALK, TALK[-1]], "roles must alternate"),
        (PLAIN, TALK[1:], "begins with the assistant"),
        ("{% for m in messages", TALK, "unexpected end"),
        ("{{ messages[0].tool.name }}", TALK, "has no attribute"),
        ("{{ messages | length }}", TALK, "message 2 is not found"),
        ("{{ messages.__class__.__mro__ }}", TALK, "unsafe"),
        ("{{ messages.append(1) }}", TALK, "not safe|unsafe"),
        ("{{ 'a' * 9000000 }}{{ messages }}", TALK, "characters"),
    ],
)
def test_the_error_of_a_failing_template_states_the_cause(
    source: str, talk: list[Message], cause: str
) -> None:
    with pytest.raises(ValueError, match=cause) as raised:
        answers(Renderer(template(source)), talk)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["", "no program", "{{ messages }}" + " " * 2**17])
def test_a_template_that_is_too_long_or_ignores_messages_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        template(source)


# Uses the features that transformers adds to Jinja or changes.
RICH = """
{%- macro mark(role) -%}<|{{ role }}|>{%- endmacro -%}
{%- set seen = namespace(count=0) -%}
{{ bos_token }}{{ dict(a=1) | tojson(indent=1) }}{{ strftime_now('%d %b %Y') }}
{%- for m in messages %}
    {%- if loop.index > 4 %}{% break %}{% endif %}
    {%- set seen.count = seen.count + m.content | length %}
    {{- mark(m.role) }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content }}
        {%- if m.reasoning_content is defined %}?{% endif %}{{ '<|end|>' }}{% endgeneration %}
    {%- else %}{{ m | tojson }}
    {% endif %}
{%- endfor %}
{{ seen.count }}{% if tools %}tools{% endif %}{% if add_generation_prompt %}{{ mark('assistant') }}
{%- endif %}"""


@pytest.mark.parametrize("source", [RICH, MARKED, REASONING], ids=["rich", "marked", "reasoning"])
def test_rendered_texts_equal_those_of_transformers(source: str) -> None:
    """Positions count characters, also for characters of several bytes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = messages("<One> 母?", "It is 🐔 'é'.\u2028", "Two?", "It is\n2.", "Three?", "3")
    fixed, named = source.replace("strftime_now('%d %b %Y')", "'03 May 2033'"), {"bos_token": "<s>"}
    renderer = Renderer(template(source, **named))
    (text,), _ = render_jinja_template(
        [talk], chat_template=fixed, add_generation_prompt=True, **named
    )
    assert renderer.prompt(talk) == text
    (text,), places = render_jinja_template(
        [talk], chat_template=fixed, return_assistant_tokens_mask=True, **named
    )
    found = answers(renderer, talk)
    assert found[0] == text
    assert places == [[]] or found[1] == places[0]
    assert "It is 🐔 'é'." in text[slice(*found[1][0])]


LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
)


@pytest.mark.parametrize(
    ("limit", "value", "source", "cause"),
    [
        ("_CPU_S", 0.2, LOOP, r"0\.2 s of processor time"),
        ("_CPU_S", 0.2, "{{ messages }}{{ 7 ** (9 ** 9) }}", r"0\.2 s of processor time"),
        ("_WALL_S", 0.2, LOOP, r"0\.2 s for a conversation"),
        ("_MEMORY", 3 * 10**8, "{{ messages }}{{ 'a' * 4 * 10**8 }}", r"0\.3 GB of memory"),
        ("_MEMORY", 3 * 10**8, "{{ messages }}{{ '%400000000d' % 1 }}", r"0\.3 GB of memory"),
    ],
    ids=["loop", "number", "wall", "text", "format"],
)
def test_a_template_that_exceeds_a_limit_is_stopped(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, source: str, cause: str
) -> None:
    monkeypatch.setattr(chat_template, limit, value)
    renderer = Renderer(template(source))
    with pytest.raises(ValueError, match=rf"{cause}.*; set another task\.chat_template") as raised:
        answers(renderer)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=cause):
        renderer.prompt(TALK)


def test_each_message_adds_processor_time_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All conversations share the limit. The system measures time in ticks of 4 ms."""
    work = template(LOOP.replace("a in range(99999)", "a in range(16)"))
    monkeypatch.setattr(chat_template, "_CPU_S", 0.2)
    monkeypatch.setattr(chat_template, "_CPU_S_EACH", 0.0)
    done, renderer = list[str](), Renderer(work)
    with pytest.raises(ValueError, match="processor time"):
        for _ in range(100):
            done.append(renderer.prompt(TALK))
    monkeypatch.setattr(chat_template, "_CPU_S_EACH", 1.0)
    renderer = Renderer(work)
    assert all(renderer.prompt(TALK) for _ in range(2 * len(done)))


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ raise_exception('long ' * 100000) }}{{ messages }}", "long long"),
        ("{{ '\\ud800' }}{{ messages }}", "surrogates not allowed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}{{ messages }}", "recursion"),
        ("{{ " + "(" * 20000 + "messages }}", "recursion|nested"),
        (
            "{% for n in range(10001) %}{% generation %}{% endgeneration %}{% endfor %}"
            "{{ messages }}",
            "10,001 marked answers",
        ),
    ],
    ids=["long", "surrogate", "recursion", "nested", "marks"],
)
def test_a_hostile_template_gives_an_error_of_one_short_line(
    source: str, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    renderer = Renderer(template(source))
    for _ in range(2):
        with pytest.raises(ValueError, match=cause) as raised:
            answers(renderer)
        assert len(str(raised.value)) < 600
        assert str(raised.value).isprintable()
    assert capfd.readouterr() == ("", "")


def test_special_tokens_with_names_of_other_arguments_are_refused() -> None:
    for name in ("chat_template", "messages"):
        with pytest.raises(ValueError, match="refuses it"):
            Renderer(template(PLAIN, **{name: "x"})).prompt(TALK)


def test_conversations_are_rendered_until_one_fails() -> None:
    """The conversations exceed the buffers of pipes. After the failure, others are rendered."""
    renderer = Renderer(template(ALTERNATING))
    long = messages("One?", "x" * 9000)
    wrong = messages("One?", "x", "y", roles=("user", "assistant", "assistant"))
    found = renderer.answers([*[long] * 30, wrong, long])
    assert {next(found)[0] for _ in range(30)} == {f"user: One?\nassistant: {'x' * 9000}\n"}
    with pytest.raises(ValueError, match="must alternate"):
        next(found)
    assert [len(places) for _, places in renderer.answers([TALK, TALK[:2]])] == [2, 1]


def test_the_process_ends_with_its_object() -> None:
    renderer = Renderer(template(PLAIN))
    renderer.prompt(TALK)
    process = renderer._process
    assert process.poll() is None
    del renderer
    assert process.returncode is not None


def test_the_process_imports_only_one_file_of_transformers() -> None:
    program = Path(chat_template.__file__).with_name("render.py")
    command = [sys.executable, "-P", "-X", "importtime", str(program)]
    given = {"template": {"source": "", "special_tokens": {}, "day": "2033-05-03"}}
    limits = {"cpu_s": 9, "cpu_s_each": 1, "wall_s": 99, "memory": 10**9}
    done = subprocess.run(
        command, input=json.dumps(given | limits), capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "transformers.utils.chat_template_utils" in imported
    assert not {"torch", "transformers", "transformers.utils.generic", "collapipe"} & imported


@pytest.mark.parametrize("library", ["transformers", "jinja2"])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(chat_template, "find_spec", lambda name: None if name == library else name)
    with pytest.raises(ModuleNotFoundError) as raised:
        Renderer(template(PLAIN))
    assert raised.value.name == library


def test_a_packed_tokeniser_contains_its_template() -> None:
    given = template(PLAIN, bos_token="<s>")
    sent = replace(Tokenizer.of_bytes(), chat_template=given).pack()
    check_tokenizer(sent, "packed")
    received = replace(Tokenizer.unpack(sent), labels=["a"]).chat_template
    assert received == template(PLAIN, bos_token="<s>")
    assert Tokenizer.unpack(Tokenizer.of_bytes().pack()).chat_template is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": 7},
        {"special_tokens": {"bos_token": 1}},
        {"special_tokens": "<s>"},
        {"day": "today"},
        {"day": 7},
        {"file": "x"},
    ],
)
def test_an_invalid_packed_template_is_refused(wrong: dict[str, object]) -> None:
    sent = json.loads(replace(Tokenizer.of_bytes(), chat_template=template(PLAIN)).pack())
    sent["chat"] |= wrong
    with pytest.raises(ConfigError):
        Tokenizer.unpack(json.dumps(sent))


def test_special_tokens_in_a_text_are_recognised_only_in_chats() -> None:
    tokenizer = Tokenizer.of_bytes()
    ((ids, places),) = tokenizer.encode_chat(["a</s>é"])
    letters = ids.tolist()
    assert letters[1] == tokenizer.vocabulary.eos
    assert places.tolist() == [[0, 1], [1, 5], [5, 6], [5, 6]]
    assert tokenizer.vocabulary.eos not in tokenizer.encode(["a</s>"])[0]


def test_templates_with_equal_fields_are_equal() -> None:
    assert template(PLAIN) == ChatTemplate(PLAIN, {}, "2033-05-03")
