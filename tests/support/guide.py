"""The code of docs/fsdp1-vs-fsdp2.md."""

import re

from benchmarks.update_tables import GUIDE

PAGE = GUIDE.read_text()

SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)

_before, _steps = PAGE.split("## Migrate in three steps")

_steps, _wrong = _steps.split("## Common mistakes")

STEPS = SNIPPET.findall(_steps)

WRONG = SNIPPET.findall(_wrong)

ENGINE_NAMES = ("FSDP1", "FSDP2", "here")
