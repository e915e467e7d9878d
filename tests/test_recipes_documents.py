"""Files read in pieces: the same documents for every size of a block, and every mistake named."""

import csv
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from recipes import documents as reader
from recipes.corpus import Corpus, open_corpus, standard_library
from recipes.documents import CorpusError, Piece
from recipes.tokenizer import encode, train_tokenizer
from tests.support.texts import documents

SUFFIXES = (".txt", ".json", ".jsonl")
SIZES = [(2**20, 2**16), (1, 3), (5, 8), (64, 64)]  # of a block, of a piece
# Much of it is nearly JSON; some of it is no UTF-8.
SCRAPS = [
    *(b'{"text": "', b'"}', b'"text"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\r\n"),
    *(b'{"text": "a b"}', b'{"text": {"text": [1]}}', b'{"other": 1}', b'{"text": ""}', b"[[[["),
    *(b"\\ud83d", b"\\ude00", b"\\u00", b"\\", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\x00"),
    *(b"12", b"-", b"1e", b"tru", b"null", b"NaN", b"9" * 5000, "é模😀".encode(), b"word word\nw"),
]


@contextmanager
def _sizes(block: int, piece: int) -> Iterator[None]:
    before = reader.BLOCK_LENGTH, reader.PIECE_LENGTH
    reader.BLOCK_LENGTH, reader.PIECE_LENGTH = block, piece
    try:
        yield
    finally:
        reader.BLOCK_LENGTH, reader.PIECE_LENGTH = before


def _outcome(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Documents, and what was left out."""
    left_out: list[str] = []
    found, parts = [], []
    for piece in corpus.pieces(lambda error: left_out.append(str(error))):
        assert len(piece.text) <= reader.PIECE_LENGTH
        parts.append(piece.text)
        if piece.is_last:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found, left_out


# ----------------------------------------------------------------------------- any size, any text


@settings(max_examples=60)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=5),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_what_was_written_is_read(texts: list[str], indent: int | None, is_ascii: bool) -> None:
    objects = [{"other": [{}, 1.5], "text": text} for text in texts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.json").write_text(
            json.dumps(objects, indent=indent, ensure_ascii=is_ascii), encoding="utf-8"
        )
        (folder / "b.jsonl").write_text(
            "\n\n".join(json.dumps(each, ensure_ascii=is_ascii) for each in objects),
            encoding="utf-8",
        )
        for number, text in enumerate(texts):
            (folder / f"c{number}.txt").write_bytes(("\ufeff" + text).encode())
        for block, piece in SIZES:
            with _sizes(block, piece):
                found = documents(open_corpus(folder))
            assert found == [text for text in texts * 3 if text]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(SCRAPS), max_size=12).map(b"".join), st.sampled_from(SUFFIXES))
@example(b'[{"text": "a"},\n {"text": "b"', ".json")
@example(b'[{"text": "a"}]\n\xc3', ".json")
@example(b'[{"text": "a"}, 12', ".json")
@example(b'\n\n{"text": "\xff"}\n{"text": "a"}', ".jsonl")
@example(b"\n\na\xe6\xa8", ".txt")
def test_any_bytes_are_read_or_named_whatever_the_size_of_a_block(
    content: bytes, suffix: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, f"x{suffix}")
        path.write_bytes(content)
        lenient = open_corpus(path, skip_unreadable=True)
        expected = _outcome(lenient)
        for block, piece in SIZES[1:]:
            with _sizes(block, piece):
                assert _outcome(lenient) == expected
        found, left_out = expected
        for message in left_out:
            place = re.match(rf"{re.escape(str(path))}:(\d+): expected .*, got .*\. \w+", message)
            assert place is not None, message
            assert 1 <= int(place[1]) <= content.count(b"\n") + 1
        if left_out:
            with pytest.raises(CorpusError, match=re.escape(left_out[0])):
                documents(open_corpus(path))
        else:
            assert documents(open_corpus(path)) == [text for text in found if text]


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", [None, QWEN])
def test_pieces_have_the_tokens_of_the_whole(pattern: str | None) -> None:
    texts = documents(standard_library(300_000))
    texts.append("Wort für Wort\n\nAbsatz, 'tis 1 2\n  x y  z\n" * 50)
    tokenizer: Tokenizer = train_tokenizer(map(_whole, texts), vocab_size=1000)
    if pattern is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    expected = [ids for _, ids in encode(tokenizer, map(_whole, texts))]
    with _sizes(2**20, 512):
        pieces = [list(reader.cut([text])) for text in texts]
    assert sum(map(len, pieces)) > 200
    found = [[i for _, ids in encode(tokenizer, each) for i in ids] for each in pieces]
    assert found == expected


def _whole(text: str) -> Piece:
    return Piece(text, is_last=True)


def test_text_without_words_is_cut_all_the_same() -> None:
    with _sizes(2**20, 64):
        pieces = list(reader.cut(["模" * 100, "型" * 100]))
    assert [len(piece.text) for piece in pieces] == [64, 64, 64, 8]
    assert "".join(piece.text for piece in pieces) == "模" * 100 + "型" * 100
    assert [piece.is_last for piece in pieces] == [False, False, False, True]


# ------------------------------------------------------------------------------- large and nested


def test_a_line_of_100_megabytes_is_text_in_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"0123456789" * 10**7)
    pieces = list(open_corpus(tmp_path).pieces())
    assert sum(len(piece.text) for piece in pieces) == 10**8
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_an_object_of_100_megabytes_is_named_with_the_options_to_change(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    small, large = '{"text": "small"}', json.dumps({"text": "0123456789" * 10**7})
    lines = [small, large, small]
    path.write_text("\n".join(lines) if suffix == ".jsonl" else "[" + ",\n".join(lines) + "]")
    message = rf"x\{suffix}:2: expected an object of at most 8,000,000 characters, got a longer"
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path))
    found, left_out = _outcome(open_corpus(tmp_path, skip_unreadable=True))
    # Where the next object of a list begins is known only to one who has read this one.
    assert found == ["small"] * (2 if suffix == ".jsonl" else 1)
    assert len(left_out) == 1
    whole = documents(open_corpus(tmp_path, max_object_size=200_000_000))
    assert [len(text) for text in whole] == [5, 10**8, 5]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("block", [3, 2**20])
def test_the_largest_object_is_counted_in_characters(
    tmp_path: Path, suffix: str, block: int
) -> None:
    line = '{"text": "é模😀"}'
    (tmp_path / f"x{suffix}").write_text(line, encoding="utf-8")
    with _sizes(block, 2**16):
        assert documents(open_corpus(tmp_path, max_object_size=len(line)))
        with pytest.raises(CorpusError, match=rf"x\{suffix}:1: expected an object of at most 14 "):
            documents(open_corpus(tmp_path, max_object_size=len(line) - 1))


@pytest.mark.parametrize("depth", [100, 100_000])
def test_nested_objects_beside_the_text_are_read_or_named(tmp_path: Path, depth: int) -> None:
    nested = '{"text": "a", "more": ' + '[{"a":' * depth + "1" + "}]" * depth + "}"
    for suffix in (".json", ".jsonl"):
        (tmp_path / f"x{suffix}").write_text(nested)
    if depth == 100:
        assert documents(open_corpus(tmp_path)) == ["a", "a"]
    else:
        found, left_out = _outcome(open_corpus(tmp_path, skip_unreadable=True))
        assert found == []
        assert [re.search(r"x\.\w+:1: .* line \((\w+ \w+)", each)[1] for each in left_out] == [
            "maximum recursion",
            "maximum recursion",
        ]


def test_the_column_of_a_mistake_far_inside_is_right(tmp_path: Path) -> None:
    before = '[{"text": "a"},\n{"text": "b"},  '
    (tmp_path / "x.json").write_text(before + '{"text" "c"}]')
    for block, piece in SIZES:
        with _sizes(block, piece), pytest.raises(CorpusError, match=r"x\.json:2: .*, column 25\)"):
            documents(open_corpus(tmp_path))


def test_empty_files_are_empty_documents_or_broken_json(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        (tmp_path / f"x{suffix}").touch()
    found, left_out = _outcome(open_corpus(tmp_path, skip_unreadable=True))
    assert found == [""], "an empty text"
    assert len(left_out) == 1
    assert "x.json:1: expected JSON" in left_out[0]


# --------------------------------------------------------------------------------- what is no file


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _circular(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_dangling, "expected a file or folder that can be read, got 'No such file or directory'"),
        (
            _circular,
            "expected a file or folder that can be read, got 'Too many levels of symbolic links'",
        ),
        (
            os.mkfifo,
            r"expected a file or folder that can be read, got 'a pipe, a socket or a device'",
        ),
    ],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_file_is_named_and_never_waited_for(
    tmp_path: Path, make: Callable[[Path], None], message: str, suffix: str
) -> None:
    (tmp_path / "a.txt").write_text("fine")
    make(tmp_path / f"x{suffix}")
    strict = open_corpus(tmp_path)
    for read in (strict.sums, lambda: documents(strict)):
        with pytest.raises(CorpusError, match=rf"x\{suffix}: {message}"):
            read()
    lenient = open_corpus(tmp_path, skip_unreadable=True)
    found, left_out = _outcome(lenient)
    assert found == ["fine"]
    assert len(left_out) == 1
    assert list(lenient.sums()) == ["a.txt", f"x{suffix}"]


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of somebody who may not read everything; this process is that somebody."""
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() != 0:
            yield Path(name)
            return
        os.chown(name, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


def test_no_permission_is_named(unprivileged: Path) -> None:
    (unprivileged / "a.txt").write_text("fine")
    secret = unprivileged / "x.txt"
    secret.write_text("secret")
    secret.chmod(0)
    strict = open_corpus(unprivileged)
    for read in (strict.sums, lambda: documents(strict)):
        with pytest.raises(
            CorpusError, match=r"x\.txt: expected .* got 'Permission denied'\. Make"
        ):
            read()
    found, left_out = _outcome(open_corpus(unprivileged, skip_unreadable=True))
    assert found == ["fine"]
    assert len(left_out) == 1

    folder = unprivileged / "sub"
    folder.mkdir(0)
    try:
        with pytest.raises(
            CorpusError, match=r"sub: expected a file or folder that can be read, got 'Perm"
        ):
            open_corpus(unprivileged)
    finally:
        folder.chmod(0o700)


def test_a_folder_is_a_folder_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "x.txt").mkdir()
    (tmp_path / "x.txt" / "y.txt").write_text("inside")
    assert documents(open_corpus(tmp_path)) == ["inside"]


def test_a_link_to_a_folder_is_named_since_it_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(CorpusError, match=r"again: expected .*, got 'a link to a folder"):
        open_corpus(tmp_path)


def test_a_name_that_is_no_utf8_can_be_a_corpus(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.txt")).write_text("fine")
    corpus = open_corpus(tmp_path)
    assert documents(corpus) == ["fine"]
    (name,) = corpus.sums()
    assert name == "\udcff\n.txt"


# ---------------------------------------------------------------------------------------- tables


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
    found, left_out = _outcome(open_corpus(tmp_path, text_field="body", skip_unreadable=True))
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
        assert _outcome(open_corpus(path)) == (texts, [])
        _write_parquet(Path(name, "a.parquet"), pa.array(texts, pa.string()))
        assert _outcome(open_corpus(Path(name, "a.parquet"))) == (texts, [])


def test_a_cell_is_the_text_that_stands_there(tmp_path: Path) -> None:
    texts = ["None", "007", "", "NA", "nan", "1e5", "true", ' "', "#x", "x" * 10**6]
    path = tmp_path / "a.csv"
    _write_csv(path, [["text", "n"], *([text, "1"] for text in texts)])
    path.write_text(path.read_text().replace("\n", "\n\n"))
    assert _outcome(open_corpus(path)) == (texts, [])


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
    found, left_out = _outcome(open_corpus(tmp_path, skip_unreadable=True, max_object_size=100))
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
    found, left_out = _outcome(open_corpus(path, skip_unreadable=True))
    assert found == ["one", "", "three"]
    assert len(left_out) == 1


@pytest.mark.parametrize("kind", [pa.int64(), pa.binary(), pa.list_(pa.string()), pa.null()])
def test_a_column_of_something_else_is_one_mistake(tmp_path: Path, kind: pa.DataType) -> None:
    _write_parquet(tmp_path / "a.parquet", pa.array([None, None], kind))
    message = rf"a\.parquet: expected strings in the column 'text', got {str(kind)[:4]}"
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path))
    found, left_out = _outcome(open_corpus(tmp_path, skip_unreadable=True))
    assert (found, len(left_out)) == ([], 1)


def test_rows_are_few_none_or_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    _write_parquet(path, pa.array([], pa.string()))
    assert _outcome(open_corpus(path)) == ([], [])
    schema = pa.schema({"text": pa.string(), "text.x": pa.int64()})
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for texts in ([], [b"a"], [], [b"\xff", b"b"]):
            column = pa.array(texts, pa.binary()).view(pa.string())
            writer.write_table(pa.table([column, [0] * len(texts)], schema=schema))
    found, left_out = _outcome(open_corpus(path, skip_unreadable=True))
    assert found == ["a", "b"]
    assert len(left_out) == 1
    assert "a.parquet, row 2: expected UTF-8, got 'utf-8' codec can't decode byte" in left_out[0]


def test_a_broken_table_is_named_and_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1junk")
    message = r"x\.parquet: expected a file .* that can be read, got 'Parquet magic"
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path))

    texts = [f"{n}" * 100 for n in range(1000)]
    _write_parquet(path, pa.array(texts), row_group_size=100, use_dictionary=False)
    group = pyarrow.parquet.read_metadata(path).row_group(4).column(1)
    content = bytearray(path.read_bytes())
    end = group.data_page_offset + group.total_compressed_size
    content[group.data_page_offset + 40 : end] = b"\xff" * (end - group.data_page_offset - 40)
    path.write_bytes(content)
    found, left_out = _outcome(open_corpus(tmp_path, skip_unreadable=True))
    assert 300 < len(found) <= 400
    assert found == texts[: len(found)]
    assert len(left_out) == 1
    assert re.search(r"x\.parquet: expected .*, got '(?!None')[^\n]+'\. Make", left_out[0])


def test_a_cause_without_a_number_is_told_in_one_line() -> None:
    told = str(reader.unreadable("a", OSError("Corrupt data.\n  Unexpected end")))
    assert told.startswith("a: expected a file or folder that can be read, got 'Corrupt data. Unex")


def test_tables_beside_text_are_an_error_with_both_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text\na\n")
    (tmp_path / "LICENSE.txt").write_text("free")
    message = r"expected tables or .*, got '.*/data/train\.csv' beside '.*/LICENSE\.txt'\. .*--data"
    for is_skipping in (False, True):
        with pytest.raises(CorpusError, match=message):
            open_corpus(tmp_path, skip_unreadable=is_skipping)
    assert documents(open_corpus(tmp_path / "data")) == ["a"]
    assert documents(open_corpus(tmp_path / "LICENSE.txt")) == ["free"]


def test_half_a_document_never_runs_on_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"word " * 100_000 + b"end")
    (tmp_path / "b.txt").write_text("next")
    cut = reader.cut

    def damaging_cut(texts: Iterator[str]) -> Iterator[Piece]:
        (tmp_path / "a.txt").write_bytes(b"word " * 100_000 + b"\xff")
        return cut(texts)

    monkeypatch.setattr(reader, "cut", damaging_cut)
    pieces = open_corpus(tmp_path, skip_unreadable=True).pieces()
    assert not next(pieces).is_last
    with pytest.raises(CorpusError, match=r"a\.txt:1: expected UTF-8"):
        list(pieces)
