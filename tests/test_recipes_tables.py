"""Tables: a document a row, as it stands there, and a broken row costs itself alone."""

import csv
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.corpus import open_corpus
from recipes.documents import CorpusError
from tests.support.documents import outcome_of_corpus
from tests.support.texts import documents


def _write_csv(path: Path, rows: list[list[str]], **options: Any) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, **options).writerows(rows)


def _write_parquet(path: Path, texts: pa.Array, **options: Any) -> None:
    table = pa.table({"id": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(table, path, **options)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_has_a_document_a_row(tmp_path: Path, suffix: str) -> None:
    texts = [f"é {n}\n" for n in range(300)]
    if suffix == ".csv":
        _write_csv(tmp_path / "a.csv", [["id", "text"], *(["1", text] for text in texts)])
    else:
        _write_parquet(tmp_path / "a.parquet", pa.array(texts), row_group_size=70)
    assert documents(open_corpus(tmp_path)) == texts
    message = (
        rf"a\{suffix}: expected a table with one column 'body', got 'id', 'text'\. Repair it, or"
    )
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path, text_field="body"))
    found, left_out = outcome_of_corpus(
        open_corpus(tmp_path, text_field="body", skip_unreadable=True)
    )
    assert (found, len(left_out)) == ([], 1)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8"), max_size=10), min_size=2, max_size=2),
        max_size=5,
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_what_was_written_is_read_from_a_table(
    rows: list[list[str]], end: str, is_marked: bool
) -> None:
    texts = [text for text, _ in rows]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "a.csv")
        _write_csv(path, [["text", "b"], *rows], quoting=csv.QUOTE_ALL, lineterminator=end)
        if is_marked:
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert outcome_of_corpus(open_corpus(path)) == (texts, [])
        _write_parquet(Path(name, "a.parquet"), pa.array(texts, pa.string()))
        assert outcome_of_corpus(open_corpus(Path(name, "a.parquet"))) == (texts, [])


def test_a_cell_is_the_text_that_stands_there(tmp_path: Path) -> None:
    texts = ["None", "007", "", "NA", "nan", "1e5", "true", ' "', "#x", "x" * 10**6]
    path = tmp_path / "a.csv"
    _write_csv(path, [["text", "n"], *([text, "1"] for text in texts)])
    path.write_text(path.read_text().replace("\n", "\n\n"))
    assert outcome_of_corpus(open_corpus(path)) == (texts, [])


@pytest.mark.parametrize(
    ("content", "texts", "messages"),
    [
        (b"", [], ["x.csv: expected a table with one column 'text', got no field."]),
        (b"text,n\n", [], []),
        (b"text,text\na,b\n", [], ["x.csv: expected .*, got 'text', 'text'."]),
        (
            b'"text',
            [],
            ["x.csv: expected a file .* that can be read, got 'unexpected end of data'"],
        ),
        (
            b'n,text\n1,a\n2\n\n3,b,c\n4,"d\nd"\n5,e\xff\n"\xff\n",\n6,f',
            ["a", "d\nd", "f"],
            [
                r"x.csv:3: expected CSV, got a broken line \(1 cells for 2 columns\)\. Repair or",
                r"x.csv:5: expected CSV, got a broken line \(3 cells",
                "x.csv:8: expected UTF-8, got byte 0xff",
                "x.csv:9: expected UTF-8",
            ],
        ),
        (
            b'n,text\n1,"a"b\n2,c\r3,d\n4,e\n5,"f\n6,g\n',
            ["e"],
            [
                r"x.csv:2: expected CSV .*, got a broken line \(',' expected after '\"'\)",
                r"x.csv:3: expected CSV .*, got a broken line \(new-line character",
                r"x.csv:5: expected CSV .*, got a broken line \(unexpected end of data\)",
            ],
        ),
        (
            b"text\n" + b"a" * 101 + b"\n" + b"b" * 100,
            ["b" * 100],
            [r"x.csv:2: .*--data.max_object_size, got .*field larger than field limit \(100\)"],
        ),
    ],
)
def test_a_broken_row_is_named_and_costs_itself_alone(
    tmp_path: Path, content: bytes, texts: list[str], messages: list[str]
) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    found, left_out = outcome_of_corpus(
        open_corpus(tmp_path, skip_unreadable=True, max_object_size=100)
    )
    assert found == texts
    assert len(left_out) == len(messages)
    for message, pattern in zip(left_out, messages, strict=True):
        assert re.search(pattern, message), message
    if left_out:
        with pytest.raises(CorpusError, match=messages[0]):
            documents(open_corpus(tmp_path, max_object_size=100))


@pytest.mark.parametrize("name", ["a[1]", "a*", "a::b", "[x] d/a"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_name_is_no_pattern(tmp_path: Path, name: str, suffix: str) -> None:
    for each in ("a1", "x d/a", name):
        path = tmp_path / f"{each}{suffix}"
        path.parent.mkdir(exist_ok=True)
        if suffix == ".csv":
            path.write_text(f"text\n{len(each)}")
        else:
            with path.open("wb") as file:
                _write_parquet(file, pa.array([f"{len(each)}"]))
    assert documents(open_corpus(path)) == [f"{len(name)}"]


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_kind_of_string_is_text(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    _write_parquet(path, pa.array(["one", None, "", "three"]).cast(kind))
    message = r"a\.parquet, row 2: expected a string in the field 'text', got null\. Repair it, or"
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(path))
    found, left_out = outcome_of_corpus(open_corpus(path, skip_unreadable=True))
    assert found == ["one", "", "three"]
    assert len(left_out) == 1


@pytest.mark.parametrize("kind", [pa.int64(), pa.binary(), pa.list_(pa.string()), pa.null()])
def test_a_column_of_something_else_is_one_mistake(tmp_path: Path, kind: pa.DataType) -> None:
    _write_parquet(tmp_path / "a.parquet", pa.array([None, None], kind))
    message = rf"a\.parquet: expected strings in the column 'text', got {str(kind)[:4]}"
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path))
    found, left_out = outcome_of_corpus(open_corpus(tmp_path, skip_unreadable=True))
    assert (found, len(left_out)) == ([], 1)


def test_rows_are_few_none_or_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    _write_parquet(path, pa.array([], pa.string()))
    assert outcome_of_corpus(open_corpus(path)) == ([], [])
    schema = pa.schema({"text": pa.string(), "text.x": pa.int64()})
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for texts in ([], [b"a"], [], [b"\xff", b"b"]):
            column = pa.array(texts, pa.binary()).view(pa.string())
            writer.write_table(pa.table([column, [0] * len(texts)], schema=schema))
    found, left_out = outcome_of_corpus(open_corpus(path, skip_unreadable=True))
    assert found == ["a", "b"]
    assert len(left_out) == 1
    assert "a.parquet, row 2: expected UTF-8, got 'utf-8' codec can't decode byte" in left_out[0]


def test_a_broken_table_is_named_and_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1junk")
    message = r"x\.parquet: expected a file .* that can be read, got 'Parquet magic"
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path))

    _write_parquet(path, pa.array(["a"]), store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"id", b"\xff\xff"))
    with pytest.raises(CorpusError, match=r"x\.parquet: expected a file .*, got ''utf-8' codec"):
        documents(open_corpus(tmp_path))

    texts = [f"{n}" * 100 for n in range(1000)]
    _write_parquet(path, pa.array(texts), row_group_size=100, use_dictionary=False)
    group = pyarrow.parquet.read_metadata(path).row_group(4).column(1)
    content = bytearray(path.read_bytes())
    end = group.data_page_offset + group.total_compressed_size
    content[group.data_page_offset + 40 : end] = b"\xff" * (end - group.data_page_offset - 40)
    path.write_bytes(content)
    found, left_out = outcome_of_corpus(open_corpus(tmp_path, skip_unreadable=True))
    assert 300 < len(found) <= 400
    assert found == texts[: len(found)]
    assert len(left_out) == 1
    assert re.search(r"x\.parquet: expected .*, got '(?!None')[^\n]+'\. Make", left_out[0])
