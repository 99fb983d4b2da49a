"""`alar.domains.catalogue`: the same interface for both domains, and refusals that name what is
wrong."""

import json

import pytest

from alar.domains import catalogue
from alar.domains.tool.bfcl import PAPER_CATEGORIES
from alar.domains.tool.requests import request_of
from alar.study.params.sections import DOMAINS, QUESTION_TYPES


@pytest.mark.parametrize("name", DOMAINS)
def test_splits_hold_every_type_and_share_no_question(name):
    domain = catalogue.of(name)
    count = 10 * len(domain.types)
    splits = [
        domain.training_questions(count, worlds=2, seed=0),
        domain.validation_questions(count),
        domain.test_questions(count),
    ]
    for split in splits:
        assert len(split) == count and {question.type for question in split} == set(domain.types)
    ids = [{question.id for question in split} for split in splits]
    assert not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    assert domain.test_questions(5) == splits[2][:5]
    solved = domain.solved_questions(len(domain.types), 0)
    assert {item.question.type for item in solved} == set(domain.types)
    assert domain.environment(splits[2]).form is domain.form
    named = [catalogue.embedded_questions(domain, split, count) for split in ("validation", "real")]
    assert named == splits[1:] and set(catalogue.EMBEDDED) == {"validation", "real"}


@pytest.mark.parametrize("name", DOMAINS)
def test_training_questions_are_of_the_types_that_are_named_and_as_often(name):
    domain = catalogue.of(name)
    assert domain.types == QUESTION_TYPES[name]
    first, second = domain.types[:2]
    found = [
        q.type
        for q in domain.training_questions(12, worlds=2, seed=0, types=[first, second, second])
    ]
    assert (found.count(first), found.count(second)) == (4, 8)
    with pytest.raises(ValueError, match=f"essay.*{first}"):
        domain.training_questions(2, worlds=1, seed=0, types=["essay"])


def test_sets_of_any_kind_are_asked_together(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "Who?", "answers": ["me"]}\n' * 3)
    domain = catalogue.of("search")
    found = catalogue.questions_of_sets(domain, ["real", "", str(file), "validation"], 2)
    assert found[:2] == domain.test_questions(2) and found[4:] == domain.validation_questions(2)
    assert [question.type for question in found[2:4]] == ["mine", "mine"]
    with pytest.raises(ValueError, match="nqq"):
        catalogue.questions_of_sets(domain, ["real", "nqq"], 2)


def test_an_unknown_domain_is_refused():
    with pytest.raises(ValueError, match="serch.*search, tool"):
        catalogue.of("serch")


def test_calls_are_executed_only_where_their_functions_exist():
    tool = catalogue.of("tool")
    own, foreign = tool.test_questions(3), tool.load_questions(PAPER_CATEGORIES[0], limit=3)
    assert tool.environment(own).final == tool.environment().final == ("answer",)
    assert tool.environment(foreign).final == ("answer", "call")
    with pytest.raises(ValueError, match="ask them in two runs"):
        tool.environment([*own, *foreign])


def test_a_name_that_is_no_set_is_answered_with_those_that_are():
    with pytest.raises(ValueError, match="simple_java.*simple_python"):
        catalogue.of("tool").load_questions("simple_java")


def test_tool_questions_come_from_a_file_of_toolmind_rows(tmp_path):
    function = {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "int"}}}},
    }
    rows = [
        {
            "conversations": [
                {"role": "user", "content": f"add {n}"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "add", "arguments": {"a": n}}}],
                },
            ],
            "tools": [function],
        }
        for n in range(40)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = catalogue.of("tool").load_questions(path)
    held_out = catalogue.of("tool").load_questions(path, test=True)
    assert (
        25 < len(found) < 40 and held_out and not {q.id for q in found} & {q.id for q in held_out}
    )
    assert request_of(found[0]).truth[0][0]["add"]["a"] == [int(found[0].text.split()[1])]
    assert catalogue.of("tool").environment(found).final == ("answer", "call")
    path.write_text(json.dumps(rows[0] | {"tools": []}) + "\n")
    with pytest.raises(ValueError, match="train.*no functions: 1"):
        catalogue.of("tool").load_questions(path)
