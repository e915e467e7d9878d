"""Links, pipes and folders among the files of a corpus: named, and never waited for."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.corpus import open_corpus
from recipes.documents import CorpusError
from tests.support.documents import SUFFIXES, outcome_of_corpus
from tests.support.texts import documents


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
    found, left_out = outcome_of_corpus(lenient)
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
    found, left_out = outcome_of_corpus(open_corpus(unprivileged, skip_unreadable=True))
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
