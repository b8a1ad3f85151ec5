"""What the planning commands print. `python tests/golden_cli.py` rewrites tests/golden/cli; look at the diff."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fusecomp import cli

FOLDER = Path(__file__).parent / "golden" / "cli"
COMMANDS = {
    "tiles_tight": "tiles --n 4096 --d 256 --device a100-40 --heads 8 --budget 40KB",
    "io_chapter": "io --n 1024 --d 64 --sram 25000",
    "io_symbolic": "io --symbolic",
    "io_document": "io --n 18000 --d 128 --sram 100KB",
    "kv_chapter": "kv --layers 40 --hidden 5120 --dtype fp16 --block 16 --tokens 90 --max-context 2048",
    "kv_memory": "kv --layers 32 --hidden 1024 --dtype bf16 --tokens 3000 --max-context 131072 --memory 40GB",
}
"""One ranking alone: what ranks tiles is fitted again now and then."""


def printed(command: str) -> str:
    """What `fusecomp COMMAND` prints where there is no terminal."""
    found = CliRunner().invoke(cli.app, command.split(), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        (FOLDER / f"{name}.txt").write_text(printed(command))
