"""The README's Python runs as it stands there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_python_blocks_run(tmp_path, monkeypatch):
    (tmp_path / "hps").symlink_to(ROOT / "hps", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(block, names)
        assert names["rows"].vectors["user"].shape == (2, 16)
