"""Run the Python examples of a documentation page."""

import re
from pathlib import Path


def run_examples(page: Path, least: int, **names: object) -> None:
    """Run the page's ``python`` blocks, of which there must be ``least``, in one namespace with ``names``."""
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= least
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + block[1], str(page), "exec"), names)
