"""Templates of models' folders: data stays data, and nothing that one does is long, large or outside its sandbox."""

import time
import tracemalloc

import pytest

from gateway.text.chat_template import TEXT_CHARS_MAX, ChatTemplate, TemplateError


def test_an_endless_template_is_stopped() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="not done after"):
        ChatTemplate(loop + "{% endfor %}").render({}, seconds=0.1)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000 }}",
        "{{ 9 ** 9999999 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined.x.y }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render({"messages": []})


def test_a_request_is_never_a_template() -> None:
    assert ChatTemplate("{{ messages[0] }}").render({"messages": ["{{ 7 * 7 }}"]}) == "{{ 7 * 7 }}"


def doubled(change: str, begin: str = "'aa'") -> str:
    """Something that is doubled, again and again."""
    return f"{{% set ns = namespace(x={begin}) %}}{{% for i in range(60) %}}{{% set ns.x = {change} %}}{{% endfor %}}x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 1000000000}) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.rjust(width) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ '\t'.expandtabs(tabsize=1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'|center(width=1000000000) }}",
        "{{ ['a']|map('center', 1000000000)|list }}",
        "{{ 'a\nb'|indent(1000000000) }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{{ [1]|batch(1000000000, 'x')|list }}",
        "{{ range(1000000000) }}",
        "{{ range(10 ** 18) }}",
        "{{ 1 / 0 }}",
        "{{ ('a' * 99999)|replace('a', 'c' * 9999) }}",
        "{{ ('a' * 99999).replace('a', 'c' * 9999) }}",
        "{{ ('a' * 99999).join(['b'] * 99999) }}",
        "{{ (['b'] * 99999)|join('a' * 99999) }}",
        doubled("ns.x ~ ns.x"),
        doubled("ns.x + ns.x"),
        doubled("ns.x + ns.x", "[1]"),
        doubled("[ns.x, ns.x]|join"),
        doubled("''.join([ns.x, ns.x])"),
        doubled("ns.x.replace('a', 'aa')"),
        doubled("ns.x|replace('a', 'aa')"),
    ],
)
def test_nothing_huge_is_built(source: str) -> None:
    began = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError, match="cannot render"):
            ChatTemplate(source).render({"messages": [{"a": [1]}], "width": 1_000_000_000})
        assert tracemalloc.get_traced_memory()[1] < 8 * TEXT_CHARS_MAX
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < 10, "one operation has no time limit"


def test_what_templates_do_is_not_hindered() -> None:
    source = (
        "{{ 'a' ~ 1 ~ none ~ 'b' }}|{{ '%s-%05d' % ('x', 7) }}|{{ '{:>4}|{}'.format('y', 123456789) }}|"
        "{{ ['a', 'b']|join(', ') }}|{{ ', '.join(['a', 'b']) }}|{{ 'aXb'|replace('X', '\n')|indent(4) }}|"
        "{{ [1, 2] + [3] }}|{{ messages|map(attribute='role')|list }}|{{ 'ab'|center(6) }}|{{ 2 * 3 + 1 }}|"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}|{{ {'a': 1}|tojson(indent=2) }}"
    )
    assert ChatTemplate(source).render({"messages": [{"role": "user"}, {"role": "tool"}]}) == (
        "a1Noneb|x-00007|   y|123456789|a, b|a, b|a\n    b|[1, 2, 3]|['user', 'tool']|  ab  |7|1|{\n  \"a\": 1\n}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os }}",
        "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ __tick__.__globals__ }}",
        "{{ __concatenated__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages.__getattribute__('__class__') }}",
        "{{ (1.5).__format__('9') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
        "{{ messages[0].update(a=1) }}",
        "{% do messages.append(1) %}",
        "{{ messages|first|attr('update') }}",
    ],
)
def test_known_ways_out_of_a_sandbox_lead_nowhere(source: str) -> None:
    messages = [{"role": "user"}]
    try:
        shown = ChatTemplate(source).render({"messages": messages})
    except TemplateError:
        shown = ""
    assert not any(word in shown for word in ("class", "module", "globals", "cell", "Context", "root:", "uid=")), shown
    assert messages == [{"role": "user"}]
