"""What the README says is what the project does."""

import re
from pathlib import Path

from lightning_fsdp.core.sharded_module import ShardedModule

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_file_that_the_readme_names_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    named = re.findall(r"recipes/[a-z0-9_]+\.yaml", README)
    assert links
    assert named
    for path in {*links, *named}:
        assert (ROOT / path).exists(), path


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"\bmake ([a-z]+)", README))
    makefile = (ROOT / "Makefile").read_text()
    assert {"bench", "test", "train", "tensorboard"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_refused_method_of_fsdp2_is_in_the_readme():
    listed = re.findall(r"`(set_[a-z_]+)`", README)
    for name in listed:
        method = getattr(ShardedModule, name)
        assert method.__doc__.startswith("Refused."), name
