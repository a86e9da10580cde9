"""docs/traffic.md: its commands run as they stand there, with the printed results."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.hps_server import start_hps
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from tests.integration.test_automatic_rollback import tables
from tests.support.network_variants import variant
from tests.support.small_models import RANKING

PAGE = (Path(__file__).parents[2] / "docs/traffic.md").read_text()
TRANSCRIPT = re.compile(
    r"<!-- begin transcript -->\n```sh\n(.*?)```\n```\n(.*?)```\n<!-- end transcript -->", re.DOTALL
)


def test_commands_print_what_the_page_shows(tmp_path):
    transcripts = TRANSCRIPT.findall(PAGE)
    assert len(transcripts) == PAGE.count("<!-- begin transcript -->") >= 6
    spec = ModelSpec.model_validate(RANKING | {"name": "ctr"})
    for version in (1, 2):
        write_version(tmp_path / "models", spec, version, tables(), dense=variant("same"))
    with start_hps(tmp_path, models={"serve": {"ctr": {"version": 1}}}) as server:
        for commands, expected in transcripts:
            printed = ""
            for line in commands.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "hps"
                command = [str(Path(sys.executable).with_name("hps")), *arguments]
                command += ["--server", f"http://{server.admin}"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert (done.stderr, done.returncode) == ("", 0)
                printed += done.stdout
            assert [x.rstrip() for x in printed.splitlines()] == expected.splitlines()
