"""Which files make a corpus, what a document is, and what cannot be read."""

from pathlib import Path

import pytest

from recipes.corpus import open_corpus, standard_library
from recipes.documents import CorpusError
from tests.support.texts import NUM_DOCUMENTS, documents, text, write_folder


def test_every_kind_of_file_is_read_in_the_order_of_the_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "corpus")
    assert documents(open_corpus(folder)) == [text(n) for n in range(NUM_DOCUMENTS)]


def test_text_comes_as_it_stands_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\tthree\x00\n".encode())
    (tmp_path / "b.json").write_text(' {"text": "\\u00e9\\ud83d\\ude00", "other": [1]} ')
    (tmp_path / "c.jsonl").write_text('\n{"text": "x"}\r\n   \n{"text": ""}')
    assert documents(open_corpus(tmp_path)) == [
        "one\r\ntwo\tthree\x00\n",
        "é😀",
        "x",
    ]


def test_a_single_file_is_a_corpus(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "corpus")
    assert len(documents(open_corpus(folder / "c.jsonl"))) == 2


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "[a,"}, {"text": "\\\\"}]',
        '{"text": "[a,"}\n{"text": "\\\\"}\n',
        '[{"text": "[a,"}]\n[{"text": "\\\\", "more": [{}, []]}]',
        '{"text": "[a,", "more": {"text": [1, "]"]}}[][{"text": "\\\\"}]',
    ],
)
def test_a_json_file_holds_objects_and_lists_of_them_one_after_another(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "x.json").write_text(content)
    assert documents(open_corpus(tmp_path)) == ["[a,", "\\"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"one\ntwo\nthr\xffee", r"x\.txt:3: expected UTF-8, got byte 0xff\. Convert"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": "b"', r"x\.jsonl:3: expected JSON, got a broken"),
        (
            "x.jsonl",
            b'{"text": "a"}\n{"tex": 1, "id": 2}',
            r"x\.jsonl:2: .*got 'tex', 'id'\. Repair it, or name",
        ),
        ("x.jsonl", b"{}", r"x\.jsonl:1: expected an object with the field 'text', got no field"),
        (
            "x.jsonl",
            b'{"text": 3}',
            r"x\.jsonl:1: expected a string in the field 'text', got 3\.",
        ),
        ("x.jsonl", b'{"text": null}', r"x\.jsonl:1: expected a string .* got null"),
        (
            "x.jsonl",
            b'"text"',
            r"x\.jsonl:1: expected an object with the field 'text', got \"text\"",
        ),
        ("x.jsonl", b'{"text": "\\ud800"}', r"x\.jsonl:1: .*half of a surrogate pair \(\\ud800\)"),
        ("x.jsonl", b"[" * 100_000, r"x\.jsonl:1: expected JSON, got a broken line"),
        ("x.jsonl", b'{"n": 1' + b"0" * 5000 + b"}", r"x\.jsonl:1: expected JSON, got a broken"),
        ("x.json", b'{"text": "a"}\n text', r"x\.json:2: .*\(Expecting value, column 2\)"),
        (
            "x.json",
            b'[\n{"text": "a"},\n\n{"txt": "b"}\n]',
            r"x\.json:4: expected an object with the field 'text', got 'txt'",
        ),
        ("x.json", b'[{"text": "a"},\n{"text": "b"}', r"x\.json:2: .*no ',' or '\]'"),
        (
            "x.json",
            b'[{"text": "a"},\n]',
            r"x\.json:2: expected JSON, got a broken line \(Expecting",
        ),
        ("x.json", b'[{"text": "a"} {"text": "b"}]', r"x\.json:1: .*no ',' or '\]'"),
        ("x.json", b'[{"text": "a"},\n"b"]', r"x\.json:2: expected an object .* got \"b\""),
        ("x.json", b'[\n\n{"text": "a}]', r"x\.json:3: expected JSON, got a broken line"),
        ("x.json", b"", r"x\.json:1: expected JSON, got a broken line"),
        ("x.json", b"{\xe9}", r"x\.json:1: expected UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path))


def test_the_field_of_the_text_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"body": "a", "text": 1}')
    assert documents(open_corpus(tmp_path, text_field="body")) == ["a"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CorpusError, match=r"nowhere: expected at least one file of .*, got nothing"
    ):
        open_corpus(tmp_path / "nowhere")
    (tmp_path / "x.md").write_text("x")
    with pytest.raises(CorpusError, match=r"expected at least one file of .*\.txt, got 1 other"):
        open_corpus(tmp_path)
    with pytest.raises(CorpusError, match=r"x\.md: expected at least one file of .*, got 1 other"):
        open_corpus(tmp_path / "x.md")


def test_the_standard_library_is_the_same_mixture_each_time() -> None:
    small, large = standard_library(200_000), standard_library(400_000)
    assert small == standard_library(200_000)
    assert small.files == large.files[: len(small.files)]
    assert 100_000 < sum(path.stat().st_size for path in small.files) <= 200_000
    assert len({path.name[0] for path in large.files}) > 5, "not the beginning of the alphabet only"
    assert not {"test", "tests", "site-packages"} & {p for f in large.files for p in f.parts[:-1]}
    assert len(documents(small)) > 5
    with pytest.raises(CorpusError, match=r"expected this Python's source files within 10 bytes"):
        standard_library(10)
