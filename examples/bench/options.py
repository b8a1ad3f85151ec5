"""The command line that the benchmarks of this folder share."""

from __future__ import annotations

import argparse

import torch


def options(description: str | None) -> argparse.Namespace | None:
    """[OUT.json] and --only NAMES of a benchmark's command line; None where there is no GPU to time on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", nargs="?", default="")
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    if torch.cuda.is_available():
        return chosen
    print("no GPU: nothing is timed")
    return None
