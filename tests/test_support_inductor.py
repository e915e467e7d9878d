"""Compiled code is kept for later runs, but for that of a run that was killed."""

from tests.support.inductor import kept_code


def _compile(parent):
    with kept_code(parent) as code:
        code.mkdir(exist_ok=True)
        (code / "some.so").touch()


def _kept(parent):
    with kept_code(parent) as code:
        return [path.name for path in code.glob("*")]


def test_code_is_kept_unless_a_process_was_killed(tmp_path):
    _compile(tmp_path)
    assert _kept(tmp_path) == _kept(tmp_path) == ["some.so"]
    (folder,) = tmp_path.iterdir()
    (folder / "running-1").touch()
    with kept_code(tmp_path) as code, kept_code(tmp_path):
        assert not code.exists()
    assert _kept(tmp_path) == []
    _compile(tmp_path)
    with kept_code(tmp_path):  # which could be compiling, so nothing goes
        (folder / "running-1").touch()
        assert _kept(tmp_path) == ["some.so"]
    assert _kept(tmp_path) == []
